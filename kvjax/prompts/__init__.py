"""Prompt compression: a text loses tokens, sentences or documents before any model reads it as a prompt."""
