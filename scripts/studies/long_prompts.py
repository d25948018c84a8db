"""Memory that every method takes to read a long prompt, at two lengths, with the shipped model's shape.

    python -m scripts.studies.long_prompts plan                    # what the compiler plans, for every method
    python -m scripts.studies.long_prompts run --methods h2o kvzip # and what a process holds when it does it
    python -m scripts.studies.long_prompts                         # prints the table
    python -m scripts.studies.long_prompts --write                 # writes it into docs/benchmarks.md

`plan` compiles `kvjax.pure.prefill`, one program that reads a prompt and compresses it, and adds up its
arguments, temporaries and results. From 8192 to 32768 tokens, linear memory grows 4 times, and an attention
map 16 times. `run` reads the long prompt in a process of its own. Both add rows to docs/long-prompts.json,
and skip those that it has.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from functools import partial
from typing import Any

from scripts.docs_tables import DOCS
from scripts.studies.runner import Data, Page, apart, parser, progress

DATA = Data(DOCS / "long-prompts.json", depth=1)
SHORT, LONG, ROOM, BUDGET = 8192, 32768, 128, 0.25
# Heads of the shipped model have 32 channels, fewer than the default group of codes.
NARROWER = {"gear": {"group": 32}}


def main() -> None:
    asked = parser(__doc__, ("plan", "run", "one"))
    asked.add_argument("--methods", nargs="+", metavar="METHOD", help="(default: all)")
    args = asked.parse_args()
    if args.what == "one":
        print(json.dumps(held(args.methods[0])))
    elif args.what is not None:
        measure_all(args.what, args.methods)
    else:
        PAGE.show(args)


def measure_all(what: str, methods: list[str] | None) -> None:
    """Measure what the data lacks, one method at a time."""
    from kvjax.methods import METHODS, resolve

    try:
        names = [resolve(name) for name in methods or METHODS]
    except ValueError as error:
        sys.exit(str(error))
    found, key = DATA.read(), "planned" if what == "plan" else "held_bytes"
    for name in progress(name for name in names if not found.get(name, {}).get(key)):
        new = planned(name) if what == "plan" else _in_process(name)
        found = DATA.read()  # another process may have added a method meanwhile
        found.setdefault(name, {}).update(new)
        DATA.write(dict(sorted(found.items())))
        print(f"{name}: {new}", flush=True)


def long_model() -> Any:
    """Load the shipped model with positions for long prompts."""
    import kvjax

    model = kvjax.load("recall-tiny", dtype="float32")
    config = dataclasses.replace(model.config, max_positions=2 * LONG)
    return dataclasses.replace(model, config=config)


def chosen(name: str, model: Any) -> Any:
    """Build a method with its defaults and its shipped fit, or the arrays from which its fit starts."""
    import kvjax
    from kvjax.grammar.fitted import as_fitted, shipped_for
    from kvjax.methods import takes, takes_budget

    given: dict[str, Any] = NARROWER.get(name, {}) | ({"budget": BUDGET} if takes_budget(name) else {})
    fit = as_fitted(shipped_for(kvjax.load("recall-tiny").signature).get(name))
    if fit is not None and takes(name, "fitted"):
        # Shipped fits are for the same weights with fewer positions.
        given["fitted"] = dataclasses.replace(fit, model=model.signature)
    return begun(kvjax.method(name, **given), model)


def begun(method: Any, model: Any) -> Any:
    """Build a method without a shipped fit, with the arrays its fit starts from; they have the same sizes."""
    import numpy as np

    from kvjax.grammar.fitted import Fitted
    from kvjax.keep.prompts.memory_tokens import MemoryTokens
    from kvjax.make.hidden_cache import HiddenStateCache
    from kvjax.train.compressed import compressor

    word = method.make
    if isinstance(method.reread, MemoryTokens):
        return compressor(method.id, model, seed=0).method
    if isinstance(word, HiddenStateCache) and word.fitted is None:
        start = word.start(model.params, model.config, rank=8, seed=0)
        arrays = {name: np.asarray(x) for name, x in start.items()}
        fitted = Fitted(arrays, type(word).__name__, model.signature)
        return dataclasses.replace(method, make=dataclasses.replace(word, fitted=fitted))
    return method


def planned(name: str) -> dict[str, Any]:
    """Bytes that the compiler plans for a prompt, by length."""
    import jax
    import jax.numpy as jnp

    import kvjax

    model, bytes_of = long_model(), {}
    method = chosen(name, model)
    model = kvjax.prepare(model, method)
    static = kvjax.pure.static(model, method)
    for tokens in (SHORT, LONG):
        prompt = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        read = jax.jit(partial(kvjax.pure.prefill, static, room=ROOM))
        lowered = read.lower(model.params, prompt, fitted=kvjax.pure.fitted(static.method))
        memory = lowered.compile().memory_analysis()
        bytes_of[str(tokens)] = (
            memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        )
    return {"planned": bytes_of}


def held(name: str) -> dict[str, Any]:
    """Processor seconds to read a long prompt, and the peak memory of this process."""
    import jax
    import numpy as np

    import kvjax

    model = long_model()
    method = chosen(name, model)
    prompt = np.random.default_rng(0).integers(1, model.config.vocab, (1, LONG))
    start = time.process_time()
    jax.block_until_ready(kvjax.prefill(model, prompt, method=method, room=ROOM))
    seconds = time.process_time() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"held_bytes": most, "seconds": round(seconds, 1), "cores": len(os.sched_getaffinity(0))}


def _in_process(name: str) -> dict[str, Any]:
    """`held` in a process of its own, so that the memory is that of one method."""
    return apart("scripts.studies.long_prompts", "one", "--methods", name) or {"held_bytes": None}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: planned bytes at both lengths, their growth, and the measured peak."""
    head = ["method", f"planned at {SHORT}", f"at {LONG}", "grows", f"held at {LONG}", "s"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in found.items():
        plan, most = row["planned"], row.get("held_bytes")
        cells = [_mib(plan[str(SHORT)]), _mib(plan[str(LONG)]), f"{plan[str(LONG)] / plan[str(SHORT)]:.1f}x"]
        held_there = [_mib(most), f"{row['seconds']:.0f}"] if most else ["", ""]
        lines.append(f"| {' | '.join([name, *cells, *held_there])} |")
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


PAGE = Page("benchmarks.md", {"long prompts": lambda: table(DATA.read())})

if __name__ == "__main__":
    main()
