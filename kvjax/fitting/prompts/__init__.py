"""Fits words that change how a prompt is read: memory tokens, restore tokens, distilled scorers."""
