"""Attention of all query heads over pages of latents, which are keys and values at once."""
