"""The command line that reproduces a comparison, from the arguments of `compare`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from kvjax.eval.run.cellplan import Custom
from kvjax.eval.tasks.functions import Task, spelled
from kvjax.grammar import Method


def command_of(
    *,
    model: str,
    methods: Sequence[str | Method | Custom] | None = None,
    budgets: Sequence[float | int] | None = None,
    tasks: Sequence[str | Task] | None = None,
    protocols: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    text: Any = None,
    seeds: Sequence[int] = (0,),
    preset: str | None = None,
    scores: bool = False,
    baselines: bool = True,
    gold: bool = False,
    mesh: Any = None,
    rules: Any = None,
) -> str:
    """`kvjax compare` with every option that affects the results; defaults are omitted.

    >>> command_of(model="recall-tiny", methods=["snapkv + int8"], budgets=[0.5, 64], seeds=[0, 1])
    "kvjax compare --model recall-tiny --methods 'snapkv + int8' --budgets 0.5 64 --seeds 0 1"
    """
    several = len(seeds) > 1
    options: dict[str, Any] = {
        "--model": [model],
        "--methods": [m[0] if isinstance(m, tuple) else str(m) for m in methods or ()],
        "--budgets": budgets,
        "--tasks": [*map(spelled, tasks or ())],
        "--protocol": protocols,
        "--samples": [samples] if samples is not None else None,
        "--length": [length] if length is not None else None,
        "--text": [text] if text is not None else None,
        "--seeds" if several else "--seed": seeds if several or tuple(seeds) != (0,) else None,
        "--preset": [preset] if preset is not None else None,
        "--mesh": [mesh] if isinstance(mesh, str) else None,
        "--rules": [rules] if isinstance(rules, str) else None,
    }
    words = [str(word) for name, values in options.items() if values for word in (name, *values)]
    flags = [*(["--scores"] if scores else []), *([] if baselines else ["--no-baselines"])]
    flags += ["--gold"] if gold else []
    return shlex.join(["kvjax", "compare", *words, *flags])
