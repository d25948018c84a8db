"""Prefill and decode speed of kvjax, beside transformers + kvpress where they are installed.

One random Llama, one prompt, the process pinned to as many cores as it may have threads; rounds alternate
between the libraries, so that whatever else the machine does falls on both. Reports medians of wall seconds,
compile seconds apart, and the floor: (weights + cache) / measured read bandwidth.

    python scripts/bench.py --tokens 4096 16384 --json bench.json

On a GPU or TPU, ten minutes for the tables of docs/benchmarks.md that need one:

    python scripts/bench.py --accelerator --write
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

METHODS = {
    "none": ("full", {}, None),
    "knorm": ("l2compress", {"skip_layers": 0}, "KnormPress"),
    "snapkv": ("snapkv", {"variant": "kvpress"}, "SnapKVPress"),
    "adakv": ("adakv", {"variant": "kvpress"}, "AdaKVPress"),
    "h2o": ("h2o", {}, "ObservedAttentionPress"),
    "kivi": ("kivi", {}, None),
    "quest": ("quest", {}, None),
}
LLAMA = dict(layers=8, d_model=512, heads=8, kv_heads=4, d_ff=1408, vocab=8192)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096],
        metavar="N",
        help="tokens of the prompts (default: 4096)",
    )
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD",
        help=f"of {', '.join(METHODS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--ratio", type=float, default=0.5, help="share of the slots kept (default: 0.5)")
    parser.add_argument("--decode", type=int, default=24, help="tokens decoded per round (default: 24)")
    parser.add_argument("--rounds", type=int, default=3, help="whose medians are told (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="cores of the process (default: 1)")
    parser.add_argument(
        "--json", metavar="FILE", help="where to write the figures; with --accelerator, the rows"
    )
    parser.add_argument("--accelerator", action="store_true", help="the tables that need a GPU or TPU, alone")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="with --accelerator: time for all of it (default: 10)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="with --accelerator: tiny shapes, on any machine"
    )
    parser.add_argument(
        "--write", action="store_true",
        help="with --accelerator: into docs/benchmarks.md, the rows into docs/accelerator.jsonl",
    )  # fmt: skip
    parser.add_argument(
        "--again", action="store_true", help="with --accelerator: measure rows of this device anew"
    )
    args = parser.parse_args()
    for name in ("smoke", "write", "again"):
        if getattr(args, name) and not args.accelerator:
            parser.error(f"--{name} was given without --accelerator: add that, or leave it out")
    return args


def pin(threads: int) -> None:
    """Keeps this process on `threads` cores: both libraries start threads beyond what they were asked for."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    if threads == 1:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """(result, wall seconds)."""
    start = time.perf_counter()
    out = f()
    return out, time.perf_counter() - start


class Ours:
    """kvjax on the random Llama: prefill(method) and decode(cache)."""

    def __init__(self, ratio: float, decode: int):
        import jax

        from kvjax.models.config import Config
        from kvjax.models.model import Model
        from kvjax.models.params import init

        config = Config(head_dim=LLAMA["d_model"] // LLAMA["heads"], max_positions=65536, **LLAMA)
        self.model = Model(config, init(config, jax.random.key(0)), name="random-llama")
        self.ratio, self.decode_tokens = ratio, decode

    def method(self, name: str) -> Any:
        import kvjax
        from kvjax.methods import takes_budget

        id, hyper, _ = METHODS[name]
        return kvjax.method(id, **hyper, **({"budget": self.ratio} if takes_budget(id) else {}))

    def prefill(self, name: str, tokens: Any) -> Any:
        import jax

        import kvjax

        logits, cache = kvjax.prefill(
            self.model, tokens, method=self.method(name), room=self.decode_tokens * 8
        )
        jax.block_until_ready((logits, cache))
        return cache

    def decode(self, name: str, cache: Any, start: int) -> Any:
        """Greedy decoding as a host loop over the jitted step; returns the cache that holds the tokens."""
        import jax.numpy as jnp

        from kvjax import steps
        from kvjax.api.prefill import bare_cache

        run = steps.Run(self.model.config, self.method(name).decode_part())
        token, append, state = jnp.asarray([3], jnp.int32), jnp.ones((1,), bool), bare_cache(cache)
        for _ in range(self.decode_tokens):
            logits, state = steps.step(run, self.model.params, state, token, append)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
        token.block_until_ready()
        return state

    def bytes(self, cache: Any, name: str) -> int:
        import kvjax

        return kvjax.nbytes(cache)

    def weight_bytes(self) -> int:
        import kvjax

        return kvjax.nbytes(self.model.params) - self.model.params["embed"].nbytes


class Theirs:
    """transformers + kvpress on a Llama of the same shape."""

    def __init__(
        self, ratio: float, decode: int, threads: int,
        shape: dict[str, int] = LLAMA, device: str = "cpu", dtype: str = "float32", positions: int = 65536,
    ):  # fmt: skip
        import torch
        import transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=shape["vocab"],
            hidden_size=shape["d_model"],
            intermediate_size=shape["d_ff"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            max_position_embeddings=positions,
        )
        config._attn_implementation = "sdpa"
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        with torch.device(device):
            self.model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(before)
        self.ratio, self.decode_tokens = ratio, decode

    def press(self, name: str) -> Any:
        import kvpress

        press = METHODS[name][2]
        if press is None:
            return None
        removed = 1 - self.ratio
        if press == "AdaKVPress":
            return kvpress.AdaKVPress(kvpress.SnapKVPress(removed))
        return getattr(kvpress, press)(removed)

    def prefill(self, name: str, tokens: Any) -> Any:
        import contextlib

        import torch
        from transformers import DynamicCache

        # Observed attention needs the attention map, which only the eager path has.
        self.model.set_attn_implementation("eager" if name == "h2o" else "sdpa")
        for layer in self.model.model.layers:
            layer.self_attn.masked_key_indices = None
        cache, press = DynamicCache(), self.press(name)
        with torch.no_grad(), contextlib.nullcontext() if press is None else press(self.model):
            ids = torch.tensor(tokens, device=self.model.device)
            self.model.model(input_ids=ids, past_key_values=cache)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return cache

    def decode(self, name: str, cache: Any, start: int) -> Any:
        import torch

        device = self.model.device
        token = torch.full((cache.layers[0].keys.shape[0], 1), 3, device=device)
        with torch.no_grad():
            for i in range(self.decode_tokens):
                position = torch.full_like(token, start + i)
                out = self.model(input_ids=token, past_key_values=cache, position_ids=position)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return cache

    def bytes(self, cache: Any, name: str) -> int:
        return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))


def read_bandwidth() -> float:
    """Bytes per second of one thread reading 256 MB, the best of five."""
    import numpy as np

    x = np.ones(2**25, np.float64)
    return max(x.nbytes / timed(x.sum)[1] for _ in range(5))


def theirs_can(name: str, tokens: int) -> bool:
    """Whether kvpress has the method, and room for the attention maps that observing them takes."""
    import psutil

    if METHODS[name][2] is None:
        return name == "none"
    maps = 4 * LLAMA["heads"] * tokens**2 * 4  # logits, mask, probabilities and a copy, in float32
    return name != "h2o" or maps < psutil.virtual_memory().available


def measure(side: Any, name: str, tokens: Any, rounds: list[dict[str, Any]]) -> None:
    """One round: a prefill and a decode, each after a first call that compiles."""
    start = tokens.shape[1]
    found: dict[str, Any] = {}
    if not rounds:
        cache, found["first_prefill_s"] = timed(lambda: side.prefill(name, tokens))
        cache, found["first_decode_s"] = timed(lambda: side.decode(name, cache, start))
    cache, found["prefill_s"] = timed(lambda: side.prefill(name, tokens))
    found["bytes"] = side.bytes(cache, name)
    _, found["decode_s"] = timed(lambda: side.decode(name, cache, start))
    rounds.append(found)


def row(side: Any, name: str, tokens: int, rounds: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Medians of the rounds as one row of the table."""

    def median(key: str) -> float:
        return statistics.median(r[key] for r in rounds)

    decode = median("decode_s") / side.decode_tokens
    prefill = median("prefill_s")
    out = {
        "library": "kvjax" if isinstance(side, Ours) else "kvpress",
        "method": name,
        "tokens": tokens,
        "prefill_s": round(prefill, 3),
        "decode_tokens_per_s": round(1 / decode, 1),
        "cache_mib": round(rounds[0]["bytes"] / 2**20, 1),
        "compile_s": round(rounds[0]["first_prefill_s"] - rounds[0]["prefill_s"], 1),
    }
    if isinstance(side, Ours):
        floor = (side.weight_bytes() + rounds[0]["bytes"]) / bandwidth
        out["floor_tokens_per_s"] = round(1 / floor, 1)
    return out


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table, as wide as it is where it goes into a file."""
    from rich.table import Table

    from kvjax.eval.report.console import make_console

    columns = list(dict.fromkeys(k for r in rows for k in r))
    table = Table(*columns)
    for r in rows:
        table.add_row(*(str(r.get(c, "")) for c in columns))
    make_console().print(table)


def main() -> None:
    args = arguments()
    if args.accelerator:
        import bench_accelerator

        bench_accelerator.main(args)
        return
    pin(args.threads)
    import numpy as np

    from kvjax.eval.report.console import make_console

    sides: list[Any] = [Ours(args.ratio, args.decode)]
    try:
        sides.append(Theirs(args.ratio, args.decode, args.threads))
    except ImportError as error:
        print(f"without transformers + kvpress ({error}): install '.[parity]' to compare")
    bandwidth, rows = read_bandwidth(), []
    console = make_console()
    for tokens in args.tokens:
        prompt = np.random.default_rng(0).integers(1, LLAMA["vocab"], (1, tokens))
        rounds: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for _ in range(args.rounds):
            for name in args.methods:
                for i, side in enumerate(sides):
                    if i == 1 and not theirs_can(name, tokens):
                        continue
                    with console.status(f"{tokens} tokens, {name}, {type(side).__name__}"):
                        measure(side, name, prompt, rounds.setdefault((i, name), []))
        rows += [row(sides[i], name, tokens, r, bandwidth) for (i, name), r in rounds.items()]
    print_rows(rows)
    console.print(
        f"{platform.processor() or platform.machine()}, {args.threads} thread(s), "
        f"read bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"arguments": vars(args), "bandwidth": bandwidth, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
