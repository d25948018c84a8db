"""Loops that fits share: gradient descent, cut points, whole-model losses."""
