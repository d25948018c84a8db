"""Searches for the heads that may share keys and values; `kvjax.train.convert.convert.group_heads` applies them.

All start from the products of heads (`products.py`), so none looks at a whole matrix twice, and all give the
same groups for the same seed.
"""
