"""Attention over tokens: the definition, its forms for prompts, and its relatives that keep every token."""
