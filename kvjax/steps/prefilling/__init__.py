"""Prefilling: many new tokens are read, recorded, scored and compressed."""
