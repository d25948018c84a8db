"""The serving loop: it yields the actions to take, whoever performs them, and keeps the ledger."""

from __future__ import annotations

from kvjax.serve.loop.effects import Done, Effect, Move, RunIteration, Wait
from kvjax.serve.loop.loop import ServingLoop

__all__ = ["Done", "Effect", "ServingLoop", "Move", "RunIteration", "Wait"]
