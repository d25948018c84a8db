"""Attention of few queries over a cache, and appends to it, where it lies: dense, in pages, in codes."""
