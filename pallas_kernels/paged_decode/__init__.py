"""Attention of a few queries over pages that every (sequence, KV head) names in a table of its own."""
