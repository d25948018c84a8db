"""One-off studies: their data and tables in docs/, outside the plain suite (`pytest tests/studies`)."""
