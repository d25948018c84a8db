"""Decode attention and Quest's choice of pages beside a copy of as many bytes, for `bench.py --accelerator`.

One query of 32 heads over 8 KV heads of width 128, as in Llama-8B, pages of 128 tokens in any order. Calls
cycle through so many layers that the device's caches never hold a layer from its last visit, and all run
inside one program, so that host overhead is not counted. Both the bytes read and the bytes written by a copy
count.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.page_scores import best_pages, page_scores
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.ops.decode.paged_decode_gpu import gpu_paged_decode
from kvjax.ops.decode.stacked_decode import stacked_decode
from kvjax.state.cache import nbytes
from scripts.bench.rows import Deadline, Rows, child_arguments
from scripts.bench.timing import median_seconds

TOKENS = (8192, 16384, 32768, 65536, 131072, 262144)
PAYLOADS = {"bfloat16": (), "int8": ("key_scale", "value_scale"), "int4": ("key_scale", "value_scale")}
HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 128
QUEST_PAGE = 16
TUNED_AT = 32768
# (rows per step, warps, stages, programs); the first are the kernel's defaults.
SETTINGS = (
    (16, 4, 2, 512), (16, 4, 3, 512), (16, 4, 2, 1024), (32, 4, 2, 512), (32, 4, 3, 512), (32, 8, 2, 512),
    (16, 2, 2, 1024), (16, 1, 2, 2048),
)  # fmt: skip


class BenchSizes:
    """Shapes of a run; a smoke test uses small ones that only show that the code runs."""

    def __init__(self, smoke: bool):
        self.tokens = (128,) if smoke else TOKENS
        self.heads, self.kv_heads = (4, 2) if smoke else (HEADS, KV_HEADS)
        self.width, self.page = (32, 32) if smoke else (WIDTH, PAGE)
        self.resident = 2**16 if smoke else 2**29  # more bytes than any cache of a device holds
        self.tuned_at = 128 if smoke else TUNED_AT
        self.settings = SETTINGS[:1] if smoke else SETTINGS
        self.moved = 0 if smoke else 2**36  # bytes per timing


@functools.partial(jax.jit, static_argnames=("payload", "shape"))
def random_codes(key: Any, payload: str, shape: tuple[int, ...]) -> Any:
    if payload == "bfloat16":
        return jax.random.normal(key, shape, jnp.bfloat16)
    codes = jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
    return codes if payload == "int8" else (codes >> 4).astype(jnp.int4)


def operands(payload: str, tokens: int, sizes: BenchSizes) -> tuple[Any, ...]:
    """Return (q, pool, table, lengths, q_pos) with more layers than a device's caches hold."""
    key = jax.random.key(tokens)
    pages = sizes.kv_heads * tokens // sizes.page
    bits = {"bfloat16": 16, "int8": 8, "int4": 4}[payload]
    layers = max(1, sizes.resident // (pages * sizes.page * sizes.width * bits // 4))
    shape = (layers, pages, sizes.page, sizes.width)
    k, v = (random_codes(jax.random.fold_in(key, i), payload, shape) for i in (0, 1))
    scale = {name: jnp.full(shape[:3], 0.01) for name in PAYLOADS[payload]}
    pool = make_pool(k, v, **scale)
    table = jax.random.permutation(key, pages).astype(jnp.int32).reshape(1, sizes.kv_heads, -1)
    lengths = jnp.full((1, sizes.kv_heads), tokens, jnp.int32)
    q = jax.random.normal(key, (1, sizes.heads, 1, sizes.width), jnp.bfloat16)
    return q, pool, table, lengths, jnp.full((1, 1), tokens, jnp.int32)


def per_call(call: Any, first: Any, operands: Any, layers: int, moved: int, goal: int) -> tuple[float, float]:
    """(seconds of one call, seconds until the first was done); call(x, i, operands) gives the next x."""
    times = max(2, min(400, goal // max(1, moved)))

    @jax.jit
    def many(first: Any, operands: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda i, x: call(x, i % layers, operands), first)

    start = time.perf_counter()
    jax.block_until_ready(many(first, operands))
    begun = time.perf_counter() - start
    return median_seconds(lambda: jax.block_until_ready(many(first, operands)), 5) / times, begun


def copied(size: int, sizes: BenchSizes) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    layers = max(1, sizes.resident // size)
    source = jnp.zeros((layers, size // 4), jnp.int32)

    # XLA would optimise a plain copy away, so the numbers are changed as they are copied.
    def copy(x: Any, i: Any, source: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(source, i, keepdims=False) ^ i

    seconds, _ = per_call(copy, source[0], source, layers, size, sizes.moved // 2)
    return 2 * size / seconds


def kernel(smoke: bool) -> Any:
    """paged_decode as the device runs it, with settings of the GPU kernel to try, if there is one."""
    if not smoke and jax.default_backend() != "gpu":
        return lambda *x, setting=None: paged_decode(*x, scale=WIDTH**-0.5)[0]

    def run(*x: Any, setting: Any = None) -> Any:
        how = {}
        if setting is not None:
            how = dict(zip(("block", "warps", "stages", "programs"), setting, strict=True))
        options = dict(scale=WIDTH**-0.5, window=None, softcap=None, mass=False)
        return gpu_paged_decode(*x, **options, **how, interpret=smoke)[0]

    return run


def timed(call: Any, q: Any, operands: Any, layers: int, size: int, sizes: BenchSizes) -> dict[str, Any]:
    """Measure the row of one attention over the `size` bytes of a layer."""
    seconds, begun = per_call(call, q, operands, layers, size, sizes.moved)
    return {
        "bytes": size,
        "gb_per_s": size / seconds / 1e9,
        "us": seconds * 1e6,
        "compile_s": round(begun, 1),
    }


def measure(payload: str, tokens: int, sizes: BenchSizes, run: Any, setting: Any) -> dict[str, Any]:
    q, pool, table, lengths, q_pos = operands(payload, tokens, sizes)
    layers = pool.words.shape[0]
    size = nbytes(pool) // layers

    def call(q: Any, layer: Any, pool: Any) -> Any:
        out = run(q, pool, table, lengths, q_pos, layer, setting=setting)
        return ((q + out) * 0.5).astype(q.dtype)

    return timed(call, q, pool, layers, size, sizes)


def dense(tokens: int, sizes: BenchSizes) -> dict[str, Any]:
    """Make the decoder without compression: attention over the dense cache of all layers."""
    key = jax.random.key(tokens)
    size = 4 * sizes.kv_heads * tokens * sizes.width
    layers = max(1, sizes.resident // size)
    shape = (layers, 1, sizes.kv_heads, tokens, sizes.width)
    pos = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), shape[:4])
    lengths = jnp.full((1,), tokens, jnp.int32)
    q = jax.random.normal(key, (1, sizes.heads, 1, sizes.width), jnp.bfloat16)
    kv = [random_codes(jax.random.fold_in(key, i), "bfloat16", shape) for i in (0, 1)]
    asked = jnp.full((1, 1), tokens, jnp.int32)

    def call(q: Any, i: Any, kv: Any) -> Any:
        out, _, _ = stacked_decode(q, *kv, lengths, asked, i, pos=pos, scale=sizes.width**-0.5)
        return ((q + out) * 0.5).astype(q.dtype)

    return timed(call, q, kv, layers, size, sizes)


def choice(tokens: int, sizes: BenchSizes, implementation: str | None) -> dict[str, Any]:
    """Quest's choice of half of the pages of 16 tokens by their bounds."""
    key, pages = jax.random.key(tokens), tokens // QUEST_PAGE
    size = 4 * sizes.kv_heads * pages * sizes.width
    layers = max(1, sizes.resident // size)
    shape = (layers, 1, sizes.kv_heads, pages, sizes.width)
    low, high = (random_codes(jax.random.fold_in(key, i), "bfloat16", shape) for i in (0, 1))
    live, half = (jnp.full((1, sizes.kv_heads), n, jnp.int32) for n in (pages, pages // 2))
    q = jax.random.normal(key, (1, sizes.heads, 1, sizes.width), jnp.bfloat16)
    how: dict[str, Any] = dict(implementation=implementation)

    def call(q: Any, i: Any, bounds: Any) -> Any:
        scores = page_scores(q, dict(zip(("low", "high"), bounds, strict=True)), live, i, **how)
        chosen = best_pages(scores, half, most=pages // 2, **how)
        # The next call must wait for this one.
        return q + (chosen.sum() * 1e-9).astype(q.dtype)

    return timed(call, q, (low, high), layers, size, sizes)


def error(payload: str, sizes: BenchSizes, run: Any) -> float:
    """Relative RMS error of the kernel against the plain jnp form, on this device."""
    x = operands(payload, sizes.tokens[0], sizes)
    at = jnp.zeros((), jnp.int32)
    got = jax.jit(run)(*x, at).astype(jnp.float32)
    want, _, _ = jax.jit(functools.partial(paged_decode, scale=WIDTH**-0.5, implementation="reference"))(
        *x, at
    )
    want = want.astype(jnp.float32)
    return float(jnp.sqrt(jnp.square(got - want).sum() / jnp.square(want).sum()))


def best_setting(rows: Rows, key: dict[str, Any], name: str) -> Any:
    found = [
        r for r in rows.rows if r["part"] == "setting" and r["name"] == name and r["device"] == key["device"]
    ]
    return max(found, key=lambda r: r["gb_per_s"])["setting"] if found else None


def main() -> None:
    args = child_arguments()
    rows, until, sizes = Rows(args.rows), Deadline(args.until, 15.0), BenchSizes(args.smoke)
    run = kernel(args.smoke)
    key = dict(device=jax.devices()[0].device_kind, smoke=args.smoke, batch=1)
    tunes = args.smoke or jax.default_backend() == "gpu"

    def row(part: str, side: str, name: str, tokens: int, make: Any) -> None:
        mine = key | dict(part=part, side=side, name=name, tokens=tokens)
        if not rows.has(**mine):
            until.run(f"{part} {side} {name} {tokens}", lambda: rows.add(**mine, **make()))

    def shared(found: dict[str, Any]) -> dict[str, Any]:
        copy = copied(found["bytes"], sizes) / 1e9
        return found | {"copy_gb_per_s": copy, "share": found["gb_per_s"] / copy}

    for name in PAYLOADS:
        row("error", "kvjax", name, sizes.tokens[0], lambda n=name: {"error": error(n, sizes, run)})
        if tunes:
            for setting in sizes.settings:
                row(
                    "setting", str(setting), name, sizes.tuned_at,
                    lambda n=name, s=setting: {"setting": s} | measure(n, sizes.tuned_at, sizes, run, s),
                )  # fmt: skip
    # The longest contexts run first: if time runs out, only short ones are missing.
    for tokens in sorted(sizes.tokens, key=lambda t: (t != sizes.tuned_at, -t)):
        for name in PAYLOADS:
            setting = best_setting(rows, key, name) if tunes else None
            row(
                "attention", "kvjax", name, tokens,
                lambda n=name, t=tokens, s=setting: shared(measure(n, t, sizes, run, s)) | {"setting": s},
            )  # fmt: skip
        row("attention", "dense cache", "bfloat16", tokens, lambda t=tokens: shared(dense(t, sizes)))
        for side, how in (("kvjax", None), ("plain jnp", "reference")):
            row(
                "attention", side, "choice of pages", tokens,
                lambda t=tokens, how=how: shared(choice(t, sizes, how)),
            )  # fmt: skip
    until.report()


if __name__ == "__main__":
    main()
