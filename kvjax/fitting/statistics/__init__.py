"""Fits without gradients: statistics of queries, keys, heads and layers over a few texts."""
