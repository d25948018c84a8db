"""Token ids for requests of a trace or a generator, which give lengths and prefix keys but no text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvjax.base.errors import InputError
from kvjax.serve.requests import Request


def scaled(requests: Sequence[Request], by: int) -> list[Request]:
    """Divide all lengths of the requests by `by`, rounded up; gaps stay.

    Raises InputError, with their count, for requests that call other programs: a model calls none.

    >>> scaled([Request(0, 1.0, 700, 9)], 64)[0].prompt
    11
    """
    if calling := sum(bool(one.calls) for one in requests):
        raise InputError(
            f"{calling} of {len(requests)} requests call other programs, and a model has none: take kvjax "
            "simulate, or requests without calls"
        )
    less = [(-(-one.prompt // by), -(-one.output // by), -(-one.span // by)) for one in requests]
    return [
        Request(one.id, one.arrived, prompt, output, one.keys[: -(-prompt // span)] if span else (), span)
        for one, (prompt, output, span) in zip(requests, less, strict=True)
    ]


def texts(requests: Sequence[Request], vocab: int, most: int, seed: int = 0) -> list[list[int]]:
    """Draw token ids for every request's prompt: prompts with equal keys get equal tokens.

    vocab: ids are below it. most: the most tokens of a prompt and its output together. Raises InputError,
    with the number of the request, if these are more.
    """
    found = []
    for one in requests:
        if one.prompt + one.output > most:
            raise InputError(
                f"request {one.id} has {one.prompt} tokens and writes {one.output}, more than the {most} "
                "positions of the model: divide lengths with --scale"
            )
        spans = [_drawn(repr(key), one.span, vocab, seed) for key in one.keys]
        own = _drawn(f"request {one.id}", one.prompt, vocab, seed)
        head = [token for span in spans for token in span][: one.prompt]
        found.append(head + own[len(head) :])
    return found


def _drawn(name: str, count: int, vocab: int, seed: int) -> list[int]:
    """Random tokens that are determined by a name."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big")).integers(0, vocab, count).tolist()
