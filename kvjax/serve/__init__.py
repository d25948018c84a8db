"""Serving: systems as combinations of policies, and the loop that runs them.

A policy is a pure function from a `View` to a `Plan`. The loop yields the actions to take and performs none
itself; `device` performs them, and `sim` adds up their seconds. Methods (`kvjax.methods`) decide which tokens
to keep; nothing here does. Only `device` imports jax.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "run": "kvjax.serve.device.run",
    "Served": "kvjax.serve.device.run",
    "Prompt": "kvjax.serve.device.jobs",
    "Answer": "kvjax.serve.device.jobs",
    "System": "kvjax.serve.grammar",
    "system": "kvjax.serve.systems",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
