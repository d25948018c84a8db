"""The TPU kernel of paged decoding: pages come by manual DMA, many per step, in two buffers.

One grid step is one (sequence, KV head). It loops over steps of several pages up to that head's own length:
the copies of the next step start before the current one is waited for, and the last step of a head starts
the first one of the next head, so that the memory never idles. Pages behind the length are not copied.
Shapes are `shapes.py`'s; what it computes is defined by `kvjax.ops.paged_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
NEG_INF = float("-inf")


class Sizes(NamedTuple):
    """What is static: pages per step, numbers of heads, and what is done to the logits.

    rows: names of the side rows of a page, among "pos", "key_scale", "value_scale" and "bias". queries: rows
    of q that are real. heads: (sequence, KV head) pairs of one core. length: every head's, where it is known
    and made of whole steps: for the compiler's estimates, which guess at loops whose trips are data.
    """

    step: int
    rows: tuple[str, ...]
    queries: int
    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    mass: bool = False
    length: int | None = None


class Refs(NamedTuple):
    """The kernel's operands, results and scratch memory; None where a call has no such thing."""

    layer: Any
    lengths: Any
    table: Any
    next_table: Any
    q: Any
    q_pos: Any
    pages: Any
    rows: Any
    out: Any
    lse: Any
    mass: Any
    buffer: Any
    row_buffer: Any
    scores: Any
    top: Any
    total: Any
    acc: Any
    turn: Any
    arrived: Any


def _kernel(*refs: Any, sizes: Sizes, names: tuple[str, ...]) -> None:
    r = Refs(**{**dict.fromkeys(Refs._fields), **dict(zip(names, refs, strict=True))})
    j = pl.program_id(1)
    head = pl.program_id(0) * sizes.heads + j
    tokens = sizes.step * r.buffer.shape[3]
    length = r.lengths[head] if sizes.length is None else sizes.length
    steps = pl.cdiv(length, tokens)
    more = j + 1 < sizes.heads
    next_length = jnp.where(more, r.lengths[jnp.where(more, head + 1, head)], 0)
    if sizes.length is not None:
        next_length = sizes.length

    @pl.when(j == 0)
    def _() -> None:
        r.turn[0] = 0
        _copies(r, r.table, length, 0, 0, _start)

    turn = r.turn[0]
    r.top[...] = jnp.full_like(r.top, NEG_INF)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)

    @pl.when((steps == 0) & more)
    def _() -> None:
        _copies(r, r.next_table, next_length, 0, turn, _start)

    def visit(s: Any, carry: Any) -> Any:
        slot = jax.lax.rem(turn + s, 2)

        @pl.when(s + 1 < steps)
        def _() -> None:
            _copies(r, r.table, length, s + 1, 1 - slot, _start)

        @pl.when((s + 1 == steps) & more)
        def _() -> None:
            _copies(r, r.next_table, next_length, 0, 1 - slot, _start)

        _copies(r, r.table, length, s, slot, _wait)
        if sizes.length is not None:
            _attend(r, sizes, s, slot, length, whole=True)
            return carry
        whole = (s + 1) * tokens <= length
        pl.when(whole)(lambda: _attend(r, sizes, s, slot, length, whole=True))
        pl.when(jnp.logical_not(whole))(lambda: _attend(r, sizes, s, slot, length, whole=False))
        return carry

    jax.lax.fori_loop(0, steps, visit, 0)
    r.turn[0] = jax.lax.rem(turn + steps, 2)
    _finish(r, sizes, steps, tokens)


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


def _copies(r: Refs, table: Any, length: Any, s: Any, slot: Any, act: Callable[[Any], None]) -> None:
    """Starts or waits for the copies of the pages of step `s` that exist: page and side rows."""
    step, page = r.buffer.shape[1], r.buffer.shape[3]

    def one(n: Any) -> None:
        at = table[0, 0, s * step + n]
        act(pltpu.make_async_copy(r.pages.at[r.layer[0], at], r.buffer.at[slot, n], r.arrived.at[slot]))
        if r.rows is not None:
            target = r.row_buffer.at[slot, n]
            act(pltpu.make_async_copy(r.rows.at[r.layer[0], at], target, r.arrived.at[slot]))

    def all_pages() -> None:
        for n in range(step):
            one(n)

    if isinstance(length, int):
        all_pages()
        return
    live = jnp.clip(pl.cdiv(length - s * step * page, page), 0, step)
    pl.when(live == step)(all_pages)

    @pl.when(live < step)
    def _() -> None:
        jax.lax.fori_loop(0, live, lambda n, carry: (one(n), carry)[1], 0)


