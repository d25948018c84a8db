"""The TPU kernels of a prefill's gradients: queries' with slots going by, keys' and values' with queries.

With p = exp(z - lse) and the cotangents of out and lse: dz = p (dO v' - dO O + dlse), dq = dz k, dk = dz' q
and dv = p' dO (FlashAttention-2; Dao, 2023, arXiv:2307.08691, algorithm 2). `delta` is dO O - dlse. For the
keys, scores lie as [slots, queries]: what belongs to a query is a row, and no product needs a transpose.
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
    NN,
    NT,
    chunks,
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
    """Operands, results and scratch memory of both kernels; None where one has no such thing."""

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
    dq: Any = None
    dk: Any = None
    dv: Any = None
    columns: Any = None
    stats: Any = None
    q_sum: Any = None
    k_sum: Any = None
    v_sum: Any = None


OPERANDS = Refs._fields[:11]


def _dq_kernel(*refs: Any, specs: Specs) -> None:
    r = Refs(**dict(zip((*OPERANDS, "dq", "columns", "stats", "q_sum"), refs, strict=True)))

    @pl.when(pl.program_id(3) == 0)
    def _() -> None:
        r.q_sum[...] = jnp.zeros_like(r.q_sum)
        for n, row in enumerate(rows_of(r.q_rows)):
            r.columns[n] = column(row)
        for g in range(r.q.shape[2]):
            r.stats[0, g] = column(_base(r.lse[0, 0, g : g + 1]))
            r.stats[1, g] = column(r.delta[0, 0, g : g + 1])

    by_kind(r, specs, partial(_to_queries, r, specs.sizes))

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _() -> None:
        r.dq[0, 0] = (r.q_sum[...] * specs.sizes.scale).astype(r.dq.dtype)


def _base(lse: Any) -> Any:
    """The normaliser in base 2, and something finite where a query sees nothing."""
    return jnp.where(lse == NEG_INF, 0.0, lse) * LOG2E


def _to_queries(r: Refs, sizes: Sizes, *, whole: bool) -> None:
    kind = matrix_dtype(r.q)
    k, v = r.k[0, 0].astype(kind), r.v[0, 0].astype(kind)
    slots = k.shape[0]
    if not whole:
        k = only_real(k, column(r.k_rows[0, :1]))
    seen: dict[int, Any] = {}

    def products(g: int, rows: slice) -> tuple[Any, Any]:
        q, d_out = (x[0, 0, g, rows].astype(kind) for x in (r.q, r.d_out))
        return dot(q, k, NT), dot(d_out, v, NT)

    def fold(g: int, rows: slice, s: Any, dp: Any) -> None:
        if not whole and rows.start not in seen:
            columns = [lanes(r.columns[n, rows], slots) for n in range(r.columns.shape[0])]
            seen[rows.start] = visible(columns, rows_of(r.k_rows), sizes.window)
        lse, delta = (lanes(r.stats[n, g, rows], slots) for n in (0, 1))
        _, dz = _gradient(s, dp, lse, delta, seen.get(rows.start), sizes)
        r.q_sum[g, rows] += dot(dz.astype(kind), k, NN)

    parts = list(chunks(r.q.shape[2], r.q.shape[3], sizes.rows))
    found = products(*parts[0])
    for n, part in enumerate(parts):
        ahead = products(*parts[n + 1]) if n + 1 < len(parts) else None
        fold(*part, *found)
        found = ahead


def _gradient(s: Any, dp: Any, lse: Any, delta: Any, seen: Any, sizes: Sizes) -> tuple[Any, Any]:
    """(p, dz / d(scale s)) of products s = q k' and dp = dO v'."""
    z = logits(s, sizes)
    p = jnp.exp2(z - lse)
    dz = p * (dp - delta)
    rate = slope(z, sizes)
    dz = dz if rate is None else dz * rate
    if seen is None:
        return p, dz
    return jnp.where(seen, p, 0.0), jnp.where(seen, dz, 0.0)


def _dkv_kernel(*refs: Any, specs: Specs) -> None:
    r = Refs(**dict(zip((*OPERANDS, "dk", "dv", "columns", "k_sum", "v_sum"), refs, strict=True)))

    @pl.when(pl.program_id(3) == 0)
    def _() -> None:
        r.k_sum[...] = jnp.zeros_like(r.k_sum)
        r.v_sum[...] = jnp.zeros_like(r.v_sum)
        for n, row in enumerate(rows_of(r.k_rows)):
            r.columns[n] = column(row)

    by_kind(r, specs, partial(_to_slots, r, specs.sizes))

    @pl.when(pl.program_id(3) == pl.num_programs(3) - 1)
    def _() -> None:
        r.dk[0, 0] = (r.k_sum[...] * specs.sizes.scale).astype(r.dk.dtype)
        r.dv[0, 0] = r.v_sum[...].astype(r.dv.dtype)


def _to_slots(r: Refs, sizes: Sizes, *, whole: bool) -> None:
    kind = matrix_dtype(r.q)
    k, v = r.k[0, 0].astype(kind), r.v[0, 0].astype(kind)
    tokens = r.q.shape[3]
    seen = None
    if not whole:
        columns = [lanes(r.columns[n], tokens) for n in range(r.columns.shape[0])]
        seen = visible(rows_of(r.q_rows), columns, sizes.window)
        pos = column(r.q_rows[0, :1])

    def products(g: int) -> tuple[Any, ...]:
        q, d_out = (x[0, 0, g].astype(kind) for x in (r.q, r.d_out))
        if not whole:
            q, d_out = only_real(q, pos), only_real(d_out, pos)
        return q, d_out, dot(k, q, NT), dot(v, d_out, NT)

    def fold(g: int, q: Any, d_out: Any, s: Any, dp: Any) -> None:
        lse, delta = _base(r.lse[0, 0, g : g + 1]), r.delta[0, 0, g : g + 1]
        p, dz = _gradient(s, dp, lse, delta, seen, sizes)
        r.v_sum[...] += dot(p.astype(kind), d_out, NN)
        r.k_sum[...] += dot(dz.astype(kind), q, NN)

    found = products(0)
    for g in range(r.q.shape[2]):
        ahead = products(g + 1) if g + 1 < r.q.shape[2] else None
        fold(g, *found)
        found = ahead


def _operands(
    specs: Specs, q_rows: Any, k_rows: Any, q: Any, k: Any, v: Any, d_out: Any, lse: Any, delta: Any
):
    return [
        (q_rows, specs.q_rows()),
        (k_rows, specs.k_rows()),
        (q, specs.queries(q.shape[4])),
        (k, specs.slots(k.shape[3])),
        (v, specs.slots(v.shape[3])),
        (d_out, specs.queries(v.shape[3])),
        (lse, specs.per_query()),
        (delta, specs.per_query()),
    ]


def dq(
    q: jax.Array, k: jax.Array, v: jax.Array, q_rows: jax.Array, k_rows: jax.Array, d_out: jax.Array,
    lse: jax.Array, delta: jax.Array, *, sizes: Sizes, interpret: Any = False,
) -> jax.Array:  # fmt: skip
    """The queries' gradient [B, K, G, T, H]; operands as in `flash_prefill`, lse and delta [B, K, G, T]."""
    group, h = q.shape[2], q.shape[4]
    specs = Specs(q, q_rows, k_rows, sizes, "q")
    (found,) = run(
        "flash_prefill_dq", _dq_kernel, specs,
        inputs=_operands(specs, q_rows, k_rows, q, k, v, d_out, lse, delta),
        outputs=[(jax.ShapeDtypeStruct(q.shape, q.dtype), specs.queries(h))],
        scratch=[
            pltpu.VMEM((specs.rows, sizes.q, LANES), jnp.int32),
            pltpu.VMEM((2, group, sizes.q, LANES), jnp.float32),
            pltpu.VMEM((group, sizes.q, h), jnp.float32),
        ],
        interpret=interpret,
    )  # fmt: skip
    return found


def dkv(
    q: jax.Array, k: jax.Array, v: jax.Array, q_rows: jax.Array, k_rows: jax.Array, d_out: jax.Array,
    lse: jax.Array, delta: jax.Array, *, sizes: Sizes, interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The gradients of keys and values, shaped as they are; operands as those of `dq`."""
    specs = Specs(q, q_rows, k_rows, sizes, "kv")
    found = run(
        "flash_prefill_dkv", _dkv_kernel, specs,
        inputs=_operands(specs, q_rows, k_rows, q, k, v, d_out, lse, delta),
        outputs=[(jax.ShapeDtypeStruct(x.shape, x.dtype), specs.slots(x.shape[3])) for x in (k, v)],
        scratch=[
            pltpu.VMEM((specs.rows, sizes.kv, LANES), jnp.int32),
            pltpu.VMEM((sizes.kv, k.shape[3]), jnp.float32),
            pltpu.VMEM((sizes.kv, v.shape[3]), jnp.float32),
        ],
        interpret=interpret,
    )  # fmt: skip
    return found[0], found[1]
