"""Scores of pages by summaries of their keys: bounds as Quest has them, or centroids."""
