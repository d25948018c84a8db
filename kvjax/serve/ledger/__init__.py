"""Page ownership: a free list, reference counts, tables, the tree of prefixes, and an audit."""
