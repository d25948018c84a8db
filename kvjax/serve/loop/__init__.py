"""The loop of serving: it yields what is to be done, whoever does it, and keeps the books."""

from __future__ import annotations

from kvjax.serve.loop.effects import Done, Effect, Move, Run, Wait
from kvjax.serve.loop.loop import Loop

__all__ = ["Done", "Effect", "Loop", "Move", "Run", "Wait"]
