"""Prompts of Llama-8B's shape, random weights: parts of `bench.py --accelerator`, in processes."""

from __future__ import annotations

import gc
import time
from typing import Any

from scripts.bench.decode import LLAMA_8B, TINY, Kvpress, Ours, device_name, memory, no_room
from scripts.bench.rows import Deadline, Rows, child_arguments
from scripts.bench.timing import median_seconds

CELLS = ((8192, "none"), (32768, "none"), (8192, "snapkv"), (32768, "snapkv"), (131072, "none"))
ROUNDS = 3


def operations(shape: dict[str, int], tokens: int) -> float:
    """FLOPs of a prompt: every matrix product, the causal half of attention, and the last token's logits."""
    head = shape["d_model"] // shape["heads"]
    each = shape["d_model"] * (2 * shape["d_model"] + 2 * shape["kv_heads"] * head + 3 * shape["d_ff"])
    attention = 2 * tokens * shape["d_model"]
    return 2 * shape["d_model"] * shape["vocab"] + tokens * shape["layers"] * (2 * each + attention)


def ours(side: Ours, name: str, tokens: Any) -> dict[str, Any]:
    """Wall seconds of `kvjax.prefill`."""
    import jax

    import kvjax
    from kvjax.models.model import Model

    length = tokens.shape[1]
    c = side.config
    cache = 4 * c.layers * c.kv_heads * c.head_dim * length
    if (why := no_room(kvjax.nbytes(side.params) + 3 * cache, memory())) is not None:
        return {"skipped": why}
    model, method = Model(c, side.params), side.run(name).method

    def call() -> None:
        jax.block_until_ready(kvjax.prefill(model, tokens, method=method, room=64))

    start = time.perf_counter()
    call()
    begun = time.perf_counter() - start
    took = median_seconds(call, ROUNDS)
    return {"ms": took * 1e3, "tokens_per_s": length / took, "compile_s": round(begun - took, 1)}


def theirs(side: Kvpress, name: str, tokens: Any) -> dict[str, Any]:
    import torch

    try:
        side.theirs.prefill(name, tokens)
        took = median_seconds(lambda: side.theirs.prefill(name, tokens), ROUNDS)
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return {"ms": took * 1e3, "tokens_per_s": tokens.shape[1] / took}


def main() -> None:
    import numpy as np

    args = child_arguments()
    rows, until = Rows(args.rows), Deadline(args.until, 20.0)
    if args.part == "kvpress" and not args.smoke and device_name("kvpress") == "cpu":
        print("  torch sees no GPU: install its build for CUDA to compare with kvpress")
        return
    shape, cells = (TINY, ((256, "none"), (256, "snapkv"))) if args.smoke else (LLAMA_8B, CELLS)
    key = dict(part="prefill", side=args.part, device=device_name(args.part), smoke=args.smoke, batch=1)
    wanted = [dict(tokens=t, name=n) for t, n in cells]
    wanted = [cell for cell in wanted if not rows.has(**key, **cell)]
    kind, call = {"kvjax": (Ours, ours), "kvpress": (Kvpress, theirs)}[args.part]
    side: Any = kind(shape, args.ratio, 4) if wanted else None
    for cell in wanted:
        prompt = np.random.default_rng(0).integers(1, shape["vocab"], (1, cell["tokens"]))
        flops = operations(shape, cell["tokens"])
        until.run(
            f"prefill {args.part} {cell['name']} {cell['tokens']}",
            lambda cell=cell, prompt=prompt, flops=flops: rows.add(
                **key, **cell, flops=flops, **call(side, cell["name"], prompt)
            ),
        )
    until.report()


if __name__ == "__main__":
    main()
