"""Scores: one number per slot; slots with the largest scores stay."""
