"""The TPU kernel of a prefill: one block of queries of all heads of a group, and the blocks of slots it sees.

Scores are laid out as [queries, slots]. The product for the next rows is issued before the softmax of the
last ones, so that the matrix units stay busy. A block that all its queries see whole takes no mask.
`kvjax.ops.attention.flash_prefill` defines the result.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .grid import Specs, by_kind, run
from .plan import Sizes
from .tiles import (
    LANES,
    LOG2E,
    NEG_INF,
    NT,
    chunks,
    column,
    dot,
    folded,
    in_turn,
    lanes,
    logits,
    matrix_dtype,
    only_real,
    rows_of,
    visible,
)


class Refs(NamedTuple):
    """Operands, results and scratch memory; rows are positions and, if any, segments."""

    first: Any
    count: Any
    kinds: Any
    q_rows: Any
    k_rows: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    top: Any
    total: Any
    acc: Any
    columns: Any


def _kernel(*refs: Any, specs: Specs) -> None:
    r = Refs(*refs)
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        r.top[...] = jnp.full_like(r.top, NEG_INF)
        r.total[...] = jnp.zeros_like(r.total)
        r.acc[...] = jnp.zeros_like(r.acc)
        for n, row in enumerate(rows_of(r.q_rows)):
            r.columns[n] = column(row)

    by_kind(r, specs, partial(_attend, r, specs.sizes))

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        for g in range(r.q.shape[2]):
            total = r.total[g].sum(-1, keepdims=True)
            safe = jnp.where(total == 0.0, 1.0, total)
            r.out[0, 0, g] = (r.acc[g] / safe).astype(r.out.dtype)
            lse = jnp.where(total == 0.0, NEG_INF, r.top[g, :, :1] / LOG2E + jnp.log(safe))
            r.lse[0, 0, g : g + 1] = jnp.broadcast_to(lse, (lse.shape[0], LANES)).T[:1]


def _attend(r: Refs, sizes: Sizes, *, whole: bool) -> None:
    """Fold a block of slots into the running maximum, total and sum of values."""
    kind = matrix_dtype(r.q)
    k, v = r.k[0, 0].astype(kind), r.v[0, 0].astype(kind)
    if not whole:
        v = only_real(v, column(r.k_rows[0, :1]))
    seen: dict[int, Any] = {}

    def score(g: int, rows: slice) -> Any:
        return dot(r.q[0, 0, g, rows].astype(kind), k, NT)

    def fold(g: int, rows: slice, s: Any) -> None:
        z = logits(s, sizes)
        if not whole:
            # One mask serves all heads of the group.
            if rows.start not in seen:
                columns = [lanes(r.columns[n, rows], z.shape[1]) for n in range(r.columns.shape[0])]
                seen[rows.start] = visible(columns, rows_of(r.k_rows), sizes.window)
            z = jnp.where(seen[rows.start], z, NEG_INF)
        folded(r, g, rows, z, v, whole=whole)

    in_turn(list(chunks(r.q.shape[2], r.q.shape[3], sizes.rows)), score, fold)


def flash_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_rows: jax.Array,
    k_rows: jax.Array,
    *,
    sizes: Sizes,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, K, G, T, V], lse [B, K, G, T]) of q [B, K, G, T, H], k [B, K, S, H] and v [B, K, S, V].

    q_rows [B, C, T'] and k_rows [B or B K, C, S'] int32: positions, and segments if C = 2, padded with -1 to
    whole blocks. T is at least `sizes.q`, S at least `sizes.kv`, both sizes multiples of 128.
    """
    group, h, width = q.shape[2], q.shape[4], v.shape[3]
    specs = Specs(q, q_rows, k_rows, sizes)
    out, lse = run(
        "flash_prefill", _kernel, specs,
        inputs=[
            (q_rows, specs.q_rows()),
            (k_rows, specs.k_rows()),
            (q, specs.queries(h)),
            (k, specs.slots(h)),
            (v, specs.slots(width)),
        ],
        outputs=[
            (jax.ShapeDtypeStruct((*q.shape[:4], width), q.dtype), specs.queries(width)),
            (jax.ShapeDtypeStruct(q.shape[:4], jnp.float32), specs.per_query()),
        ],
        scratch=[
            pltpu.VMEM((group, sizes.q, LANES), jnp.float32),
            pltpu.VMEM((group, sizes.q, LANES), jnp.float32),
            pltpu.VMEM((group, sizes.q, width), jnp.float32),
            pltpu.VMEM((specs.rows, sizes.q, LANES), jnp.int32),
        ],
        interpret=interpret,
    )  # fmt: skip
    return out, lse
