"""Decoding: one new token per row: append, attend, evict."""
