"""Draft tokens after a prompt, read one by one; and a comparison of two caches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.models.model import Model
from kvjax.state.cache import Cache, Paged
from kvjax.state.page_gather import gather_pages, gather_traces
from tests.methods.battery import MAIN, VOCAB, step

WIDTH = 12
# The draft tokens of each row, and their numbers in the case of unequal ones; one row drafts nothing.
DRAFT = np.random.default_rng(7).integers(0, VOCAB, (len(MAIN.first), WIDTH)).astype(np.int32)
UNEVEN = np.array([WIDTH, 5, 0, 9])


def started(model: Model, method: Any, room: int = WIDTH + 4) -> Cache:
    """Four prompts of unequal lengths under a method."""
    return kvjax.prefill(model, MAIN.first, method=method, room=room)[1]


def stepped(model: Model, cache: Cache, draft: Any, counts: Any) -> tuple[np.ndarray, Cache]:
    """Logits [B, T, V] and the cache of a plain loop in which row b takes its first counts[b] tokens."""
    out = []
    for i, column in enumerate(np.asarray(draft).T):
        logits, cache = step(model, cache, column, i < np.asarray(counts))
        out.append(np.asarray(logits))
    return np.stack(out, 1), cache


def close(got: Any, want: Any) -> None:
    """Numbers are equal within float32's rounding of the largest."""
    got, want = np.asarray(got), np.asarray(want)
    if want.size:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def held(cache: Cache) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Per layer, sorted positions [B, K, S] and their keys, values and traces; or states."""
    out = []
    for group in cache.groups:
        layers = jax.tree.leaves(group)[0].shape[0]
        for i in range(layers):
            rows = [x[i] for x in jax.tree.leaves(group.rows)]
            if group.state is not None:
                out.append((np.zeros(0), [*group.state.layer(i).values(), *rows]))
                continue
            sets = []
            for segment in group.parts:
                one = segment.layer(i)
                pool = cache.pools[one.pool] if isinstance(one, Paged) else None
                keys = one.keys() if pool is None else gather_pages(one, pool)
                traces = one.traces if pool is None else gather_traces(one, pool)
                sets.append([keys.pos, keys.k, keys.v, *(traces[name] for name in sorted(traces))])
            pos, *numbers = (np.concatenate(x, axis=2) for x in zip(*jax.device_get(sets), strict=True))
            if not pos.size:
                continue  # a layer that reads another one's slots, or a context that it was not given
            order = np.argsort(np.where(pos < 0, np.iinfo(np.int32).max, pos), axis=-1, kind="stable")
            pos, *numbers = (_taken(x, order) for x in (pos, *numbers))
            live = pos >= 0
            width = max(int(live.sum(-1).max(initial=0)), 1)
            numbers = [np.where(live[..., None], x.reshape(*pos.shape, -1), 0)[:, :, :width] for x in numbers]
            out.append((pos[:, :, :width], [*numbers, *rows]))
    return out


def _taken(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 3)), axis=2)


def same(got: Cache, want: Cache) -> None:
    """Check that two caches have the same structure, tokens and numbers."""
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(c)] for c in (got, want)]
    assert jax.tree.structure(got) == jax.tree.structure(want) and shapes[0] == shapes[1]
    np.testing.assert_array_equal(got.next, want.next)
    for (mine, numbers), (theirs, others) in zip(held(got), held(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        for a, b in zip(numbers, others, strict=True):
            close(a, b)
