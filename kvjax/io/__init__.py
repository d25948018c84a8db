"""IO: models, checkpoints, saved caches and gin files, read and written."""
