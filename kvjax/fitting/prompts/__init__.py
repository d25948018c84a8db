"""Fits of what changes how a prompt is read: memory tokens, restore tokens, distilled scorers."""
