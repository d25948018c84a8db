"""Attention of a prompt's queries to blocks of keys that were picked for segments of them."""
