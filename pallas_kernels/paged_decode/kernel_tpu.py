"""The TPU kernel of paged decoding: pages come by manual DMA, many per step, in two buffers.

One grid step is one (sequence, KV head). It loops over steps of several pages up to that head's own length:
the copies of the next step start before the current one is waited for, and the last step of a head starts
the first one of the next head, so that the memory never idles. Pages behind the length are not copied.
What it computes is defined by `kvjax.ops.paged_decode`, what a page holds by `kvjax.ops.page_pool`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.streaming import LANES, NEG_INF, start, wait

from .unpack import page_numbers, unpack


class Sizes(NamedTuple):
    """What is static: pages per step, numbers of heads, and what is done to the logits.

    page: tokens of a page, rows: words of its keys. names: the numbers behind its values, in order. queries:
    rows of q that are real. heads: (sequence, KV head) pairs of one core. length: every head's, where it is
    known and made of whole steps: for the compiler's estimates, which guess at loops whose trips are data.
    """

    step: int
    page: int
    rows: int
    payload: str
    names: tuple[str, ...]
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
    out: Any
    lse: Any
    mass: Any
    buffer: Any
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
    tokens = sizes.step * sizes.page
    length = r.lengths[head] if sizes.length is None else sizes.length
    steps = pl.cdiv(length, tokens)
    more = j + 1 < sizes.heads
    next_length = jnp.where(more, r.lengths[jnp.where(more, head + 1, head)], 0)
    if sizes.length is not None:
        next_length = sizes.length

    @pl.when(j == 0)
    def _() -> None:
        r.turn[0] = 0
        _copies(r, sizes, lambda n: r.table[0, 0, n], length, 0, 0, start)

    turn = r.turn[0]
    r.top[...] = jnp.full_like(r.top, NEG_INF)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)

    @pl.when((steps == 0) & more)
    def _() -> None:
        _copies(r, sizes, lambda n: r.next_table[0, 0, n], next_length, 0, turn, start)

    def visit(s: Any, carry: Any) -> Any:
        slot = jax.lax.rem(turn + s, 2)

        last = s + 1 == steps

        @pl.when(jnp.logical_not(last) | more)
        def _() -> None:
            first = jnp.where(last, 0, (s + 1) * sizes.step)
            then = length if sizes.length is not None else jnp.where(last, next_length, length)

            def page(n: Any) -> Any:
                # Two reads and a choice are fewer instructions than the copies of all pages written twice.
                return jnp.where(last, r.next_table[0, 0, n], r.table[0, 0, first + n])

            _copies(r, sizes, page, then, first, 1 - slot, start)

        _copies(r, sizes, lambda n: r.table[0, 0, s * sizes.step + n], length, s * sizes.step, slot, wait)
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


def _copies(
    r: Refs,
    sizes: Sizes,
    page: Callable[[Any], Any],
    length: Any,
    first: Any,
    slot: Any,
    act: Callable[[Any], None],
) -> None:
    """Starts or waits for the copies of one step's pages that exist; its first is a list's page `first`."""
    step = sizes.step

    def one(n: Any) -> None:
        source = r.pages.at[r.layer[0], page(n)]
        act(pltpu.make_async_copy(source, r.buffer.at[slot, n], r.arrived.at[slot]))

    def all_pages() -> None:
        for n in range(step):
            one(n)

    if isinstance(length, int):
        all_pages()
        return
    live = jnp.clip(pl.cdiv(length, sizes.page) - first, 0, step)
    pl.when(live == step)(all_pages)

    @pl.when(live < step)
    def _() -> None:
        jax.lax.fori_loop(0, live, lambda n, carry: (one(n), carry)[1], 0)


def _attend(r: Refs, sizes: Sizes, s: Any, slot: Any, length: Any, *, whole: bool) -> None:
    """Folds the pages of one step into the running maximum, total and sum of values."""
    tokens = sizes.step * sizes.page
    first = s * tokens
    kind = jnp.float32 if r.q.dtype == jnp.float32 else jnp.bfloat16
    numbers = page_numbers(r.buffer, slot, sizes)
    z = _scores(r, sizes, slot, numbers, kind)
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" in numbers:
        z = z + numbers["bias"]
    live = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) + first < length
    seen = None if whole else live
    if "pos" in numbers:
        asked = r.q_pos[0][:, :1].astype(jnp.float32)
        visible = (numbers["pos"] >= 0.0) & (numbers["pos"] <= asked)
        if sizes.window is not None:
            visible &= numbers["pos"] > asked - sizes.window
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
    r.acc[...] = r.acc[...] * fade + _values(r, sizes, slot, numbers, p, None if whole else live, kind)


def _scores(r: Refs, sizes: Sizes, slot: Any, numbers: dict[str, Any], kind: Any) -> Any:
    """q k' * scale of a step, [queries, tokens]."""
    q = r.q[0].astype(jnp.float32)
    codes = unpack(r.buffer[slot, :, : sizes.rows], sizes.payload, kind)
    if "channel_scale" in numbers:
        # Every page has scales of its own: its queries take them.
        scales, zeros = numbers["channel_scale"], numbers["channel_zero"]
        parts = []
        for n in range(sizes.step):
            own = (q * scales[n]).astype(kind)
            parts.append(_dot(own, codes[n], 1) + (q * zeros[n]).sum(-1, keepdims=True))
        return jnp.concatenate(parts, axis=1) * sizes.scale
    z = _dot(q.astype(kind), codes.reshape(-1, codes.shape[-1]), 1)
    z = z * numbers["key_scale"] if "key_scale" in numbers else z
    z = z + q.sum(-1, keepdims=True) * numbers["key_zero"] if "key_zero" in numbers else z
    return z * sizes.scale


