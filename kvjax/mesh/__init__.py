"""Which axes of arrays are split over which axes of a mesh: rules, and arrays placed by them."""
