"""The TPU kernel of the chunked forward pass: the state stays in VMEM from one chunk to the next.

One grid step is one chunk of a few heads. `kvjax.ops.recurrent.gated_delta` defines the result; the
mathematics of a chunk is in `chunk.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .chunk import HeadChunk, chunk, take_turns

LANES = 128


class Sizes(NamedTuple):
    """Static arguments: heads, tokens per chunk, heads per grid step, chunks between saved states.

    length: the number of tokens, if the last chunk is not full. exact: see `chunk.chunk`. span: 0 saves no
    states.
    """

    heads: int
    chunk: int
    together: int
    length: int
    exact: bool
    span: int = 0


def chunks(sizes: Sizes) -> int:
    """Chunks of a sequence; the last one may be cut short."""
    return pl.cdiv(sizes.length, sizes.chunk)


def rows_of(ref: Any, head: int, first: Any, sizes: Sizes) -> Any:
    """One head's part [C, K] of a block [1, C, heads * K], zero after the end of the sequence."""
    width = ref.shape[2] // sizes.together
    x = ref[0, :, head * width : (head + 1) * width]
    if sizes.length % sizes.chunk == 0:
        return x
    real = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + first < sizes.length
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def take(refs: HeadChunk, head: int, first: Any, sizes: Sizes) -> HeadChunk:
    """Take the tokens of one of a step's heads. Those after the end of the sequence change nothing."""

    def one(ref: Any) -> Any:
        return ref[0, head, 0] if len(ref.shape) == 5 else rows_of(ref, head, first, sizes)

    return HeadChunk(*(None if ref is None else one(ref) for ref in refs))


def _kernel(*refs: Any, sizes: Sizes, erases: bool) -> None:
    tokens = HeadChunk(*refs[:5]) if erases else HeadChunk(*refs[:4], None)  # pyright: ignore[reportCallIssue]
    start, out, state, *saved = refs[5 if erases else 4 :]
    at = pl.program_id(2)

    @pl.when(at == 0)
    def _() -> None:
        state[...] = start[...]

    if saved:

        @pl.when(jax.lax.rem(at, sizes.span) == 0)
        def _() -> None:
            saved[0][0, :, 0] = state[0]

    width = out.shape[2] // sizes.together
    heads = range(sizes.together)
    steps = (chunk(take(tokens, n, at * sizes.chunk, sizes), state[0, n], exact=sizes.exact) for n in heads)
    for n, (o, new, _) in enumerate(take_turns(steps)):
        out[0, :, n * width : (n + 1) * width] = o.astype(out.dtype)
        state[0, n] = new


def specs(tokens: HeadChunk, sizes: Sizes, at: Any) -> HeadChunk:
    """Blocks of one chunk of a step's heads, [1, C, heads * K]; `at` gives the chunk."""

    def one(x: Any) -> pl.BlockSpec:
        if x.ndim == 5:  # one decay per token: [B, H, chunks, 1, C]
            return pl.BlockSpec((1, sizes.together, 1, *x.shape[3:]), lambda b, h, *j: (b, h, at(*j), 0, 0))
        width = x.shape[2] // sizes.heads * sizes.together
        return pl.BlockSpec((1, sizes.chunk, width), lambda b, h, *j: (b, at(*j), h))

    return HeadChunk(*(None if x is None else one(x) for x in tokens))


def state_spec(state: Any, sizes: Sizes) -> pl.BlockSpec:
    """Specify a step's heads of [B, H, K, V], the same in all of its chunks."""
    return pl.BlockSpec((1, sizes.together, *state.shape[2:]), lambda b, h, *_: (b, h, 0, 0))


def saved_spec(state: Any, sizes: Sizes, span: Any) -> pl.BlockSpec:
    """Specify a step's heads of one of the saved states [B, H, spans, K, V]; `span` gives its index."""
    return pl.BlockSpec((1, sizes.together, 1, *state.shape[2:]), lambda b, h, *j: (b, h, span(*j), 0, 0))


def forward(
    tokens: HeadChunk, state: jax.Array, *, sizes: Sizes, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """(o [B, T, H * V] as v, final state [B, H, K, V], and if requested the state before every span).

    q, k, p [B, T, H * K], v [B, T, H * V], K and V multiples of 128, the chunk a power of two from 8 on;
    g [B, T, H * K] or, one per token, [B, H, chunks, 1, C] with zeros after the end; g and states float32.
    """
    given = tuple(x for x in tokens if x is not None)
    blocks = specs(tokens, sizes, lambda j: j)
    whole = state_spec(state, sizes)
    outputs = [
        (jax.ShapeDtypeStruct(tokens.v.shape, tokens.v.dtype), blocks.v),
        (jax.ShapeDtypeStruct(state.shape, jnp.float32), whole),
    ]
    if sizes.span:
        spans = pl.cdiv(chunks(sizes), sizes.span)
        shape = (*state.shape[:2], spans, *state.shape[2:])
        kept = saved_spec(state, sizes, lambda j: jax.lax.div(j, sizes.span))
        outputs.append((jax.ShapeDtypeStruct(shape, jnp.float32), kept))
    grid = (state.shape[0], sizes.heads // sizes.together, chunks(sizes))
    return pl.pallas_call(
        partial(_kernel, sizes=sizes, erases=tokens.p is not None),
        out_shape=[shape for shape, _ in outputs],
        grid=grid,
        in_specs=[*(x for x in blocks if x is not None), whole],
        out_specs=[spec for _, spec in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="gated_delta_chunks",
    )(*given, state)
