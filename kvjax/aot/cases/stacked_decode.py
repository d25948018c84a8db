"""Decoding over the dense cache of all layers: the kernel alone, and whole scanned steps around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.models.placement import weight_layout
from kvjax.ops.decode.stacked_decode import CodedSlots, slots_per_step, stacked_append, tpu_stacked_decode

BATCH, HEADS, GROUP, LAYERS = 4, 8, 8, 32


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def stacked_decode(
    device: Device,
    dtype: Any = jnp.bfloat16,
    *,
    width: int = 128,
    packed: bool = False,
    positions: bool = False,
    mass: bool = False,
    slots: int = 32768,
    block: int | None = None,
) -> Case:
    """KV heads of `slots` slots, B = 4, K = 8, G = 8, two layers; `packed`: keys and values in one row."""
    lists = BATCH * HEADS
    row = width * (2 if packed else 1)
    coded = dtype == jnp.uint8
    rows = cache = shape(2, BATCH, HEADS, slots, row, dtype=dtype)
    if coded:
        cache = CodedSlots(rows, shape(2, BATCH, HEADS, slots, dtype=jnp.uint32))
    asked = jnp.bfloat16 if coded else dtype
    operands = (
        shape(BATCH, HEADS * GROUP, 1, width, dtype=asked),
        cache,
        None if packed else cache,
        shape(BATCH, HEADS, dtype=jnp.int32),
        shape(BATCH, 1, dtype=jnp.int32),
        shape(dtype=jnp.int32),
        {"pos": shape(2, BATCH, HEADS, slots, dtype=jnp.int32)} if positions else {},
    )
    item = jnp.dtype(dtype).itemsize
    block = block or slots_per_step(*[rows] * (1 if packed else 2), generation=device.generation)
    first = width if packed else 0

    def run(q: Any, k: Any, v: Any, lengths: Any, q_pos: Any, layer: Any, sides: Any) -> Any:
        return tpu_stacked_decode(
            q, k, v, lengths, q_pos, layer, scale=width**-0.5, values=(first, width), window=None,
            softcap=None, mass=mass, cores=device.cores, block=block, **sides,
        )  # fmt: skip

    moved = lists * slots * (2 * width * item + 8 * coded + 4 * positions + 4 * mass)
    small = 2 * lists * GROUP * width * jnp.dtype(asked).itemsize
    return Case(
        run, operands, moved + small, 4 * lists * GROUP * slots * width, 2 * lists * slots * 2 * width * item,
        "stacked_decode", trips={"1": lists, "2": lists * slots // block}, profiles=False,
    )  # fmt: skip


def step(device: Device, *, tokens: int = 1) -> Case:
    """Decode on one of eight shards of Llama-8B: batch 4, one KV head, 131072 slots, cache donated.

    All 32 layers in one scan: projections, one row appended, attention, MLP, with random weights' shapes.
    """
    d, h, heads, group, slots, mlp = 4096, 128, 1, 4, 131072, 1792
    inner = heads * group * h
    cache = shape(LAYERS, BATCH, heads, slots, h)
    weights = {
        "q": shape(LAYERS, inner, d), "k": shape(LAYERS, d, heads * h), "v": shape(LAYERS, d, heads * h),
        "o": shape(LAYERS, inner, d), "gate": shape(LAYERS, d, mlp), "up": shape(LAYERS, d, mlp),
        "down": shape(LAYERS, mlp, d),
    }  # fmt: skip

    def layer(carry: Any, xs: Any) -> Any:
        (x, k, v, length), (at, w) = carry, xs
        # The query's weights are stored transposed; otherwise a decode loop would first copy them all.
        q, new_k, new_v = jnp.einsum("bd,nd->bn", x, w["q"]), x @ w["k"], x @ w["v"]
        new_k, new_v = (y.reshape(BATCH, heads, h) for y in (new_k, new_v))
        k, v = stacked_append(k, v, new_k, new_v, length, at, implementation="tpu")
        out, *_ = tpu_stacked_decode(
            q.reshape(BATCH, heads * group, 1, h), k, v, jnp.repeat(length[:, None] + 1, heads, 1),
            length[:, None], at, scale=h**-0.5, values=(0, h), window=None, softcap=None, cores=device.cores,
        )  # fmt: skip
        x = x + out.reshape(BATCH, inner) @ w["o"]
        return (x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], k, v, length), None

    def one(x: Any, k: Any, v: Any, length: Any, weights: Any) -> Any:
        numbers = jnp.arange(LAYERS, dtype=jnp.int32)
        (x, k, v, _), _ = jax.lax.scan(layer, (x, k, v, length), (numbers, weights))
        return x, k, v

    def run(x: Any, k: Any, v: Any, length: Any, weights: Any) -> Any:
        if tokens == 1:
            return one(x, k, v, length, weights)

        def token(carry: Any, _: Any) -> Any:
            x, k, v, length = carry
            x, k, v = one(x, k, v, length, weights)
            return (x, k, v, length + 1), x

        (_, k, v, _), out = jax.lax.scan(token, (x, k, v, length), None, length=tokens)
        return out, k, v

    operands = (shape(BATCH, d), cache, cache, shape(BATCH, dtype=jnp.int32), weights)
    numbers = sum(w.size for w in weights.values())
    kept = 2 * 2 * cache.size
    lists = BATCH * heads
    steps = tokens * LAYERS * lists
    block = slots_per_step(cache, cache, generation=device.generation)
    flops = 2 * BATCH * numbers + 4 * lists * group * slots * h * LAYERS
    return Case(
        run, operands, tokens * (2 * numbers + kept), tokens * flops, kept, "stacked_decode",
        trips={"1": steps, "2": steps * slots // block}, profiles=False, donated=(1, 2),
        layouts={4: partial(weight_layout, device.generation)},
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "stacked_decode-bfloat16-h128": stacked_decode,
    "stacked_decode-bfloat16-h128-positions": partial(stacked_decode, positions=True),
    "stacked_decode-bfloat16-h128-mass": partial(stacked_decode, mass=True),
    "stacked_decode-uint8-h128": partial(stacked_decode, dtype=jnp.uint8, positions=True),
    "stacked_decode-float32-h128": partial(stacked_decode, dtype=jnp.float32),
    "stacked_decode-bfloat16-h64": partial(stacked_decode, width=64, packed=True),
    "stacked_decode-bfloat16-h256": partial(stacked_decode, width=256),
    **{
        f"stacked_decode-bfloat16-h{width}-lanes": partial(stacked_decode, width=width)
        for width in (64, 80, 96, 192)
    },
    "stacked_decode-step": step,
    "stacked_decode-generation": partial(step, tokens=16),
}
