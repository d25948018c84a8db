"""Absorbed decoding over pages of latents: DeepSeek-V3's heads, whole and split over devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.decode.mla_decode import latent_append, pages_per_step, tpu_mla_decode

RANK, ROPE, WIDTH = 512, 64, 640


def mla_decode(
    device: Device,
    heads: int,
    *,
    dtype: Any = jnp.bfloat16,
    page: int = 128,
    batch: int = 8,
    slots: int = 32768,
    step: int | None = None,
) -> Case:
    """Full pages of `slots` latents of 512 + 64 channels."""
    total = batch * slots // page
    shape = jax.ShapeDtypeStruct
    operands = (
        shape((batch, heads, RANK), dtype),
        shape((batch, heads, ROPE), dtype),
        shape((1, total, page, WIDTH), dtype),
        shape((batch, slots // page), jnp.int32),
        shape((batch,), jnp.int32),
        shape((), jnp.int32),
    )
    item = jnp.dtype(dtype).itemsize
    cache = batch * slots * WIDTH * item
    taken = step // page if step else pages_per_step(operands[2], generation=device.generation)
    run = partial(tpu_mla_decode, scale=192**-0.5, cores=device.cores, step=taken)
    return Case(
        run, operands, cache + 4 * total + batch * heads * (2 * RANK + ROPE) * item,
        2 * batch * heads * slots * (2 * RANK + ROPE), cache, "mla_decode",
        trips={"1": batch, "2": total // taken}, profiles=False,
    )  # fmt: skip


def step(device: Device, *, heads: int = 128, batch: int = 8, layers: int = 61, slots: int = 16384) -> Case:
    """Append and decode in DeepSeek-V3's 61 layers in one scan; the pages are donated."""
    page, shape, kind = 128, jax.ShapeDtypeStruct, jnp.bfloat16
    most = slots // page
    operands = (
        shape((batch, heads, RANK), kind),
        shape((layers, most * batch // 2 + 1, page, WIDTH), kind),
        shape((batch, most), jnp.int32),
        shape((batch,), jnp.int32),
    )

    def run(q: Any, pages: Any, table: Any, lengths: Any) -> Any:
        def layer(carry: Any, at: Any) -> Any:
            q, pages = carry
            pages = latent_append(pages, table, lengths, q[:, 0], q[:, 0, :ROPE], at, implementation="tpu")
            q, _ = tpu_mla_decode(
                q, q[..., :ROPE], pages, table, lengths + 1, at, scale=192**-0.5, cores=device.cores
            )
            return (q, pages), None

        return jax.lax.scan(layer, (q, pages), jnp.arange(layers, dtype=jnp.int32))[0]

    cache = 2 * operands[1].size
    moved = layers * batch * slots * WIDTH * 2
    steps = layers * batch * most // pages_per_step(operands[1], generation=device.generation)
    return Case(
        run, operands, moved, 2 * layers * batch * heads * slots * (2 * RANK + ROPE), cache, "mla_decode",
        trips={"1": layers * batch, "2": steps}, profiles=False, donated=(1,),
    )  # fmt: skip


CASES: dict[str, Callable[[Device], Case]] = {
    "mla_decode-bfloat16-n16": partial(mla_decode, heads=16),
    "mla_decode-bfloat16-n128": partial(mla_decode, heads=128),
    "mla_decode-bfloat16-n32": partial(mla_decode, heads=32),
    "mla_decode-bfloat16-n64": partial(mla_decode, heads=64),
    "mla_decode-bfloat16-n128-page64": partial(mla_decode, heads=128, page=64),
    "mla_decode-bfloat16-step": step,
    "mla_decode-float32-n16": partial(mla_decode, heads=16, dtype=jnp.float32),
}
