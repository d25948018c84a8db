"""Compress: from scores to a smaller cache. What a method means for a group of layers, which slots stay, how they move."""
