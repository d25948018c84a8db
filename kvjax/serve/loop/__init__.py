"""The serving loop: it yields the actions to take, whoever performs them, and keeps the ledger."""

from __future__ import annotations

from kvjax.serve.loop.effects import Done, Effect, Move, Run, Wait
from kvjax.serve.loop.loop import Loop

__all__ = ["Done", "Effect", "Loop", "Move", "Run", "Wait"]
