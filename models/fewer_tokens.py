"""Prefills whose upper layers run for the last token alone, or for those of a narrowed prompt."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.models.config import Config
from kvjax.models.mixer import Memory
from kvjax.models.mixers.attention import mixer_of


def ends_early(config: Config, first: int) -> bool:
    """Whether layers `first` and above can run for the last token alone, if only its logits are needed.

    They can if all of them read slots from below, or project keys and values from the input of layer `first`
    or of one below it (YOCO, arXiv:2405.05254; SwiftKV, arXiv:2410.03960).
    """
    mixers = [mixer_of(config, i) for i in range(first, config.layers)]
    below = ((m.source_of("slots"), m.source_of("kv input")) for m in mixers)
    return all(any(at is not None and at <= first for at in pair) for pair in below)


# The hidden states of some tokens [B, T, D], and their per-layer embeddings [B, T, L, P] or None.
Rows = tuple[Array, Array | None]


def last_only(rows: Rows, memory: Memory) -> tuple[Rows, Memory]:
    """Take the last token of every row alone, of a memory with `last`."""
    last = memory.last
    assert last is not None
    pos = jnp.take_along_axis(memory.pos, last[:, None], axis=1)
    return _some(rows, last[:, None]), memory._replace(pos=pos, last=None)


def _some(rows: Rows, index: Int[Array, "B M"]) -> Rows:
    def one(y: Array) -> Array:
        return jnp.take_along_axis(y, index.reshape(*index.shape, *(1,) * (y.ndim - 2)), axis=1)

    return jax.tree.map(one, rows)


def narrowed(rows: Rows, memory: Memory, collected: list[Any], first: int) -> tuple[Rows, Memory, list[Any]]:
    """Take the tokens that go on to layer `first` and above, and the matching part of what groups collected.

    ValueError if stacked layers extend beyond the narrowing.
    """
    narrow = memory.narrow
    assert narrow is not None
    after = narrow.after
    if first != after + 1:
        raise ValueError(
            f"the prompt gets narrower after layer {after}, inside stacked layers that end at {first - 1}: "
            f"narrow it after layer {first - 1}, or give the params of kvjax.prepare(model, method)"
        )
    index, used = narrow.choose(collected[-1], memory.pos)
    pos = jnp.where(used, jnp.take_along_axis(memory.pos, index, axis=1), -1)
    below = narrow.below
    left = collected if below is None else [below(one, index) for one in collected]
    return _some(rows, index), memory._replace(pos=pos, narrow=narrow.then), left
