"""`kvjax serve`: requests answered by a model on this machine, of a trace or drawn (`run`)."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvjax.commands.options import add_dtype, add_model, whole

HELP = "serve requests on this machine under a serving system's policies, with methods that compress"
EXAMPLE = """examples:
  kvjax serve run --system vllm --synthetic tree:requests=20,prefix=48,suffix=16,output=12 --check
  kvjax serve run --system "sarathi(tokens=64)" --method "adakv(budget=0.5)" --method full \\
      --synthetic azure-conv:requests=20,rate=100 --scale 32

Every request gives the tokens of `kvjax generate` alone, whatever the system does: --check compares them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="run", required=True)
    kinds = {
        "run": ("requests of a trace, or drawn ones", _run_arguments, run_load),
    }
    for name, (about, arguments, function) in kinds.items():
        one = commands.add_parser(
            name, help=about, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        arguments(one)
        one.set_defaults(serve=function, parser=one)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add_dtype(parser)
    add("--system", default="vllm", metavar="SYSTEM", help="as vllm or sarathi(tokens=256) (default: vllm)")
    add(
        "--method", action="append", metavar="METHOD",
        help="of all requests; given again, requests take turns (default: the full cache)",
    )  # fmt: skip
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", metavar="FILE", help="Azure's .csv or Mooncake's .jsonl")
    load.add_argument("--synthetic", metavar="NAME:OPTION=N,...", help="as in `kvjax simulate`")
    add("--requests", type=whole(1), metavar="N", help="the first N of a trace (default: all)")
    add("--scale", type=whole(1), default=1, metavar="N", help="divide all lengths by N (default: 1)")
    add("--pages", type=whole(1), metavar="N", help="pages of the pool (default: for all that run at once)")
    add("--slo", metavar="ttft=S,tpot=S", help="seconds that a request may take to count as goodput")
    add("--check", action="store_true", help="compare every answer with `kvjax.generate` alone")
    add("--json", action="store_true", help="print every figure as JSON instead")


def run(args: argparse.Namespace) -> int | None:
    return args.serve(args)


def run_load(args: argparse.Namespace) -> int:
    from kvjax.commands.simulate import slo_of
    from kvjax.io.load import load
    from kvjax.serve import Prompt
    from kvjax.serve.device.run import run as serve
    from kvjax.serve.load.metrics import metrics
    from kvjax.serve.load.synth import synthetic
    from kvjax.serve.load.texts import scaled, texts
    from kvjax.serve.load.traces import read_trace
    from kvjax.serve.systems import system

    chosen, slo = system(args.system), slo_of(args.slo)
    asked = read_trace(args.trace, args.requests) if args.trace else synthetic(args.synthetic)
    asked = scaled(asked, args.scale)
    model = load(args.model, dtype=args.dtype)
    prompts, methods = texts(asked, model.config.vocab, model.config.max_positions), args.method or ["full"]
    requests = [
        Prompt(text, one.output, methods[i % len(methods)], stop=[], arrived=one.arrived)
        for i, (one, text) in enumerate(zip(asked, prompts, strict=True))
    ]
    done = serve(model, requests, chosen, pages=args.pages)
    load_name, by = args.trace or args.synthetic, done.outcome.costs
    figures: dict[str, Any] = {"system": args.system, "simulated": False, "costs": by, "load": load_name}
    figures |= {"pages": done.pages, "methods": methods, **metrics(done.outcome, slo)}
    figures["failed"] = sum(answer.state == "failed" for answer in done.answers)
    if args.check:
        figures |= _compared(model, requests, done.answers)
    _show(figures, args.json)
    return int(bool(figures["failed"] or figures.get("unequal")))


def _compared(model: Any, requests: list[Any], answers: list[Any]) -> dict[str, int]:
    """Of the requests that ended, how many have the tokens of `kvjax.generate` alone, and how many do not."""
    from kvjax.api.generate import generate

    ended = [pair for pair in zip(requests, answers, strict=True) if pair[1].state == "ended"]
    same = 0
    for one, answer in ended:
        alone = generate(
            model, [one.tokens], method=one.method, max_new_tokens=one.max_new_tokens, stop=one.stop
        )
        same += alone.tokens[0].tolist() == answer.tokens.tolist()
    return {"equal": same, "unequal": len(ended) - same}


def _show(figures: dict[str, Any], as_json: bool) -> None:
    from kvjax.commands.simulate import COLUMNS
    from kvjax.commands.terminal import console, pairs

    if as_json:
        print(json.dumps(figures, indent=1))
        return
    rows = [("system", figures["system"]), ("methods", ", ".join(figures["methods"]))]
    rows += [("completed", str(figures["completed"])), ("failed", str(figures["failed"]))]
    for name, (field, form) in COLUMNS.items():
        if field in figures:
            unit = " ms" if field.endswith("_ms") else ""
            rows.append((field if unit else name, form.format(figures[field]) + unit))
    rows.append(("iterations", str(figures["iterations"])))
    if "equal" in figures:
        whole = figures["equal"] + figures["unequal"]
        rows.append(("tokens of generate alone", f"{figures['equal']} of {whole}"))
    out = console()
    out.print(pairs(rows), highlight=False)
    out.print(f"{figures['costs']}; {figures['load']}.", highlight=False, style="dim")
