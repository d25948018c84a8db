"""Attention of a few queries over the dense cache of all layers, taken whole."""
