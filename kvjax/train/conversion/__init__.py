"""Convert: a trained model's layers become layers of another architecture."""
