"""Host overhead: milliseconds per token, and seconds until a new method's first token.

    python -m scripts.bench.host overhead
    python -m scripts.bench.host first --json first.json
    python -m scripts.bench.host memory

`overhead` takes toy models, so that most of a token is what the host does for it: the time of a token that
`generate` writes, alone and in slices, less the time that the device takes for one more token of a slice.
`first` is the time from calling `generate` to its first token, and what the processor worked for it, for one
method after the other in one process, so that all but the first find the programs that they share with those
before. `memory` is what the compiler plans for a prompt: read and compressed in one program, or in two.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import steps
from kvjax.api.decode_loop import SLICE, write_slice
from kvjax.api.prefill import bare_cache
from kvjax.api.step import stepping
from kvjax.compress.segments import AT_ONCE
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from scripts.bench.libraries import greedy
from scripts.bench.report import write_json

# By layout, and by the observations of the prompt: the second of each kind shares programs with the first.
METHODS = {
    "snapkv": ("snapkv", {"variant": "kvpress", "window": 16}),
    "criticalkv": ("criticalkv", {"window": 16}),
    "expected-attention": ("expected-attention", {}),
    "l2compress": ("l2compress", {}),
    "adakv": ("adakv", {"window": 16}),
    "adakv kvpress": ("adakv", {"variant": "kvpress", "window": 16}),
}


def toy(layers: int, width: int = 32, vocab: int = 256) -> Model:
    config = Config(
        vocab=vocab, d_model=width, layers=layers, heads=4, kv_heads=2, head_dim=width // 4, d_ff=2 * width,
        max_positions=4096,
    )  # fmt: skip
    return Model(config, init(config, jax.random.key(0)))


def overhead(layers: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per token in toy models of so many layers; the least over all rounds."""
    model, prompt, new = toy(layers), [[1, 2, 3]], 4 * SLICE
    # As many slots as the `generate` calls below use.
    logits, cache = kvjax.prefill(model, prompt, room=new + 1)
    one, params = stepping(model, cache.method, None)
    draws = greedy(1)
    times: dict[int, list[float]] = {1: [], SLICE: []}
    for _ in range(rounds + 1):
        for n, seconds in times.items():
            state = jax.block_until_ready(kvjax.fork(bare_cache(cache), 1))
            start = time.perf_counter()
            out = write_slice(one, params, state, logits, np.zeros(1, bool), draws, np.int32(0), np.int32(n))
            jax.block_until_ready(out)
            seconds.append(time.perf_counter() - start)
    single, many = (min(times[n]) for n in (1, SLICE))
    device = (many - single) / (SLICE - 1)

    def each(**options: Any) -> float:
        """Seconds per token of `generate`, without the prompt."""
        seconds = []
        for _ in range(rounds + 1):
            marks = []
            for most in (1, new + 1):
                start = time.perf_counter()
                kvjax.generate(
                    model, prompt, max_new_tokens=most, stop=[], **options
                ).tokens.block_until_ready()
                marks.append(time.perf_counter() - start)
            seconds.append(marks)
        least, whole = (min(x) for x in zip(*seconds, strict=True))
        return (whole - least) / new

    slices, singly = each(), each(on_token=lambda i, tokens: None)
    return {
        "layers": layers,
        "device_ms": round(device * 1e3, 4),
        "generate_ms": round(slices * 1e3, 4),
        "generate_overhead_ms": round((slices - device) * 1e3, 4),
        "on_token_overhead_ms": round((singly - device) * 1e3, 4),
    }


def first_token(model: Model, name: str, prompt: Any) -> dict[str, Any]:
    """Seconds until a method's first token, and which programs are compiled for it."""
    id, hyper = METHODS[name]
    method, heard = kvjax.method(id, budget=0.5, **hyper), []
    before, worked, start = decoders(), time.process_time(), time.perf_counter()
    kvjax.generate(
        model, prompt, method=method, max_new_tokens=2, stop=[],
        on_token=lambda i, tokens: heard.append(time.perf_counter() - start),
    )  # fmt: skip
    return {
        "method": name,
        "first_token_s": round(heard[0], 2),
        "processor_s": round(time.process_time() - worked, 2),
        "decoders": decoders() - before,
    }


def decoders() -> int:
    """How many programs that contain a decoder were compiled."""
    found = (steps.prefill, steps.read, write_slice)
    return sum(f._cache_size() for f in found)  # type: ignore[attr-defined]


def planned(model: Model, name: str, prompt: Any) -> dict[str, Any]:
    """MiB that a prompt's programs use (arguments, temporaries, results), and of its keys and values."""
    id, hyper = METHODS[name]
    run = kvjax.pure.static(model, kvjax.method(id, budget=0.5, **hyper)).reading
    tokens = jnp.asarray(prompt, jnp.int32)
    length = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    sizes: dict[str, Any] = dict(room=2, ahead=AT_ONCE)
    whole = steps.prefill.lower(
        run,
        model.params,
        tokens,
        length,
        None,
        tokens_bound=tokens.shape[1],
        compress=True,
        watched=True,
        **sizes,
    )
    needs = steps.needs_of(run, model.params)
    read = partial(steps.read.lower, steps.reading(run), model.params, tokens, length, None, needs)
    logits, held = jax.eval_shape(
        partial(steps.read, steps.reading(run), needs=needs), model.params, tokens, length, None
    )
    settle = steps.compress.lower(run, model.params, held, logits, None, tokens=tokens.shape[1], **sizes)
    new = [x for f in held.fresh if hasattr(f, "k") for x in (f.k, f.v) if x is not None]
    return {
        "method": name,
        "one_program_mib": taken(whole.compile()),
        "reading_mib": taken(read().compile()),
        "compressing_mib": taken(settle.compile()),
        "keys_and_values_mib": round(kvjax.nbytes(new) / 2**20, 2),
    }


def taken(compiled: Any) -> float:
    memory = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return round(whole / 2**20, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "first", "memory"))
    parser.add_argument("--layers", type=int, nargs="+", help="of the models (default: 4 8; 32 for first)")
    parser.add_argument(
        "--tokens", type=int, default=1024, help="of the prompts of first and memory (default: 1024)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of overhead, whose least is told (default: 9)")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD"
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the rows")
    args, rows = parser.parse_args(), []
    for layers in args.layers or ((32,) if args.what == "first" else (4, 8)):
        if args.what == "overhead":
            rows.append(overhead(layers, args.rounds))
            print(rows[-1], flush=True)
            continue
        model = toy(layers)
        prompt = np.random.default_rng(0).integers(1, model.config.vocab, (1, args.tokens))
        for name in args.methods:
            measure = first_token if args.what == "first" else planned
            rows.append({"layers": layers, **measure(model, name, prompt)})
            print(rows[-1], flush=True)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
