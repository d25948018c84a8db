"""Compat: whether a method fits a model, how long its texts may get, and which methods share a cache layout."""
