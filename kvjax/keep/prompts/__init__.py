"""Prompts: methods that change how a prompt is read: tokens dropped between layers, passages, memory tokens."""
