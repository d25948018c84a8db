"""What the commands of `kvjax serve` share: which requests are sent, and the clients' key."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kvjax.commands.options import whole


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
