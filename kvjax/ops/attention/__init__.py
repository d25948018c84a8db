"""Attention over tokens: the definition, its forms for prompts, and variants that keep every token."""
