"""Training of a model of 150 million parameters in bfloat16: a part of `bench.py --accelerator`.

Reports the share of the device's peak rate that steps of `kvjax train` reach. The peak is measured by the
product of two square random matrices, not read from a data sheet. Counted are the operations of the forward
and backward pass; what is recomputed to save memory counts once.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.ops.attention.whole_rows import attend_whole_rows
from scripts.bench.rows import Deadline, Rows, child_arguments
from scripts.bench.timing import median_seconds
from scripts.bench.training import Ours

LENGTH, SIDE, ROUNDS = 2048, 8192, 5
LARGE = dict(layers=12, d_model=1024, heads=16, kv_heads=16, head_dim=64, d_ff=2816)
SMALL = dict(layers=2, d_model=32, heads=2, kv_heads=2, head_dim=16, d_ff=48)
# (rows of a step, whether layers are recomputed for the gradient)
STEPS = ((16, True), (8, False), (32, True))


def rate(side: int) -> float:
    """FLOPs per second of a product of two [side, side] matrices in bfloat16."""
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    times = 10

    @jax.jit
    def many(a: Any, b: Any) -> Any:
        # Scaled so that numbers stay finite through repeated products.
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ b) * jnp.bfloat16(side**-0.5), a)

    many(a, b).block_until_ready()
    return 2 * side**3 * times / median_seconds(lambda: many(a, b).block_until_ready(), ROUNDS)


def operations(params: Any, shape: dict[str, int], length: int) -> float:
    """FLOPs of a token: 6 per matrix weight, and the causal half of attention in every layer."""
    weights = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    weights -= params["embed"].size * ("unembed" in params)  # a lookup table is not a product
    return 6 * weights + 6 * shape["layers"] * length * shape["heads"] * shape["head_dim"]


def measure(rows: int, remat: bool, shape: dict[str, int], length: int) -> dict[str, Any]:
    settings = [f"model.{name}={value}" for name, value in shape.items()]
    ours = Ours("bytes", rows, length, *settings, "train.compute='bfloat16'", f"train.remat={remat}")
    flops = rows * length * operations(ours.params, shape, length)
    start = time.perf_counter()
    ours.step()
    begun = time.perf_counter() - start
    seconds = median_seconds(ours.step, ROUNDS)
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(ours.params)),
        "ms": seconds * 1e3,
        "tokens_per_s": rows * length / seconds,
        "flops_per_s": flops / seconds,
        "compile_s": round(begun - seconds, 1),
    }


def error(length: int) -> float:
    """Relative RMS error of training's attention and gradients on this device, against the reference."""
    shapes = [(2, 8, length, 64), (2, 4, length, 64), (2, 4, length, 64)]
    q, k, v = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes))
    found = []
    for implementation in (None, "reference"):

        def squares(q: Any, k: Any, v: Any, by: Any = implementation) -> Any:
            out = attend_whole_rows(q, k, v, scale=0.125, window=length // 2, implementation=by)
            return jnp.square(out.astype(jnp.float32)).sum(), out

        (_, out), slopes = jax.jit(jax.value_and_grad(squares, (0, 1, 2), has_aux=True))(q, k, v)
        found.append([x.astype(jnp.float32) for x in (out, *slopes)])
    pairs = zip(*found, strict=True)
    return max(float(jnp.sqrt(jnp.square(a - b).sum() / jnp.square(b).sum())) for a, b in pairs)


def main() -> None:
    args = child_arguments()
    rows, until = Rows(args.rows), Deadline(args.until, 30.0)
    key = dict(device=jax.devices()[0].device_kind, smoke=args.smoke, side="kvjax")
    shape, length = (SMALL, 64) if args.smoke else (LARGE, LENGTH)
    product = key | dict(part="product", name="bfloat16", tokens=128 if args.smoke else SIDE, batch=1)
    if not rows.has(**product):
        until.run("product", lambda: rows.add(**product, flops_per_s=rate(product["tokens"])))
    whole = key | dict(part="error", name="whole rows", tokens=length, batch=2)
    if not rows.has(**whole):
        until.run("error", lambda: rows.add(**whole, error=error(length)))
    for size in STEPS:
        batch, remat = size
        cell = key | dict(part="training", name="remat" if remat else "kept", tokens=length, batch=batch)
        if rows.has(**cell):
            continue
        until.run(
            f"training {cell['name']} {length} x {batch}",
            lambda cell=cell, size=size: rows.add(**cell, **measure(*size, shape, length)),
        )
        gc.collect()
    until.report()


if __name__ == "__main__":
    main()
