"""Shared by the GPU decode kernels: a softmax over one part of a KV head, to be merged with the others.

A KV head is split over many programs, since a decode step has too few heads to fill a GPU: Flash-Decoding
(Dao et al., 2023). `kvjax.ops.decode.partial_gpu` decides the splits and merges their results.

The kernels are lowered by Pallas' Triton backend, which newer releases of jax call deprecated: the one that
replaces it supports no GPU before Hopper in jax 0.10, and multiplies 64 rows at once, while a decode step has
4 to 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

NEG_INF = float("-inf")
SMALLEST = 16  # the smallest product on the matrix units


class Cut(NamedTuple):
    """How a KV head is split.

    block: units per step, a power of two from 16; blocks: steps per split, of which there are `splits`;
    warps, stages: for the compiler; queries: rows of q that are real.
    """

    block: int
    blocks: int
    splits: int
    warps: int
    stages: int
    queries: int


class Running(NamedTuple):
    """A softmax so far: the largest logit [R], the sum of weights [R], weighted values [R, V] in pieces."""

    top: Any
    total: Any
    acc: tuple[Any, ...]


def nothing_yet(queries: int, widths: Sequence[int]) -> Running:
    """Start a softmax before its first logit; `widths`: those of the pieces of its values."""
    return Running(
        jnp.full((queries,), NEG_INF, jnp.float32),
        jnp.zeros((queries,), jnp.float32),
        tuple(jnp.zeros((queries, width), jnp.float32) for width in widths),
    )


def weigh(r: Running, *logits: Any) -> tuple[Running, list[Any]]:
    """Update `r` with logits [R, S], -inf where hidden; return it and the weights for adding values."""
    top = r.top
    for z in logits:
        top = jnp.maximum(top, z.max(1))
    safe = jnp.where(top == NEG_INF, 0.0, top)
    fade = jnp.exp(r.top - safe)
    weights = [jnp.exp(z - safe[:, None]) for z in logits]
    total = r.total * fade
    for p in weights:
        total = total + p.sum(1)
    return Running(top, total, tuple(x * fade[:, None] for x in r.acc)), weights


def finish(r: Running, out: Any, lse: Any, i: Any, split: Any, queries: int) -> None:
    """Write the part of head i: out [I, C, Q, V] of the real queries, and lse [I, C, R]."""
    count, first = r.top.shape[0], 0
    safe = jnp.where(r.total == 0.0, 1.0, r.total)
    lse[i, split] = jnp.where(r.total == 0.0, NEG_INF, r.top + jnp.log(safe))
    real = (jnp.arange(count) < queries)[:, None]
    for acc in r.acc:
        where = grid(jnp.arange(count), first + jnp.arange(acc.shape[1]))
        plt.store(out.at[i, split, *where], acc / safe[:, None], mask=jnp.broadcast_to(real, acc.shape))
        first += acc.shape[1]


def keep_logits(logits: Any, i: Any, z: Any, slot: Any, live: Any, queries: int) -> None:
    """Write logits z [R, S] of the real queries to [I, Q, S], where slots are live, for the mass."""
    rows = jnp.arange(z.shape[0])
    plt.store(logits.at[i, *grid(rows, slot)], z, mask=(rows < queries)[:, None] & live[None])


def grid(a: Any, b: Any) -> tuple[Any, Any]:
    """Make indices of every pair of a and b."""
    shape = (a.shape[0], b.shape[0])
    return jnp.broadcast_to(a[:, None], shape), jnp.broadcast_to(b[None], shape)


def product(a: Any, b: Any, contract: int) -> Any:
    """Multiply a [m, k] with b over its axis `contract`, exact for float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
    )


def trips(length: Any, first: Any, cut: Cut) -> Any:
    """How many steps a split has that begins at `first` of a head's `length`."""
    return jnp.clip(pl.cdiv(length - first, cut.block), 0, cut.blocks)


def call(kernel: Any, cut: Cut, shapes: Sequence[tuple[int, ...]], name: str, interpret: bool) -> Any:
    """Build the Pallas call with a program for every split of every head; shapes: of its float32 results."""
    return pl.pallas_call(
        kernel,
        grid=(shapes[0][0], cut.splits),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name=name,
    )
