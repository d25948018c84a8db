"""Mesh: rules for which axes of arrays are split over which axes of a mesh, and arrays placed by them."""
