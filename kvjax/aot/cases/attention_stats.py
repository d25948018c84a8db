"""Attention statistics per key: over all queries of a prompt, and over its last queries alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.attention.attention_stats import STATISTICS, tpu_attention_stats

HEADS, GROUP, BLOCK = 8, 4, 1024


def attention_stats(
    device: Device,
    *,
    want: tuple[str, ...],
    queries: int = 8192,
    slots: int = 8192,
    batch: int = 4,
    width: int = 128,
    per_head: bool = False,
) -> Case:
    """K = 8, G = 4, bfloat16; the queries are the last of `slots` tokens, in order.

    `trips` counts the grid steps that see something, and each counts the code of both the first and the last
    step of a block of keys. Steps that see nothing cost only the grid's latency, which no bound here
    includes; the simulation would count them as whole steps, so there is none if they occur. With fewer than
    4 rows, tpu7x would hold all keys in VMEM. If there are more keys than queries, the keys count as a cache.
    """
    heads = HEADS * GROUP
    operands = (
        jax.ShapeDtypeStruct((batch, heads, queries, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, HEADS, slots, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32),
        jax.ShapeDtypeStruct((batch, queries), jnp.int32),
        jax.ShapeDtypeStruct((batch, 1, slots), jnp.int32),
        jax.ShapeDtypeStruct((batch, queries), jnp.bool_),
    )

    def run(q: jax.Array, k: jax.Array, lse: jax.Array, q_pos: jax.Array, k_pos: jax.Array, last: jax.Array):
        return tpu_attention_stats(
            q, k, lse, q_pos, k_pos, None, last, want=want, scale=width**-0.5, window=None, softcap=None,
            threshold=0.01, per_head=per_head,
        )  # fmt: skip

    rows = min(BLOCK // GROUP, queries)
    ends = np.arange(slots - queries, slots, rows) + rows
    # Pairs of a block of keys and a block of queries in which some query sees some key.
    pairs = int((np.arange(0, slots, BLOCK)[:, None] < ends).sum())
    lists = batch * HEADS
    read_queries = lists * pairs * rows * GROUP * (2 * width + 4)
    found = 4 * len(want) * lists * slots * (GROUP if per_head else 1)
    keys = lists * slots * 2 * width
    cache = keys if queries < slots else 0
    return Case(
        run, operands, keys + 4 * lists * slots + read_queries + found,
        2 * lists * pairs * rows * GROUP * BLOCK * width, cache, "attention_stats",
        trips={"1": lists * pairs}, profiles=queries == rows, relaid=found,
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "attention_stats-prompt-sum": partial(attention_stats, want=("sum",)),
    "attention_stats-prompt-all": partial(attention_stats, want=STATISTICS),
    "attention_stats-prompt-h256": partial(attention_stats, want=("sum",), width=256),
    "attention_stats-prompt-per-head": partial(attention_stats, want=("sum",), per_head=True),
    "attention_stats-window": partial(attention_stats, want=("last_mean",), queries=64, slots=16384),
}
