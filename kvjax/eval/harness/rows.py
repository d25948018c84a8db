"""Rows of requests over compressed caches: batches, generation, and sizes of caches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import steps
from kvjax.api.chunks import bucket
from kvjax.api.decode_loop import write
from kvjax.api.forced import ForcedTokens, force
from kvjax.api.likelihood import room_for
from kvjax.api.logit_processors import history
from kvjax.api.nan_checks import refuse_step
from kvjax.api.prefill import bare_cache, method_of, padded, prefill
from kvjax.api.prepare import made
from kvjax.api.step import stepping
from kvjax.api.stop_strings import StopStrings
from kvjax.eval.harness.sampling import Writing
from kvjax.grammar import Method
from kvjax.models.model import Model
from kvjax.state.cache import nbytes
from kvjax.steps import Run

# The seed for tasks that sample.
SEED = 1234


class ScoredRow(NamedTuple):
    """Token ids, how many of them are the compressed context, and how many at the end are scored."""

    ids: list[int]
    context: int
    scored: int = 0

    @classmethod
    def fitted(cls, prompt: Sequence[int], context: int, end: Sequence[int], most: int) -> ScoredRow:
        """Cut a prompt and what follows it from the left to `most` tokens.

        >>> ScoredRow.fitted([1, 2, 3, 4, 5], 4, [6], 4)
        ScoredRow(ids=[3, 4, 5, 6], context=2, scored=1)
        """
        ids = [*prompt, *end]
        lost = max(0, len(ids) - most)
        return cls(ids[lost:], max(1, context - lost), len(end))


class CacheBytes:
    """Bytes of caches after their contexts, and of full caches in their place, summed over requests."""

    # The counts of the newest model: the harness creates the model and does not return it.
    newest: ClassVar[CacheBytes | None] = None

    def __init__(self):
        self.kept, self.full, self.requests = 0, 0, 0
        self._sizes: dict[tuple[int, int, int], int] = {}

    def add(self, model: Model, held: int, rows: Sequence[ScoredRow], room: int, requests: int) -> None:
        """Record the first `requests` rows of a batch whose cache takes `held` bytes, free slots included."""
        shape = len(rows), bucket(max(row.context for row in rows)), room
        if shape not in self._sizes:
            self._sizes[shape] = full_bytes(model, *shape)
        self.kept += held * requests // len(rows)
        self.full += self._sizes[shape] * requests // len(rows)
        self.requests += requests


def full_bytes(model: Model, rows: int, tokens: int, room: int) -> int:
    """Bytes of the full cache of so many rows of `tokens` tokens, with free slots for `room` more.

    >>> from kvjax.io.load import load
    >>> full_bytes(load("recall-tiny"), 1, 48, 16)  # 4 layers x 2 heads x 64 x (32 + 32 + 1) x 4 B, next
    133124
    """
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, tokens), (rows,)))
    call = partial(steps.prefill, Run(model.config, Method()), cache=None)
    call = partial(call, tokens_bound=tokens, room=room, compress=True)
    return nbytes(jax.eval_shape(call, model.params, ids, lengths)[1])


def batches(
    rows: Sequence[ScoredRow], size: int, kinds: Sequence[Hashable] | None = None
) -> Iterator[tuple[list[int], list[ScoredRow]]]:
    """Batches of rows of similar lengths, the longest first, and the index of each row.

    Batches have `size` rows if there are so many: the last is padded with copies of its last row, which have
    no index. kinds: the kind of each row; a batch has rows of one kind only.

    >>> rows = [ScoredRow([1] * tokens, 1) for tokens in (1, 2, 3)]
    >>> [places for places, _ in batches(rows, 2)]
    [[2, 1], [0]]
    """
    groups: dict[Hashable, list[int]] = {}
    for i, kind in enumerate([0] * len(rows) if kinds is None else kinds):
        groups.setdefault(kind, []).append(i)
    for group in groups.values():
        order = sorted(group, key=lambda i: -len(rows[i].ids))
        for at in range(0, len(order), size):
            places = order[at : at + size]
            batch = [rows[i] for i in places]
            yield places, batch + batch[-1:] * (min(size, len(order)) - len(batch))


def written(
    model: Model, method: Method, rows: Sequence[ScoredRow], how: Writing, number: int
) -> tuple[list[list[int]], int, int]:
    """Generate after each row: token ids, the bytes of the cache, and its free slots.

    The context of a row is read and compressed, and the rest read over the compressed cache. number: the
    batch's number, so that each batch draws independently.
    """
    chosen = method_of(model, method, None)
    model = made(model, chosen)
    rest = [row.ids[row.context :] for row in rows]
    room = room_for(model, chosen, max(map(len, rest)) + how.new)
    logits, cache = prefill(model, [row.ids[: row.context] for row in rows], method=chosen, room=room)
    held, count = nbytes(cache), np.array([len(ids) for ids in rest])
    if count.any():
        tokens = np.array([[*ids, *[0] * (bucket(int(count.max())) - len(ids))] for ids in rest], np.int32)
        _, logits, cache = force(model, chosen, cache, ForcedTokens(tokens, count, tokens), logits)
    ends = StopStrings(model, how.stop_strings, len(rows)) if how.stop_strings else None
    one, params = stepping(model, chosen, None)
    whole = padded(model, [row.ids for row in rows], None)
    past = history(jnp.asarray(whole.tokens), jnp.asarray(whole.lengths), how.new) if how.processors else None
    key = jax.random.fold_in(jax.random.key(SEED), number)
    tokens, _, _ = write(
        one, params, logits, bare_cache(cache), new=how.new, sampler=how.sampler, ends=ends,
        key=key, stop=jnp.asarray(model.stop_ids or [-1], jnp.int32),
        refuse_nan=lambda at: refuse_step(at, chosen.id), processors=how.processors,
        past=past,
    )  # fmt: skip
    return [[i for i in row if i >= 0] for row in np.asarray(tokens).tolist()], held, room
