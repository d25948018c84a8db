"""Prefilling: many new tokens are read, observed, scored and compressed."""
