"""Policies: pure functions of a view. `decide` runs those that a system's words name.

A policy chooses which request runs, how much and when; it never changes a request's output.
"""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.policies.batch import decide

__all__ = ["System", "decide"]
