"""Data: texts from files to packed rows of tokens, prefetched."""
