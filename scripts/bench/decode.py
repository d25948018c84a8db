"""Decoding with Llama-8B's shape and random weights: parts of `bench.py --accelerator`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from scripts.bench.libraries import METHODS, Theirs, greedy, method_of
from scripts.bench.rows import Deadline, Rows, child_arguments
from scripts.bench.timing import device_work, median_seconds

LLAMA_8B = dict(layers=32, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab=128256)
TINY = dict(layers=3, d_model=128, heads=4, kv_heads=2, d_ff=64, vocab=128)
NAMES = ("none", "snapkv", "adakv", "kivi", "quest")
# The most informative cases run first: if time runs out, the last ones are missing.
CELLS = ((32768, 1), (8192, 8), (131072, 1), (32768, 8), (8192, 1), (131072, 8))
ROUNDS, PER_ROUND, ROOM = 3, 16, 64


class Ours:
    """kvjax: the loop in which `kvjax.generate` writes tokens, over a made-up cache."""

    side = "kvjax"

    def __init__(self, shape: dict[str, int], ratio: float, decode: int):
        import jax
        import jax.numpy as jnp

        from kvjax.models.config import Config
        from kvjax.models.params import init, plan
        from scripts.bench import made_up_cache

        self.config = Config(head_dim=shape["d_model"] // shape["heads"], max_positions=2**18, **shape)
        groups = plan(self.config)
        like = jax.eval_shape(lambda key: init(self.config, key, jnp.bfloat16, groups), jax.random.key(0))
        self.params, self.ratio, self.decode_tokens = made_up_cache.weights(like), ratio, decode

    def run(self, name: str) -> Any:
        from kvjax import steps

        return steps.Run(self.config, method_of(name, self.ratio))

    def measure(self, name: str, tokens: int, batch: int) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp
        import numpy as np

        from kvjax import steps
        from kvjax.api.decode_loop import write_slice
        from kvjax.api.step import OneStep
        from kvjax.state.cache import nbytes
        from scripts.bench import made_up_cache

        run = self.run(name)
        like = made_up_cache.shapes(run, self.params, batch, tokens, ROOM)
        size, held = nbytes(like), nbytes(self.params)
        if (why := no_room(held + size, memory())) is not None:
            return {"skipped": why}
        groups = run.groups(self.params)
        one = OneStep(steps.Run(self.config, run.method.decode_part()))
        draws, none = greedy(batch), jnp.zeros((batch,), bool)
        logits = jnp.zeros((batch, self.config.vocab), jnp.float32)
        many = np.int32(self.decode_tokens)
        start = time.perf_counter()
        compiled = write_slice.lower(one, self.params, like, logits, none, draws, np.int32(0), many).compile()
        seconds = time.perf_counter() - start
        used = compiled.memory_analysis()
        scratch = used.temp_size_in_bytes if used is not None else 0
        if (why := no_room(held + size + scratch, memory())) is not None:
            return {"skipped": f"{why}, with what the step takes beside"}
        state = [logits, made_up_cache.made_up(like, groups, tokens, ROOM)]

        def some() -> None:
            out = compiled(self.params, state[1], state[0], none, draws, np.int32(0), many)
            state[:] = jax.block_until_ready((out.logits, out.cache))
            if int(out.count) != self.decode_tokens:
                raise RuntimeError(f"{int(out.count)} of {many} tokens were written: a logit was NaN")

        some()
        took = median_seconds(some, ROUNDS) / self.decode_tokens
        work = device_work(some, self.decode_tokens)
        embed = self.params["embed"].nbytes
        found = {
            "ms": took * 1e3,
            "tokens_per_s": batch / took,
            "bytes": size,
            "compile_s": round(seconds, 1),
        }
        return found | work | {"read_bytes": held - embed + size, "scratch_bytes": scratch}


class Kvpress:
    """transformers and kvpress: their loop over a cache of the length that a press leaves."""

    side = "kvpress"

    def __init__(self, shape: dict[str, int], ratio: float, decode: int):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.theirs = Theirs(ratio, decode, torch.get_num_threads(), shape, device, "bfloat16", 2**18)
        self.shape = shape

    def cache(self, name: str, tokens: int, batch: int) -> Any:
        """Ada-KV of kvpress keeps all keys and masks those of lowest score; other presses remove them."""
        import torch
        from transformers import DynamicCache

        model = self.theirs.model
        heads, width = self.shape["kv_heads"], self.shape["d_model"] // self.shape["heads"]
        kept = int(tokens * self.theirs.ratio)
        slots = kept if name == "snapkv" else tokens
        cache = DynamicCache()
        for i, layer in enumerate(model.model.layers):
            k, v = (
                torch.randn(batch, heads, slots, width, device=model.device, dtype=model.dtype) for _ in "kv"
            )
            cache.update(k, v, i)
            layer.self_attn.masked_key_indices = None
            if name == "adakv":
                pruned = heads * (tokens - kept)
                order = (
                    torch.rand(batch, heads * tokens, device=model.device).topk(pruned, 1).indices.flatten()
                )
                rows = torch.arange(batch, device=model.device).repeat_interleave(pruned)
                layer.self_attn.masked_key_indices = (rows, order // tokens, order % tokens)
        return cache

    def measure(self, name: str, tokens: int, batch: int) -> dict[str, Any]:
        import torch

        cuda = self.theirs.model.device.type == "cuda"
        heads, width = self.shape["kv_heads"], self.shape["d_model"] // self.shape["heads"]
        size = 4 * self.shape["layers"] * batch * heads * tokens * width
        held = sum(x.nbytes for x in self.theirs.model.parameters())
        limit = torch.cuda.get_device_properties(0).total_memory if cuda else memory()
        if name != "snapkv" and (why := no_room(held + size, limit)) is not None:
            return {"skipped": why}
        try:
            cache, at = self.cache(name, tokens, batch), tokens
            self.theirs.decode(name, cache, at)

            def some() -> None:
                nonlocal at
                at += self.theirs.decode_tokens
                self.theirs.decode(name, cache, at)

            took = median_seconds(some, ROUNDS) / self.theirs.decode_tokens
            size = self.theirs.bytes(cache, name)
        except torch.OutOfMemoryError:
            return {"skipped": "out of memory"}
        finally:
            cache = None
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        return {"ms": took * 1e3, "tokens_per_s": batch / took, "bytes": size}


def memory() -> int:
    """Bytes that jax may use on its first device."""
    import jax

    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    import psutil

    return psutil.virtual_memory().available


def no_room(need: int, limit: int) -> str | None:
    """Why something of `need` bytes does not fit; a tenth of the memory is left to the allocator."""
    if need < 0.9 * limit:
        return None
    return f"{need / 2**30:.1f} GiB do not fit into {limit / 2**30:.1f}"


def device_name(side: str) -> str:
    """Spell the device's name as jax does, so that rows of both libraries have the same name."""
    if side == "kvjax":
        import jax

        return jax.devices()[0].device_kind
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def main() -> None:
    args = child_arguments()
    rows, until = Rows(args.rows), Deadline(args.until, 30.0)
    if args.part == "kvpress" and not args.smoke and device_name("kvpress") == "cpu":
        print("  torch sees no GPU: install its build for CUDA to compare with kvpress")
        return
    shape, cells = (TINY, ((256, 2),)) if args.smoke else (LLAMA_8B, CELLS)
    key = dict(part="decode", side=args.part, device=device_name(args.part), smoke=args.smoke)
    kind: Callable[..., Any] = {"kvjax": Ours, "kvpress": Kvpress}[args.part]
    names = [n for n in NAMES if args.part == "kvjax" or METHODS[n][2] is not None or n == "none"]
    wanted = [dict(tokens=t, batch=b, name=n) for t, b in cells for n in names]
    wanted = [cell for cell in wanted if not rows.has(**key, **cell)]
    side = kind(shape, args.ratio, 4 if args.smoke else PER_ROUND) if wanted else None
    for cell in wanted:
        what = f"{args.part} {cell['name']} {cell['tokens']} x {cell['batch']}"
        until.run(what, lambda cell=cell: rows.add(**key, **cell, ratio=args.ratio, **side.measure(**cell)))
        gc.collect()
    until.report()


if __name__ == "__main__":
    main()
