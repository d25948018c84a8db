"""Appends one slot to many KV heads, in place."""
