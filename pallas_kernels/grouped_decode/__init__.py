"""Attention of a few queries over dense codes with scales per group, as KIVI stores them."""
