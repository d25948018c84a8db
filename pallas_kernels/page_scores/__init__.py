"""Scores of pages by summaries of their keys: Quest's bounds, or centroids."""
