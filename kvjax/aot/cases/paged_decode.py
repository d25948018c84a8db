"""Paged decoding over full KV heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.page_pool import PagePool, page_rows
from kvjax.ops.decode.paged_decode import PIECES, tpu_paged_decode
from kvjax.pallas_kernels.block_sizes import tuned

BATCH, HEADS, GROUP = 4, 8, 8
SCALES = ("key_scale", "value_scale")
PAYLOADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "float32": ("float32", ()),
    "bfloat16": ("bfloat16", ()),
    "int8": ("int8", SCALES),
    "int4": ("int4", (*SCALES, "key_zero", "value_zero")),
    "int2": ("uint2", (*SCALES, "key_zero", "value_zero")),
    "kivi4": ("int4", ("channel_scale", "channel_zero", "value_scale", "value_zero")),
    "kivi2": ("uint2", ("channel_scale", "channel_zero", "value_scale", "value_zero")),
    "e5m2": ("float8_e5m2", SCALES),
    "e4m3": ("float8_e4m3fn", SCALES),
}


def paged_decode(
    device: Device,
    payload: str,
    *,
    width: int = 128,
    page: int = 128,
    slots: int = 32768,
    step: int | None = None,
    mass: bool = False,
    extra: tuple[str, ...] = (),
    groups: int = 1,
    packed: bool = False,
    rope: Rope | None = None,
) -> Case:
    """KV heads of `slots` tokens, all in use, B = 4, K = 8, G = 8; `step` tokens per step.

    width: of a head.
    """
    stored, names = PAYLOADS[payload]
    names = (*extra, *names)
    row = width * (2 if packed else 1)
    height = page_rows(stored, page, row, names, groups, packed)
    lists, pages = BATCH * HEADS, slots // page
    kind = jnp.float32 if payload == "float32" else jnp.bfloat16
    total = lists * pages
    if step is None:
        step = tuned("paged_decode", stored, width, device.generation)
        step = step or {"float32": 1024, "bfloat16": 2048, "int8": 4096}.get(payload, 4096)
        step = min(step, slots, PIECES * page) if names else min(step, slots)
    operands = (
        jax.ShapeDtypeStruct((BATCH, HEADS * GROUP, 1, width), kind),
        PagePool(
            jax.ShapeDtypeStruct((1, total, height, row), jnp.int32),  # type: ignore[arg-type]
            page,
            stored,
            names,
            groups,
            packed,
        ),
        jax.ShapeDtypeStruct((BATCH, HEADS, pages), jnp.int32),
        jax.ShapeDtypeStruct((BATCH, HEADS), jnp.int32),
        jax.ShapeDtypeStruct((BATCH, 1), jnp.int32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    run = partial(
        tpu_paged_decode, scale=width**-0.5, window=None, softcap=None, mass=mass, rope=rope,
        step=step // page, cores=device.cores,
    )  # fmt: skip
    cache = 4 * total * height * row
    moved = cache + lists * slots * 4 * mass + 4 * lists * pages
    small = 2 * int(np.prod(operands[0].shape)) * jnp.dtype(kind).itemsize
    return Case(
        run, operands, moved + small, 4 * lists * GROUP * slots * width, cache, "paged_decode",
        trips={"1": lists, "2": lists * slots // step}, profiles=False, relaid=lists * slots * 4 * mass,
    )  # fmt: skip


def _registry() -> dict[str, Callable[[Device], Case]]:
    cases: dict[str, Callable[[Device], Case]] = {}
    for payload in PAYLOADS:
        page = 128 if payload in ("float32", "bfloat16") else 256
        for width in (128, 256):
            name = f"paged_decode-{payload}-h{width}"
            cases[name] = partial(paged_decode, payload=payload, width=width, page=page)
    for page in (16, 32, 64, 256, 512):
        cases[f"paged_decode-bfloat16-h128-page{page}"] = partial(
            paged_decode, payload="bfloat16", page=page, slots=8192
        )
    small = partial(paged_decode, slots=8192, mass=True)
    cases["paged_decode-bfloat16-h128-positions-page16"] = partial(
        small, payload="bfloat16", page=16, extra=("pos", "bias")
    )
    cases["paged_decode-int8-h128-page32"] = partial(small, payload="int8", page=32)
    for payload in ("int8", "int4", "kivi2"):
        cases[f"paged_decode-{payload}-h128-page16"] = partial(
            paged_decode, payload=payload, page=16, slots=8192
        )
    cases["paged_decode-bfloat16-h128-rope-page16"] = partial(
        paged_decode, payload="bfloat16", page=16, slots=8192, extra=("pos",), rope=Rope()
    )
    cases["paged_decode-bfloat16-h128-mass"] = partial(paged_decode, payload="bfloat16", mass=True)
    cases["paged_decode-bfloat16-h128-positions"] = partial(
        paged_decode, payload="bfloat16", extra=("pos", "bias")
    )
    bfloat16 = partial(paged_decode, payload="bfloat16")
    cases["paged_decode-bfloat16-h64"] = partial(bfloat16, width=64, packed=True, step=4096)
    cases["paged_decode-bfloat16-h192"] = partial(bfloat16, width=192, packed=True, step=1024)
    cases["paged_decode-bfloat16-h128-rope"] = partial(bfloat16, extra=("pos",), rope=Rope())
    for payload in ("kivi4", "kivi2"):
        cases[f"paged_decode-{payload}-h128-groups"] = partial(
            paged_decode, payload=payload, page=256, groups=8
        )
    cases["paged_decode-kivi4-h128-rope"] = partial(
        paged_decode, payload="kivi4", page=256, groups=8, extra=("pos",), rope=Rope()
    )
    return cases


CASES = _registry()
