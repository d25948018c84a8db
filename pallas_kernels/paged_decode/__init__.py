"""Attention of a few queries over pages, with a page table per (sequence, KV head)."""
