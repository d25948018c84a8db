"""Compiles every kernel with every payload at every head dimension, on little data.

A program calls the public function of an operation, forced to use the kernel, with one payload. Caches have
the width that callers must give them. The figures of such programs are meaningless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.cases.paged_decode import PAYLOADS
from kvjax.aot.hardware import Device
from kvjax.ops.attention.attention_stats import STATISTICS, attention_stats
from kvjax.ops.attention.block_sparse import Picks
from kvjax.ops.attention.flash_prefill import flash_prefill
from kvjax.ops.attention.sparse_prompt import sparse_prompt
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.rope import Rope
from kvjax.ops.decode.append import append
from kvjax.ops.decode.grouped_decode import Grouped, grouped_decode
from kvjax.ops.decode.mla_decode import mla_decode
from kvjax.ops.decode.page_pool import PER_CHANNEL, PagePool, page_rows
from kvjax.ops.decode.page_scores import page_scores
from kvjax.ops.decode.paged_append import paged_append
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.ops.decode.picked_decode import picked_decode
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.ops.decode.stacked_decode import stacked_decode
from kvjax.ops.recurrent.gated_delta import gated_delta, gated_delta_step
from kvjax.ops.recurrent.log_linear_decode import log_linear_decode
from kvjax.ops.recurrent.log_linear_levels import LevelState
from kvjax.ops.recurrent.recurrence import RecurrenceInputs

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HEADS, GROUP, SLOTS, LANES = 2, 4, 1024, 128
FLOATS = ("float32", "bfloat16")
Call = tuple[Callable[..., Any], tuple[Any, ...]]
INT32 = "int32"


def shape(*sizes: int, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def lanes(width: int) -> int:
    return -(-width // LANES) * LANES


def paged(payload: str, h: int, page: int | None = None) -> Iterator[Call]:
    stored, names = PAYLOADS[payload]
    page, width = page or (128 if payload in FLOATS else 256), lanes(h)
    pages = HEADS * SLOTS // page
    words = shape(1, pages, page_rows(stored, page, width, names), width, dtype=INT32)
    kind = "float32" if payload == "float32" else "bfloat16"
    operands = (
        shape(1, HEADS * GROUP, 1, h, dtype=kind), PagePool(words, page, stored, names),
        shape(1, HEADS, SLOTS // page, dtype=INT32), shape(1, HEADS, dtype=INT32), shape(1, 1, dtype=INT32),
    )  # fmt: skip
    for mass in (False, True):
        yield partial(paged_decode, scale=1.0, mass=mass, implementation="tpu"), operands


def small_pages(payload: str, h: int) -> Iterator[Call]:
    """Yield calls over pages whose rows do not fill tiles, with rotated keys and with keys to rotate."""
    for page in (16, 32, 64):
        for rope in (None, Rope()):
            run, operands = next(paged(payload, h, page))
            yield partial(run, rope=rope), operands


def paged_token(payload: str, h: int) -> Iterator[Call]:
    """Yield the call that appends a token to pages; those with scales of channels are encoded whole."""
    stored, names = PAYLOADS[payload]
    _, (_, pool, table, lengths, _) = next(paged(payload, h))
    new = shape(1, HEADS, h, dtype="uint8" if stored == "uint2" else stored)
    side = {n: shape(1, HEADS, dtype="float32") for n in names}

    def run(pool: PagePool, table: Any, lengths: Any, x: Any, side: Any) -> Any:
        return paged_append(pool, table, lengths, x, x, numbers=side, implementation="tpu").words

    yield run, (pool, table, lengths, new, side)


def stacked(payload: str, h: int) -> Iterator[Call]:
    q = shape(1, HEADS * GROUP, 1, h, dtype=payload)
    rows = shape(2, 1, HEADS, SLOTS, lanes(h), dtype=payload)
    places = (shape(1, HEADS, dtype=INT32), shape(1, 1, dtype=INT32))
    run = partial(stacked_decode, scale=1.0, implementation="tpu")
    yield run, (q, rows, rows, *places)
    if 2 * h == LANES:
        yield lambda q, k, *x: run(q, k, None, *x), (q, rows, *places)


def rotated(payload: str, h: int) -> Iterator[Call]:
    """Yield a call that rotates keys, in rows or with slots on lanes, and takes sizes of keys and values."""
    q = shape(1, HEADS * GROUP, 1, h, dtype=payload)
    rows = shape(2, 1, HEADS, SLOTS, h, dtype=payload)
    of_slots = [shape(1, HEADS, SLOTS, dtype=dtype) for dtype in (INT32, payload, payload)]

    def run(q: Any, k: Any, v: Any, lengths: Any, pos: Any, phase: Any, *sizes: Any) -> Any:
        return stacked_decode(
            q,
            k,
            v,
            lengths,
            pos,
            scale=1.0,
            rotation=KeyRotation(Rope(), phase),
            sizes=sizes,
            implementation="tpu",
        )

    yield run, (q, rows, rows, shape(1, HEADS, dtype=INT32), shape(1, 1, dtype=INT32), *of_slots)


def picked(payload: str, h: int) -> Iterator[Call]:
    """Yield calls that read pages of a dense cache; rows that are no multiple of 128 wide are refused."""
    if h % LANES:
        return
    rows, most = shape(2, 1, HEADS, SLOTS, h, dtype=payload), SLOTS // 64
    for page in (16, 64):
        operands = (
            shape(1, HEADS * GROUP, 1, h, dtype=payload), rows, rows, shape(1, HEADS, most, dtype=INT32),
            shape(1, HEADS, dtype=INT32), shape(1, HEADS, most * page, dtype=INT32),
            shape(1, 1, dtype=INT32),
        )  # fmt: skip
        yield partial(picked_decode, page=page, scale=1.0, implementation="tpu"), operands


def grouped(payload: str, h: int) -> Iterator[Call]:
    """Yield groups of 32 and 64 tokens; codes of rows that are no multiple of 128 wide are refused."""
    bits, heads = int(payload.removeprefix("uint")), (1, HEADS)
    for group in (32, 64) if h % LANES == 0 else ():
        words, scales = (shape(2, *heads, n, h, dtype="uint32") for n in (SLOTS * bits // 32, SLOTS // group))
        q = shape(1, HEADS * GROUP, 1, h, dtype="bfloat16")
        run = partial(grouped_decode, bits=bits, group=group, scale=1.0, implementation="tpu")
        yield run, (q, *[Grouped(words, scales)] * 2, shape(*heads, dtype=INT32))


def appended(payload: str, h: int) -> Iterator[Call]:
    """Yield calls that append to rows of a dense cache, or of pages; those of latents are 640 wide."""
    for width in (lanes(h), 640) if h == HEAD_DIMS[0] else (lanes(h),):
        rows = (shape(HEADS, 1, SLOTS, width, dtype=payload), shape(HEADS, 1, width, dtype=payload))
        at = shape(HEADS, dtype=INT32)
        yield lambda pool, new, *x: append([pool], [new], *x, implementation="tpu"), (*rows, at, at)


def latents(payload: str, heads: int) -> Iterator[Call]:
    operands = (
        shape(1, heads, 512, dtype=payload), shape(1, heads, 64, dtype=payload),
        shape(1, SLOTS // 128, 128, 640, dtype=payload), shape(1, SLOTS // 128, dtype=INT32),
        shape(1, dtype=INT32),
    )  # fmt: skip
    yield partial(mla_decode, scale=1.0, implementation="tpu"), operands


def prefill(payload: str, h: int) -> Iterator[Call]:
    q, k = (shape(1, n, SLOTS, h, dtype=payload) for n in (HEADS * GROUP, HEADS))
    pos = shape(1, SLOTS, dtype=INT32)

    def gradients(*x: Any) -> Any:
        def run(*y: Any) -> Any:
            return flash_prefill(*y, *x[3:], scale=1.0, implementation="tpu")

        (out, lse), back = jax.vjp(run, *x[:3])
        return back((out, lse))

    yield gradients, (q, k, k, pos, pos)


def sparse(payload: str, h: int) -> Iterator[Call]:
    """Yield calls with blocks of a part of a tile and of a whole one."""
    kv, pos = shape(1, HEADS, SLOTS, h, dtype=payload), shape(1, SLOTS, dtype=INT32)

    def run(q: Any, k: Any, v: Any, pos: Any, blocks: Any) -> Any:
        keys = Keys(k, v, pos[:, None])
        return sparse_prompt(q, keys, pos, Picks(blocks), scale=1.0, implementation="tpu")

    for block in (32, 128):
        blocks = shape(1, HEADS, SLOTS // 128, SLOTS // block, dtype="bool")
        yield run, (shape(1, HEADS * GROUP, SLOTS, h, dtype=payload), kv, kv, pos, blocks)


def stats(payload: str, h: int) -> Iterator[Call]:
    q, k = (shape(1, n, SLOTS, h, dtype=payload) for n in (HEADS * GROUP, HEADS))
    operands = (
        q, k, shape(1, HEADS * GROUP, SLOTS, dtype="float32"), shape(1, SLOTS, dtype=INT32),
        shape(1, 1, SLOTS, dtype=INT32),
    )  # fmt: skip
    how = dict(want=STATISTICS, last=32, threshold=0.01)
    yield partial(attention_stats, **how, scale=1.0, implementation="tpu"), operands  # pyright: ignore[reportArgumentType]


def scores(payload: str, h: int) -> Iterator[Call]:
    q = shape(1, HEADS * GROUP, 1, h, dtype=payload)
    pages = shape(1, 1, HEADS, SLOTS, lanes(h), dtype=payload)
    for names in (("low", "high"), ("centroid",)):
        summary, counts = dict.fromkeys(names, pages), shape(1, HEADS, dtype=INT32)
        yield partial(page_scores, implementation="tpu"), (q, summary, counts)


def tokens(payload: str, h: int, g: int, *lead: int) -> RecurrenceInputs:
    x = shape(*lead, HEADS, h, dtype=payload)
    return RecurrenceInputs(x, x, x, shape(*lead, HEADS, g, dtype="float32"), x)


def delta(payload: str, h: int) -> Iterator[Call]:
    """Yield calls with decays per head and per channel, with their gradients."""

    def gradients(given: RecurrenceInputs) -> Any:
        (out, state), back = jax.vjp(partial(gated_delta, implementation="tpu"), given)
        return back((out, state))

    for g in (1, h):
        yield gradients, (tokens(payload, h, g, 1, SLOTS),)


def delta_step(payload: str, h: int) -> Iterator[Call]:
    """Yield calls of one step; states that are not whole lanes wide would be copied, and are refused."""
    if h % LANES:
        return
    for g in (1, h):
        state = shape(8, HEADS, h, h, dtype="float32")
        yield partial(gated_delta_step, implementation="tpu"), (state, tokens(payload, h, g, 8))
        levels = LevelState(shape(8, 6, HEADS, h, h, dtype="float32"), shape(8, dtype=INT32))  # type: ignore[arg-type]
        scales = shape(8, HEADS, 6, dtype="float32")
        yield partial(log_linear_decode, implementation="tpu"), (levels, tokens(payload, h, g, 8), scales)


def program(
    device: Device,
    *,
    kernel: str,
    payload: str,
    calls: Callable[[str, int], Iterator[Call]],
    sizes: tuple[int, ...],
) -> Case:
    """Make the case that runs all calls of all sizes, one after the other."""
    made = [call for size in sizes for call in calls(payload, size)]

    def run(*operands: Any) -> Any:
        return [call(*given) for (call, _), given in zip(made, operands, strict=True)]

    held = tuple(given for _, given in made)
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(held))
    return Case(run, held, size, 0, size, kernel, trips={}, profiles=False)


class KernelCall(NamedTuple):
    """The name of a Pallas call, its payloads, the calls of one size, and the sizes of each program.

    A size is a head dimension, or a number of heads over latents.
    """

    name: str
    payloads: tuple[str, ...]
    calls: Callable[[str, int], Iterator[Call]]
    programs: tuple[tuple[int, ...], ...] = (HEAD_DIMS,)


# Kernels with gradients take so long to compile that every head dimension gets a program of its own.
ALONE = tuple((h,) for h in HEAD_DIMS)
BY_TOKEN = tuple(n for n, (_, names) in PAYLOADS.items() if not set(names) & set(PER_CHANNEL))
KERNELS = {
    "paged_decode": KernelCall("paged_decode", tuple(PAYLOADS), paged),
    "paged_decode-small": KernelCall("paged_decode", tuple(PAYLOADS), small_pages, ((128,),)),
    "stacked_decode": KernelCall("stacked_decode", FLOATS, stacked),
    "stacked_decode-turned": KernelCall("stacked_decode", FLOATS, rotated),
    "stacked_decode-picked": KernelCall("stacked_decode", FLOATS, picked),
    "grouped_decode": KernelCall("grouped_decode", ("uint2", "uint4"), grouped),
    "append": KernelCall("append", FLOATS, appended),
    "append-pages": KernelCall("paged_append", BY_TOKEN, paged_token),
    "mla_decode": KernelCall("mla_decode", FLOATS, latents, ((16, 128),)),
    "flash_prefill": KernelCall("flash_prefill", FLOATS, prefill, ALONE),
    "sparse_prompt": KernelCall("sparse_prompt", FLOATS, sparse),
    "attention_stats": KernelCall("attention_stats", FLOATS, stats),
    "page_scores": KernelCall("page_scores", FLOATS, scores),
    "gated_delta": KernelCall("gated_delta", FLOATS, delta, ALONE),
    "gated_delta-step": KernelCall("step", FLOATS, delta_step),
}


def _registry(long: bool) -> dict[str, Callable[[Device], Case]]:
    return {
        f"{operation}-{payload}{f'-h{sizes[0]}' if long else ''}-compiles": partial(
            program, kernel=kernel.name, payload=payload, calls=kernel.calls, sizes=sizes
        )
        for operation, kernel in KERNELS.items()
        if (kernel.programs == ALONE) == long
        for payload in kernel.payloads
        for sizes in kernel.programs
    }


SHORT, LONG = _registry(long=False), _registry(long=True)
CASES = SHORT | LONG
