"""The TPU kernel of attention statistics: how much every key receives, from queries, keys and lse.

The grid is (KV heads, key blocks, query blocks), query blocks innermost, so a block of keys is read once.
Keys are along sublanes and queries along lanes: sums over queries add whole registers, and lanes are reduced
once, at the end of a block of keys. `kvjax.ops.attention.attention_stats` defines the result.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
UNSEEN = jnp.iinfo(jnp.int32).max
# Logits, biases and lse are in base 2 here, which saves one multiplication per probability.
LOG2_E = math.log2(math.e)


class Sizes(NamedTuple):
    """Static arguments: the statistics, the lengths of blocks, and the logits' parameters.

    keys, rows: of a block, and of every head in it. heads: how many are counted separately, 1 for all
    together.
    """

    want: tuple[str, ...]
    keys: int
    rows: int
    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    threshold: float = 0.0


class Refs(NamedTuple):
    """The kernel's operands, results and scratch memory; None for those that a call does not have."""

    first: Any
    final: Any
    q: Any
    k: Any
    lse: Any
    q_pos: Any
    k_pos: Any
    weight: Any
    bias: Any
    outs: Any
    sums: Any
    pos: Any
    biases: Any


def _kernel(*refs: Any, sizes: Sizes, names: tuple[str, ...]) -> None:
    at, count = names.index("outs"), len(sizes.want)
    refs = (*refs[:at], refs[at : at + count], *refs[at + count :])
    r = Refs(**{**dict.fromkeys(Refs._fields), **dict(zip(names, refs, strict=True))})
    i, s, t = pl.program_id(0), pl.program_id(1), pl.program_id(2)

    @pl.when(t == 0)
    def _() -> None:
        r.sums[...] = jnp.zeros_like(r.sums)
        r.pos[...] = _column(jnp.where(r.k_pos[0] < 0, UNSEEN, r.k_pos[0]))
        if r.bias is not None:
            r.biases[...] = _column(r.bias[0] * LOG2_E)

    pl.when((t >= r.first[i, s]) & (t <= r.final[i, s]))(lambda: _add(r, sizes))

    @pl.when(t + 1 == pl.num_programs(2))
    def _() -> None:
        for n, name in enumerate(sizes.want):
            over = jnp.max if name == "max" else jnp.sum
            for head in range(sizes.heads):
                r.outs[n][0, head : head + 1] = over(r.sums[n, head].T, axis=0, keepdims=True)


