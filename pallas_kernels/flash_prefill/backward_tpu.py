"""The TPU kernel of a prefill's gradients: one pass over all pairs of blocks, five products in each.

With p = exp(z - lse) and the cotangents of out and lse: dz = p (dO v' - dO O + dlse), dq = dz k, dk = dz' q
and dv = p' dO (FlashAttention-2; Dao, 2023, arXiv:2307.08691, algorithm 2). `delta` is dO O - dlse. Scores
are laid out as [slots, queries], so that per-query numbers are rows. The sums for keys and values of one part
of the slots stay in VMEM while all queries are processed; each part adds its share to the queries' gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .grid import Specs, block_of, by_kind, run
from .plan import Sizes
from .tiles import (
    LOG2E,
    NEG_INF,
    NN,
    NT,
    column,
    dot,
    lanes,
    logits,
    matrix_dtype,
    only_real,
    rows_of,
    slope,
    visible,
)


class Refs(NamedTuple):
    """Operands, results and scratch memory; `dq` is the sum over earlier parts of the slots."""

    first: Any
    count: Any
    kinds: Any
    q_rows: Any
    k_rows: Any
    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any
    delta: Any
    dq: Any
    new_dq: Any
    dk: Any
    dv: Any
    q_sum: Any
    k_sum: Any
    v_sum: Any


def _kernel(*refs: Any, specs: Specs) -> None:
    r = Refs(*refs)
    block, step = pl.program_id(2), pl.program_id(3)
    last = step == pl.num_programs(3) - 1

    @pl.when((block == 0) & (step == 0))
    def _() -> None:
        r.k_sum[...] = jnp.zeros_like(r.k_sum)
        r.v_sum[...] = jnp.zeros_like(r.v_sum)

    @pl.when(step == 0)
    def _() -> None:
        r.q_sum[...] = jnp.zeros_like(r.q_sum)

    by_kind(r, specs, partial(_fold, r, specs.sizes, block_of(r, specs)))

    @pl.when(last)
    def _() -> None:
        for g in range(r.q.shape[2]):
            r.new_dq[0, 0, g] = r.dq[0, 0, g] + r.q_sum[g].T * specs.sizes.scale

    @pl.when(last & (block == specs.blocks - 1))
    def _() -> None:
        r.dk[0, 0] = (r.k_sum[...] * specs.sizes.scale).astype(r.dk.dtype)
        r.dv[0, 0] = r.v_sum[...].astype(r.dv.dtype)


def _fold(r: Refs, sizes: Sizes, slots: Any, *, whole: bool) -> None:
    """Add the contributions of a block of queries and the block `slots` to each other's gradients."""
    kind = matrix_dtype(r.q)
    k, v = r.k[0, 0].astype(kind), r.v[0, 0].astype(kind)
    seen = None
    if not whole:
        columns = [column(row) for row in rows_of(r.k_rows)]
        asked = column(r.q_rows[0, :1])
        k = only_real(k, columns[0])
        seen = visible(rows_of(r.q_rows), [lanes(x, r.q.shape[3]) for x in columns], sizes.window)
    turned = k.T
    at = pl.ds(pl.multiple_of(slots * sizes.kv, sizes.kv), sizes.kv)

    def products(g: int) -> tuple[Any, ...]:
        q, d_out = (x[0, 0, g].astype(kind) for x in (r.q, r.d_out))
        if not whole:
            q, d_out = only_real(q, asked), only_real(d_out, asked)
        return q, d_out, dot(k, q, NT), dot(v, d_out, NT)

    def fold(g: int, q: Any, d_out: Any, s: Any, dp: Any) -> None:
        lse, delta = r.lse[0, 0, g : g + 1], r.delta[0, 0, g : g + 1]
        p, dz = _gradient(s, dp, jnp.where(lse == NEG_INF, 0.0, lse) * LOG2E, delta, seen, sizes)
        p, dz = p.astype(kind), dz.astype(kind)
        r.v_sum[at] += dot(p, d_out, NN)
        r.k_sum[at] += dot(dz, q, NN)
        r.q_sum[g] += dot(turned, dz, NN)

    found = products(0)
    for g in range(r.q.shape[2]):
        ahead = products(g + 1) if g + 1 < r.q.shape[2] else None
        fold(g, *found)  # pyright: ignore[reportOptionalIterable]
        found = ahead


