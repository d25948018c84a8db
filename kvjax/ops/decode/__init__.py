"""Attention of few queries over a cache, and appends to it, in place: dense, in pages, in codes."""
