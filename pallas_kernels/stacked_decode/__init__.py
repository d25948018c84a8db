"""Attention of a few queries over the stacked cache of all layers."""
