"""Quantised Hugging Face checkpoints: their tensors under the names and shapes of plain ones, as numbers."""
