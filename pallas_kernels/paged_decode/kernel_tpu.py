"""The TPU kernel of paged decoding: pages are copied by manual DMA, many per step, into two buffers.

One grid step is one (sequence, KV head), whose pages are streamed up to that head's own length; those after
it are not copied. `kvjax.ops.decode.paged_decode` defines the result, and `kvjax.ops.decode.page_pool` the
pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels import streaming
from kvjax.pallas_kernels.rotation import RotatedChannels, rotated_logits
from kvjax.pallas_kernels.streaming import LANES, NEG_INF, Running, product

from .logits import logits
from .unpack import blank, codes_of, page_numbers


class Sizes(NamedTuple):
    """Static arguments: pages per step, numbers of heads, and the logits' parameters.

    page: tokens of a page, rows: words of its keys, values: the first row of its values, 0 if they are beside
    the keys. names: the numbers after its values, in order; groups: groups of tokens with separate channel
    scales. queries: rows of q that are real. heads: (sequence, KV head) pairs of one core. rotated: which
    channels the kernel rotates, by the slots' positions or given phases or, without both, their indices.
    """

    step: int
    page: int
    rows: int
    values: int
    payload: str
    names: tuple[str, ...]
    groups: int
    queries: int
    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    mass: bool = False
    rotated: RotatedChannels | None = None


class Refs(NamedTuple):
    """The kernel's operands, results and scratch memory; None for those that a call does not have."""

    layer: Any
    lengths: Any
    table: Any
    next_table: Any
    q: Any
    q_pos: Any
    angles: Any
    phase: Any
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
    more = j + 1 < sizes.heads
    length = [r.lengths[i] for i in (head, jnp.where(more, head + 1, head))]
    pages = [pl.cdiv(x, sizes.page) for x in length]
    step, tokens = sizes.step, sizes.step * sizes.page

    def copies(ahead: Any, s: Any, slot: Any, act: Any) -> None:
        def one(n: Any) -> None:
            page = streaming.pick(ahead, *(x[0, 0, s * step + n] for x in (r.table, r.next_table)))
            source = r.pages.at[r.layer[0], page]
            act(pltpu.make_async_copy(source, r.buffer.at[slot, n], r.arrived.at[slot]))

        def all_pages() -> None:
            for n in range(step):
                one(n)

        live = jnp.minimum(streaming.pick(ahead, *pages) - s * step, step)
        streaming.each(live, step, all_pages, one)

    streaming.clear(Running(r.top, r.total, r.acc))
    steps = pl.cdiv(length[0], tokens)
    streaming.stream(r.turn, (0, steps), 0, more, copies, partial(_attend, r, sizes, length[0]))
    streaming.finish(Running(r.top, r.total, r.acc), r.out, r.lse)
    if sizes.mass:
        _masses(r, sizes, steps)


def _attend(r: Refs, sizes: Sizes, length: Any, s: Any, slot: Any) -> None:
    """Fold the pages of one step into the running maximum, total and sum of values."""
    tokens = sizes.step * sizes.page
    first = s * tokens
    blank(r.buffer, slot, sizes, length - first)
    kind = jnp.float32 if r.q.dtype == jnp.float32 else jnp.bfloat16
    numbers = page_numbers(r.buffer, slot, sizes)
    place = jax.lax.broadcasted_iota(jnp.int32, (1, tokens), 1) + first
    codes = codes_of(r.buffer, slot, sizes, 0, kind)
    q = r.q[0].astype(jnp.float32)
    if sizes.rotated is None:
        z = logits(q, codes, numbers) * sizes.scale
    else:
        at = pl.ds(pl.multiple_of(first, LANES), tokens)
        phase = numbers.get("pos", place) if r.phase is None else r.phase[0, :, at]
        z = rotated_logits(q, codes, numbers, phase, r.angles[...], sizes.rotated) * sizes.scale
    if sizes.softcap is not None:
        z = sizes.softcap * jnp.tanh(z / sizes.softcap)
    if "bias" in numbers:
        z = z + numbers["bias"]
    seen = place < length
    if "pos" in numbers:
        asked = r.q_pos[0][:, :1].astype(jnp.float32)
        seen = seen & (numbers["pos"] >= 0.0) & (numbers["pos"] <= asked)
        if sizes.window is not None:
            seen &= numbers["pos"] > asked - sizes.window
    z = jnp.where(seen, z, NEG_INF)
    if sizes.mass:
        r.scores[:, pl.ds(pl.multiple_of(first, LANES), tokens)] = z
    p, fade = streaming.weigh(Running(r.top, r.total, r.acc), z)
    weights = p * numbers["value_scale"] if "value_scale" in numbers else p
    if sizes.values:
        codes = codes_of(r.buffer, slot, sizes, sizes.values, kind)
    out = product(weights.astype(kind), codes.reshape(-1, codes.shape[-1]), 0)
    if "value_zero" in numbers:
        out = out + (p * numbers["value_zero"]).sum(-1, keepdims=True)
    r.acc[...] = r.acc[...] * fade + out


def _masses(r: Refs, sizes: Sizes, steps: Any) -> None:
    """Write the probability of every slot, summed over the queries."""
    lse = r.lse[0][:, :1]
    base = jnp.where(lse == NEG_INF, 0.0, lse)
    real = jax.lax.broadcasted_iota(jnp.int32, base.shape, 0) < sizes.queries
    tokens = sizes.step * sizes.page

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
    angles: jax.Array | None = None,
    phase: jax.Array | None = None,
    *,
    sizes: Sizes,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """(out [I, R, W], lse [I, R, 128], mass [I, 1, S] if requested) of I = B K heads.

    q [I, R, W] with R a multiple of 8 and W of 128; words [L, P, rows, W] int32; table [I, 1, M] with M a
    multiple of the pages per step; lengths [I]; q_pos [I, R, 128] int32; layer [1]. If keys are to be
    rotated, angles is [half, 128] as for `rotated_logits`, and phase None or [I, 1, S] int32. Mass after a
    head's length is not written.
    """
    (lists, count, width), slots = q.shape, table.shape[2] * sizes.page
    of = partial(streaming.spec_of_list, lists, sizes.heads)
    inputs = {
        "table": (table, of(1, table.shape[2], memory_space=pltpu.SMEM)),
        "next_table": (table, of(1, table.shape[2], ahead=1, memory_space=pltpu.SMEM)),
        "q": (q, of(count, width)),
        "q_pos": (q_pos, of(count, LANES)),
    }
    if angles is not None:
        inputs["angles"] = angles, pl.BlockSpec(angles.shape, lambda *_: (0, 0))
    if phase is not None:
        inputs["phase"] = phase, of(1, slots)
    inputs["pages"] = words, pl.BlockSpec(memory_space=pl.ANY)
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
