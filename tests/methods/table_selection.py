"""Rows of methods that choose by what tokens are, by heads and layers, and of merges; see `table.py`."""

from __future__ import annotations

from tests.methods.rows import Row

SELECTION: list[Row] = []
