"""Compress: from scores to a smaller cache: which slots stay, how they move, what is stored with them."""
