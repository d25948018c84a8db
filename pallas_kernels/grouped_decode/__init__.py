"""Attention of a few queries over dense codes with scales of groups, as KIVI stores them."""