def _values(
    r: Refs, sizes: Sizes, slot: Any, numbers: dict[str, Any], p: Any, live: Any | None, kind: Any
) -> Any:
    """The sum of a step's values weighted by p; `live` where it has slots behind the length."""

    def number(name: str) -> Any:
        return numbers[name] if live is None else jnp.where(live, numbers[name], 0.0)

    weights = p * number("value_scale") if "value_scale" in numbers else p
    codes = unpack(r.buffer[slot, :, sizes.rows : 2 * sizes.rows], sizes.payload, kind)
    codes = codes.reshape(-1, codes.shape[-1])
    if live is not None and sizes.payload.startswith(("float", "bfloat")):
        # Rows behind the length hold anything, and zero times anything may be no number.
        real = jax.lax.broadcasted_iota(jnp.int32, (codes.shape[0], 1), 0) < live.astype(jnp.int32).sum()
        codes = jnp.where(real, codes, jnp.zeros((), kind))
    out = _dot(weights.astype(kind), codes, 0)
    if "value_zero" in numbers:
        out = out + (p * number("value_zero")).sum(-1, keepdims=True)
    return out


def _dot(a: Any, b: Any, contract: int) -> Any:
    """a [m, k] with b over its axis `contract`, exact for float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
    )


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
    words: jax.Array,
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

    q [I, R, W] with R a multiple of 8 and W of 128; words [L, P, rows, W] int32; table [I, 1, M] with M a
    multiple of the pages per step; lengths [I]; q_pos [I, R, 128] int32; layer [1]. Mass behind a list's
    length is not written.
    """
    lists, count, width = q.shape
    slots = table.shape[2] * sizes.page

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
        "pages": (words, anywhere),
    }
    outputs = {
        "out": (jax.ShapeDtypeStruct(q.shape, q.dtype), of(count, width)),
        "lse": (jax.ShapeDtypeStruct((lists, count, LANES), jnp.float32), of(count, LANES)),
    }
    scratch = {
        "buffer": pltpu.VMEM((2, sizes.step, *words.shape[2:]), words.dtype),
        "top": pltpu.VMEM((count, LANES), jnp.float32),
        "total": pltpu.VMEM((count, LANES), jnp.float32),
        "acc": pltpu.VMEM((count, width), jnp.float32),
        "turn": pltpu.SMEM((1,), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
    }
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
