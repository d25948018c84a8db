"""Whose every page is: a free list, counts, tables, the tree of prefixes, and an audit of all of them."""