def _gradient(s: Any, dp: Any, lse: Any, delta: Any, seen: Any, sizes: Sizes) -> tuple[Any, Any]:
    """Return (p, dz / d(scale s)) of products s = q k' and dp = dO v'; lse in base 2."""
    z = logits(s, sizes)
    p = jnp.exp2(z - lse)
    dz = p * (dp - delta)
    rate = slope(z, sizes)
    dz = dz if rate is None else dz * rate
    if seen is None:
        return p, dz
    return jnp.where(seen, p, 0.0), jnp.where(seen, dz, 0.0)


def gradients(
    q: jax.Array, k: jax.Array, v: jax.Array, q_rows: jax.Array, k_rows: jax.Array, d_out: jax.Array,
    lse: jax.Array, delta: jax.Array, *, sizes: Sizes, part: int, interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(dq in float32, dk, dv), shaped as q, k and v; operands as in `kernel_tpu.flash_prefill`.

    lse and delta [B, K, G, T]; part: blocks of slots whose sums are in VMEM at once.
    """
    slots = part * sizes.kv
    parts = -(-k_rows.shape[2] // slots)
    k_rows = jnp.pad(k_rows, ((0, 0), (0, 0), (0, parts * slots - k_rows.shape[2])), constant_values=-1)
    short = ((0, 0), (0, 0), (0, parts * slots - k.shape[2]), (0, 0))
    k, v = jnp.pad(k, short), jnp.pad(v, short)

    def one(dq: jax.Array, n: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        here = [jax.lax.dynamic_slice_in_dim(x, n * slots, slots, 2) for x in (k_rows, k, v)]
        dq, dk, dv = _part(q, *here[1:], q_rows, here[0], d_out, lse, delta, dq, sizes, interpret)  # pyright: ignore[reportCallIssue]
        return dq, (dk, dv)

    # In whole blocks, because a result that aliases an operand has its shape.
    none = jnp.zeros((*q.shape[:3], q_rows.shape[2], q.shape[4]), jnp.float32)
    dq, found = jax.lax.scan(one, none, jnp.arange(parts))
    dk, dv = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[4]) for x in found)
    return dq[:, :, :, : q.shape[3]], dk, dv


def _part(
    q: jax.Array, k: jax.Array, v: jax.Array, q_rows: jax.Array, k_rows: jax.Array, d_out: jax.Array,
    lse: jax.Array, delta: jax.Array, dq: jax.Array, sizes: Sizes, interpret: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(dq plus this part's share, dk, dv) of one part of the slots."""
    h, width = k.shape[3], v.shape[3]
    specs = Specs(q, q_rows, k_rows, sizes)
    return run(
        "flash_prefill_back", _kernel, specs,
        inputs=[
            (q_rows, specs.q_rows()),
            (k_rows, specs.k_rows()),
            (q, specs.queries(h)),
            (k, specs.slots(h)),
            (v, specs.slots(width)),
            (d_out, specs.queries(width)),
            (lse, specs.per_query()),
            (delta, specs.per_query()),
            (dq, specs.queries(h)),
        ],
        outputs=[
            (jax.ShapeDtypeStruct(dq.shape, jnp.float32), specs.queries(h)),
            (jax.ShapeDtypeStruct(k.shape, k.dtype), specs.all_slots(k)),
            (jax.ShapeDtypeStruct(v.shape, v.dtype), specs.all_slots(v)),
        ],
        scratch=[
            pltpu.VMEM((q.shape[2], h, sizes.q), jnp.float32),
            pltpu.VMEM((k.shape[2], h), jnp.float32),
            pltpu.VMEM((k.shape[2], width), jnp.float32),
        ],
        interpret=interpret,
        aliases={11: 0},
        sums=True,
    )  # fmt: skip