def _column(row: Any) -> Any:
    """[1, keys] transposed to [keys, LANES], the same in all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _add(r: Refs, sizes: Sizes) -> None:
    """Add what the keys of this block receive from the queries of this block, 128 queries at a time."""
    kind = jnp.float32 if jnp.float32 in (r.k.dtype, r.q.dtype) else jnp.bfloat16
    k, precision = r.k[0].astype(kind), jax.lax.Precision.HIGHEST if kind == jnp.float32 else None
    for head, start in product(range(r.q.shape[1]), range(0, r.q.shape[2], LANES)):
        at = slice(start, start + LANES)
        z = jax.lax.dot_general(
            k, r.q[0, head, at].astype(kind), (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32, precision=precision,
        )  # fmt: skip
        if sizes.softcap is None:
            z = z * (sizes.scale * LOG2_E)
        else:
            z = sizes.softcap * LOG2_E * jnp.tanh(z * (sizes.scale / sizes.softcap))
        if r.bias is not None:
            z = z + r.biases[...]
        asked = r.q_pos[0, :, at]
        seen = r.pos[...] <= asked
        if sizes.window is not None:
            seen &= r.pos[...] > asked - sizes.window
        lse = r.lse[0, head : head + 1, at]
        # A query that attends to nothing contributes nothing.
        base = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
        # Hidden entries may be anything: they are selected away, not multiplied by zero.
        p = jnp.where(seen, jnp.exp2(z - base), 0.0)
        own = head if sizes.heads > 1 else 0
        for n, name in enumerate(sizes.want):
            old = r.sums[n, own]
            r.sums[n, own] = jnp.maximum(old, p) if name == "max" else old + _part(name, p, r, at, sizes)


def _part(name: str, p: Any, r: Refs, at: slice, sizes: Sizes) -> Any:
    """Return what one probability adds to an additive statistic."""
    if name == "squares":
        return p * p
    if name == "count":
        return jnp.where(p > sizes.threshold, 1.0, 0.0)
    return p * r.weight[0, :, at] if name in ("last_mean", "weighted") else p


def attention_stats(
    q: jax.Array,
    k: jax.Array,
    lse: jax.Array,
    q_pos: jax.Array,
    k_pos: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    first: jax.Array,
    final: jax.Array,
    *,
    sizes: Sizes,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Return every wanted statistic of I KV heads, [I, heads, S] float32.

    q [I, A, C, H]: A heads of C queries, in blocks of `sizes.rows` of each, a multiple of 128; k [I, S, H];
    lse [I, A, C]. q_pos (int32, -1 for no query), k_pos (int32, -1 for an empty slot), weight (of "last_mean"
    or "weighted") and bias are rows [I, 1, C or S], padded to whole blocks; with fewer than I rows,
    neighbouring heads share one. first, final [I, key blocks]: the first and last block of queries that may
    see part of a block of keys.
    """
    (lists, _, count, _), slots = q.shape, k.shape[1]
    inputs = _inputs(q, k, lse, q_pos, k_pos, weight, bias, sizes)
    found = jax.ShapeDtypeStruct((lists, sizes.heads, slots), jnp.float32)
    block = pl.BlockSpec((1, sizes.heads, sizes.keys), lambda i, s, *_: (i, 0, s))
    scratch = {
        "sums": pltpu.VMEM((len(sizes.want), sizes.heads, sizes.keys, LANES), jnp.float32),
        "pos": pltpu.VMEM((sizes.keys, LANES), jnp.int32),
    }
    if bias is not None:
        scratch["biases"] = pltpu.VMEM((sizes.keys, LANES), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, names=("first", "final", *inputs, "outs", *scratch)),
        out_shape=[found for _ in sizes.want],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(lists, pl.cdiv(slots, sizes.keys), pl.cdiv(count, sizes.rows)),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[block for _ in sizes.want],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="attention_stats",
    )(first, final, *(x for x, _ in inputs.values()))


def _inputs(
    q: jax.Array, k: jax.Array, lse: jax.Array, q_pos: jax.Array, k_pos: jax.Array,
    weight: jax.Array | None, bias: jax.Array | None, sizes: Sizes,
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:  # fmt: skip
    """Build the blocked operands, by their names in the kernel."""
    lists, heads, _, width = q.shape

    def asked(i: Any, s: Any, t: Any, first: Any, final: Any) -> Any:
        # A block that sees nothing is not fetched: the previous one stays.
        return jnp.minimum(jnp.maximum(t, first[i, s]), final[i, s])

    def of(*shape: int) -> pl.BlockSpec:
        """Build the block of a head's queries in a step."""
        zeros = (0,) * (len(shape) - 2)
        return pl.BlockSpec((1, *shape), lambda i, s, t, *at: (i, 0, asked(i, s, t, *at), *zeros))

    def row(x: Any) -> pl.BlockSpec:
        each = lists // x.shape[0]
        return pl.BlockSpec((1, 1, sizes.rows), lambda i, s, t, *at: (i // each, 0, asked(i, s, t, *at)))

    def side(x: Any) -> pl.BlockSpec:
        each = lists // x.shape[0]
        return pl.BlockSpec((1, 1, sizes.keys), lambda i, s, *_: (i // each, 0, s))

    inputs = {
        "q": (q, of(heads, sizes.rows, width)),
        "k": (k, pl.BlockSpec((1, sizes.keys, width), lambda i, s, *_: (i, s, 0))),
        "lse": (lse, of(heads, sizes.rows)),
        "q_pos": (q_pos, row(q_pos)),
        "k_pos": (k_pos, side(k_pos)),
    }
    if weight is not None:
        inputs["weight"] = (weight, row(weight))
    if bias is not None:
        inputs["bias"] = (bias, side(bias))
    return inputs
