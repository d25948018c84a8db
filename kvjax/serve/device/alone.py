"""Answers beside those of `kvjax.generate` alone, where two tokens that a number format confuses tie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.api.generate import generate
from kvjax.api.prefill import prefill
from kvjax.api.step import step
from kvjax.models.model import Model
from kvjax.serve.device.jobs import Answer, Prompt

# Two logits tie if they are at most so many steps of the model's number format apart.
STEPS = 2


class Compared(NamedTuple):
    """How many answers have the tokens of `kvjax.generate` alone; have them up to a tie; have others."""

    equal: int
    tied: int
    unequal: int


def compared(
    model: Model,
    requests: Sequence[Prompt],
    answers: Sequence[Answer],
    progress: Callable[[Sequence[Prompt]], Iterable[Prompt]] = iter,
) -> Compared:
    """Compare the answers that ended; where nothing is drawn, the first token that differs may be a tie.

    progress: wraps the requests, to show how many are done.
    """
    counts = [0, 0, 0]
    for one, answer in zip(progress(requests), answers, strict=True):
        if answer.state != "ended":
            continue
        alone = generate(
            model, [one.tokens], method=one.method, max_new_tokens=one.max_new_tokens, stop=one.stop,
            sampler=one.sampler, key=one.key,
        )  # fmt: skip
        want, got = alone.tokens[0].tolist(), answer.tokens.tolist()
        same = want == got
        counts[0 if same else 1 if one.sampler is None and _tie(model, one, want, got) else 2] += 1
    return Compared(*counts)


def _tie(model: Model, one: Prompt, want: list[int], got: list[int]) -> bool:
    """Whether the first tokens that differ have logits that the model's number format hardly tells apart."""
    at = next((i for i, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return False
    logits, cache = prefill(model, [one.tokens], method=one.method, room=at + 1)
    for token in want[:at]:
        logits, cache = step(model, cache, np.array([token], np.int32))
    ours, theirs = (float(logits[0, token]) for token in (want[at], got[at]))
    most = max(abs(ours), abs(theirs))
    return abs(ours - theirs) <= STEPS * float(jnp.finfo(model.params["norm"].dtype).eps) * most
