"""Compat: whether a method fits a model, how long texts may get, which methods share a cache layout."""
