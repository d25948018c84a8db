"""Quantised Hugging Face checkpoints, decoded to the names and shapes of unquantised ones."""
