"""Prompts: methods that change how a prompt is read: dropped tokens, passages, memory tokens."""
