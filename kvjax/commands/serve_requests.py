"""What the commands of `kvjax serve` share: which requests are sent, and the clients' key."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from kvjax.commands.options import whole

# Seconds between two looks at how far requests are, which take the time of all requests.
SHOWN = 0.2


def add_load(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which requests are sent, and how figures are printed."""
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", metavar="FILE", help="Azure's .csv or Mooncake's .jsonl")
    load.add_argument("--synthetic", metavar="NAME:OPTION=N,...", help="as in `kvjax simulate`")
    add = parser.add_argument
    add("--requests", type=whole(1), metavar="N", help="the first N of a trace (default: all)")
    add("--scale", type=whole(1), default=1, metavar="N", help="divide all lengths by N (default: 1)")
    add("--slo", metavar="ttft=S,tpot=S", help="seconds that a request may take to count as goodput")
    add("--json", action="store_true", help="print every figure as JSON instead")


def asked_of(args: argparse.Namespace) -> list[Any]:
    """Return the requests of the options of `add_load`."""
    from kvjax.serve.load.synth import synthetic
    from kvjax.serve.load.texts import scaled
    from kvjax.serve.load.traces import read_trace

    asked = read_trace(args.trace, args.requests) if args.trace else synthetic(args.synthetic)
    return scaled(asked, args.scale)


def prompts_of(model: Any, asked: list[Any], methods: list[str]) -> list[Any]:
    """Return a `Prompt` for each request, of its lengths; methods take turns."""
    from kvjax.serve import Prompt
    from kvjax.serve.load.texts import texts

    prompts = texts(asked, model.config.vocab, model.config.max_positions)
    return [
        Prompt(text, one.output, methods[i % len(methods)], stop=[], arrived=one.arrived)
        for i, (one, text) in enumerate(zip(asked, prompts, strict=True))
    ]


def api_key(args: argparse.Namespace) -> str | None:
    """Return the key of the option, else of the environment."""
    return args.api_key or os.environ.get("KVJAX_API_KEY") or None


def served(model: Any, requests: list[Any], chosen: Any, what: str, **options: Any) -> tuple[Any, str]:
    """Serve requests twice, so that the second run, which is returned, compiles next to nothing.

    A bar shows the tokens that are read and written. The text says what compiled in the second run after all,
    since other seconds make other schedules; empty if nothing did.
    """
    from kvjax.serve.device.compiling import compiled

    said = "programs compile when they first run, so this is served twice"
    _served(model, requests, chosen, f"{what}, to compile", said, options)
    before = compiled()
    done = _served(model, requests, chosen, what, "", options)
    late = f"{what}: programs compiled meanwhile, and their seconds are counted: serve again"
    return done, late if compiled() > before else ""


def _served(
    model: Any, requests: list[Any], chosen: Any, what: str, said: str, options: dict[str, Any]
) -> Any:
    """Serve requests under a bar."""
    from kvjax.commands.terminal import console
    from kvjax.eval.report.progress import Bars
    from kvjax.serve import run

    total, each, shown = sum(len(one.tokens) + one.max_new_tokens for one in requests), {}, 0.0
    with Bars(console=console(), transient=True) as bars:
        task = bars.add_task(what, total=total)
        if said:
            bars.say(f"{len(requests)} requests of {total} tokens; {said}")

        def watch(loop: Any) -> None:
            nonlocal shown
            if time.monotonic() - shown < SHOWN:
                return
            read = (min(one.matched + one.computed, one.request.prompt) for one in loop.entries)
            each[id(loop)] = sum(read) + sum(one.written for one in loop.entries)
            bars.update(task, completed=min(total, sum(each.values())))
            shown = time.monotonic()

        return run(model, requests, chosen, watch=watch, **options)
