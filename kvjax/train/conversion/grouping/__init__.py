"""Searches for heads that may share keys and values, which `group_heads` applies.

All start from the products of heads (`products.py`), so none looks at a whole matrix twice, and all give the
same groups for the same seed.
"""