def _attend(r: Refs, sizes: Sizes, s: Any, slot: Any, length: Any, *, whole: bool) -> None:
    """Folds the pages of one step into the running maximum, total and sum of values."""
    step, _, page, width = r.buffer.shape[1:]
    tokens, first = step * page, s * step * page
    q = r.q[0]
    kind = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    k, v = (r.buffer[slot, :, side].reshape(tokens, width).astype(kind) for side in (0, 1))
    side = {n: _row(r, slot, i) for i, n in enumerate(sizes.rows)}
    precision = jax.lax.Precision.HIGHEST if kind == jnp.float32 else None
    z = jax.lax.dot_general(
        q.astype(kind), k, (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32, precision=precision,
    )  # fmt: skip
    z = z * sizes.scale
    if "key_scale" in side:
        z = z * side["key_scale"]
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" in side:
        z = z + side["bias"]
    live = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) + first < length
    seen = None if whole else live
    if "pos" in side:
        asked = r.q_pos[0][:, :1].astype(jnp.float32)
        visible = (side["pos"] >= 0.0) & (side["pos"] <= asked)
        if sizes.window is not None:
            visible &= side["pos"] > asked - sizes.window
        seen = visible if seen is None else visible & seen
    if seen is not None:
        z = jnp.where(seen, z, NEG_INF)
    if sizes.mass:
        r.scores[:, pl.ds(pl.multiple_of(first, LANES), tokens)] = z
    old = r.top[:, :1]
    top = jnp.maximum(old, z.max(-1, keepdims=True))
    safe = jnp.where(top == NEG_INF, 0.0, top)
    p, fade = jnp.exp(z - safe), jnp.exp(old - safe)
    r.top[...] = jnp.broadcast_to(top, r.top.shape)
    r.total[...] = r.total[...] * fade + p.sum(-1, keepdims=True)
    if "value_scale" in side:
        p = p * (side["value_scale"] if whole else jnp.where(live, side["value_scale"], 0.0))
    if not whole and jnp.issubdtype(r.buffer.dtype, jnp.floating):
        # Rows behind the length hold anything, and zero times anything may be no number.
        real = jax.lax.broadcasted_iota(jnp.int32, (tokens, 1), 0) + first < length
        v = jnp.where(real, v, jnp.zeros((), kind))
    values = jax.lax.dot_general(
        p.astype(kind), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
    )
    r.acc[...] = r.acc[...] * fade + values


def _row(r: Refs, slot: Any, index: int) -> Any:
    """A side row of all tokens of a step, [1, tokens]."""
    step = r.row_buffer.shape[1]
    return jnp.concatenate([r.row_buffer[slot, n, index : index + 1] for n in range(step)], axis=1)


def _finish(r: Refs, sizes: Sizes, steps: Any, tokens: int) -> None:
    total = r.total[:, :1]
    safe = jnp.where(total == 0.0, 1.0, total)
    r.out[0] = (r.acc[...] / safe).astype(r.out.dtype)
    lse = jnp.where(total == 0.0, NEG_INF, r.top[:, :1] + jnp.log(safe))
    r.lse[0] = jnp.broadcast_to(lse, r.lse.shape[1:])
    if not sizes.mass:
        return
    base = jnp.where(lse == NEG_INF, 0.0, lse)
    real = jax.lax.broadcasted_iota(jnp.int32, base.shape, 0) < sizes.queries

    def write(s: Any, carry: Any) -> Any:
        at = pl.ds(pl.multiple_of(s * tokens, LANES), tokens)
        p = jnp.where(real, jnp.exp(r.scores[:, at] - base), 0.0)
        r.mass[0, :, at] = p.sum(0, keepdims=True)
        return carry

    jax.lax.fori_loop(0, steps, write, 0)


def paged_decode(
    q: jax.Array,
    pages: jax.Array,
    rows: jax.Array | None,
    table: jax.Array,
    lengths: jax.Array,
    q_pos: jax.Array,
    layer: jax.Array,
    *,
    sizes: Sizes,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """(out [I, R, W], lse [I, R, 128], mass [I, 1, S] where asked for) of I = B K lists.

    q [I, R, W] with R a multiple of 8 and W of 128; pages [L, P, 2, page, W], keys and values; rows
    [L, P, C, page] float32, named by `sizes.rows`, or None; table [I, 1, M] with M a multiple of the pages
    per step; lengths [I]; q_pos [I, R, 128] int32; layer [1]. Mass behind a list's length is not written.
    """
    lists, count, width = q.shape
    page, slots = pages.shape[3], table.shape[2] * pages.shape[3]

    def of(*shape: int, ahead: int = 0, **options: Any) -> pl.BlockSpec:
        """The block of the head of a grid step, or of the one after it."""

        def at(core: Any, j: Any, *_: Any) -> tuple[Any, ...]:
            return (jnp.minimum(core * sizes.heads + j + ahead, lists - 1), *(0,) * len(shape))

        return pl.BlockSpec((1, *shape), at, **options)

    anywhere, smem = pl.BlockSpec(memory_space=pl.ANY), pltpu.SMEM
    inputs: dict[str, tuple[Any, Any]] = {
        "table": (table, of(1, table.shape[2], memory_space=smem)),
        "next_table": (table, of(1, table.shape[2], ahead=1, memory_space=smem)),
        "q": (q, of(count, width)),
        "q_pos": (q_pos, of(count, LANES)),
        "pages": (pages, anywhere),
    }
    outputs = {
        "out": (jax.ShapeDtypeStruct(q.shape, q.dtype), of(count, width)),
        "lse": (jax.ShapeDtypeStruct((lists, count, LANES), jnp.float32), of(count, LANES)),
    }
    scratch = {
        "buffer": pltpu.VMEM((2, sizes.step, 2, page, width), pages.dtype),
        "top": pltpu.VMEM((count, LANES), jnp.float32),
        "total": pltpu.VMEM((count, LANES), jnp.float32),
        "acc": pltpu.VMEM((count, width), jnp.float32),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
    }
    if rows is not None:
        inputs["rows"] = (rows, anywhere)
        scratch["row_buffer"] = pltpu.VMEM((2, sizes.step, *rows.shape[2:]), rows.dtype)
    if sizes.mass:
        outputs["mass"] = (jax.ShapeDtypeStruct((lists, 1, slots), jnp.float32), of(1, slots))
        scratch["scores"] = pltpu.VMEM((count, slots), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, names=("layer", "lengths", *inputs, *outputs, *scratch)),
        out_shape=[shape for shape, _ in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, sizes.heads),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_decode",
    )(layer, lengths, *(x for x, _ in inputs.values()))
