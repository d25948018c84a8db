"""Prompt compression: removes tokens, sentences or documents from a text before a model reads it."""
