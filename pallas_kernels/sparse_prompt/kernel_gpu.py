"""The GPU kernel of sparse prompts: queries of a segment, and the blocks of keys that were picked for it.

A program visits the picked blocks one after the other; blocks that were not picked are neither read
nor computed. `kvjax.ops.attention.sparse_prompt` defines the result; the softmax is that of `partial_gpu`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kvjax.pallas_kernels.partial_gpu import NEG_INF, Running, grid, nothing_yet, product, weigh


class Sizes(NamedTuple):
    """Static arguments: queries per segment, keys per block, the logits' parameters, and the cut.

    rows, keys: queries of a program, and keys that it attends to at a time, powers of two from 16 that divide
    a segment and a block. warps, stages: for the compiler.
    """

    segment: int
    block: int
    scale: float
    softcap: float | None
    rows: int
    keys: int
    warps: int
    stages: int


def _kernel(counts, lengths, order, q, k, v, out, lse, *, lists: int, sizes: Sizes) -> None:
    row, segment, part = (pl.program_id(n) for n in range(3))
    sequence, number = jax.lax.div(row, lists), jax.lax.rem(row, lists)
    head = jax.lax.div(number * k.shape[1], lists)
    parts, group = sizes.segment // sizes.rows, q.shape[1] // lists
    asker = number * group + jax.lax.div(part, parts)
    asked = segment * sizes.segment + jax.lax.rem(part, parts) * sizes.rows + jnp.arange(sizes.rows)
    length, per = lengths[row], sizes.block // sizes.keys
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    own = jnp.where(asked < length, asked, -1)
    queries = _load(q, sequence, asker, asked, own >= 0).astype(kind)

    def visit(step: Any, running: Running) -> Running:
        block = order[row, segment, jax.lax.div(step, per)]
        key = block * sizes.block + jax.lax.rem(step, per) * sizes.keys + jnp.arange(sizes.keys)
        live = key < length
        z = sizes.scale * product(queries, _load(k, sequence, head, key, live).astype(kind), 1)
        z = z if sizes.softcap is None else sizes.softcap * jnp.tanh(z / sizes.softcap)
        running, (p,) = weigh(running, jnp.where(key[None] <= own[:, None], z, NEG_INF))
        values = _load(v, sequence, head, key, live).astype(kind)
        return running._replace(acc=(running.acc[0] + product(p.astype(kind), values, 0),))

    start = nothing_yet(sizes.rows, [_wide(v.shape[3])])
    r = jax.lax.fori_loop(0, counts[row, segment] * per, visit, start)
    safe = jnp.where(r.total == 0.0, 1.0, r.total)
    plt.store(lse.at[sequence, asker, asked], jnp.where(r.total == 0.0, NEG_INF, r.top + jnp.log(safe)))
    lane = jnp.arange(r.acc[0].shape[1])
    inside = jnp.broadcast_to((lane < v.shape[3])[None], r.acc[0].shape)
    where = out.at[sequence, asker, *grid(asked, lane)]
    plt.store(where, (r.acc[0] / safe[:, None]).astype(out.dtype), mask=inside)


def _wide(width: int) -> int:
    """Find the power of two, from 16, that holds a row."""
    return max(16, pl.next_power_of_2(width))


def _load(ref: Any, sequence: Any, head: Any, token: Any, live: Any) -> Any:
    """Rows [n, W] of tokens of a head of [B, K, T, H], 0 where `live` is false and past the width."""
    lane = jnp.arange(_wide(ref.shape[3]))
    wanted = jnp.broadcast_to(live[:, None], (token.shape[0], lane.shape[0]))
    if ref.shape[3] != lane.shape[0]:
        wanted = wanted & (lane < ref.shape[3])[None]
    return plt.load(ref.at[sequence, head, *grid(token, lane)], mask=wanted, other=0)


def sparse_prompt(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    order: jax.Array,
    counts: jax.Array,
    lengths: jax.Array,
    *,
    sizes: Sizes,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(out [B, N, T, V], lse [B, N, T]) of q [B, N, T, H], k [B, K, T, H] and v [B, K, T, V].

    order [B P, I, J]: the blocks of I segments of P lists, the picked ones first. counts [B P, I]: how many
    were picked. lengths [B P]: tokens of each row.
    """
    b, n, tokens, _ = q.shape
    lists = order.shape[0] // b
    parts = n // lists * sizes.segment // sizes.rows
    return tuple(
        pl.pallas_call(
            partial(_kernel, lists=lists, sizes=sizes),
            grid=(order.shape[0], order.shape[1], parts),
            out_shape=[
                jax.ShapeDtypeStruct((b, n, tokens, v.shape[3]), q.dtype),
                jax.ShapeDtypeStruct((b, n, tokens), jnp.float32),
            ],
            compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
            interpret=interpret,
            name="sparse_prompt",
        )(counts, lengths, order, q, k, v)
    )
