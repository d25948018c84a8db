"""`kvjax serve load`: figures of a server over HTTP; `kvjax serve compare`: those of several systems here."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kvjax.commands.options import add_dtype, add_model, whole
from kvjax.commands.programs import keep_programs
from kvjax.commands.serve_requests import add_load, api_key, asked_of, prompts_of, served

FIGURES = {
    "completed": "{}", "failed": "{}", "duration": "{:.2f} s", "request_throughput": "{:.2f} requests/s",
    "output_throughput": "{:.1f} tokens/s", "request_goodput": "{:.2f} requests/s",
    "mean_ttft_ms": "{:.1f} ms", "p50_ttft_ms": "{:.1f} ms", "p99_ttft_ms": "{:.1f} ms",
    "mean_tpot_ms": "{:.1f} ms", "p50_tpot_ms": "{:.1f} ms", "p99_tpot_ms": "{:.1f} ms",
    "mean_itl_ms": "{:.1f} ms", "p99_itl_ms": "{:.1f} ms", "mean_e2el_ms": "{:.1f} ms",
    "p99_e2el_ms": "{:.1f} ms",
}  # fmt: skip


def load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvjax serve load`."""
    add_load(parser)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    add("--api-key", metavar="KEY", help="sent as a bearer's (default: $KVJAX_API_KEY)")
    add("--concurrency", type=whole(1), metavar="N", help="requests under way at most (default: any number)")
    add(
        "--vocab", type=whole(2), metavar="N", help="ids of prompts are below (default: what the server says)"
    )


def run_over_http(args: argparse.Namespace) -> int:
    """Send the load to a server, and print what its client sees."""
    from kvjax.commands.simulate import slo_of
    from kvjax.commands.terminal import console, pairs
    from kvjax.serve.load.client import Server, put_load
    from kvjax.serve.load.texts import texts

    asked, slo, server = asked_of(args), slo_of(args.slo), Server(args.url, api_key(args))
    about = server.about()
    vocab = args.vocab or about.get("vocab_size") or 256
    prompts = texts(asked, vocab, about.get("max_model_len") or 1 << 40)
    found = put_load(server, about["id"], asked, prompts, args.concurrency, slo)
    figures = {"url": args.url, "model": about["id"], "load": args.trace or args.synthetic, **found}
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        rows = [("model", figures["model"]), ("load", figures["load"])]
        rows += [(name, form.format(found[name])) for name, form in FIGURES.items() if name in found]
        console().print(pairs(rows + [("error", text) for text in found["errors"]]), highlight=False)
    return int(bool(found["failed"]))


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvjax serve compare`."""
    add_model(parser)
    add_dtype(parser)
    parser.add_argument(
        "--system", action="append", metavar="SYSTEM", required=True, help="given again for each system"
    )
    parser.add_argument("--method", metavar="METHOD", help="of all requests (default: the full cache)")
    add_load(parser)
    parser.add_argument("--pages", type=whole(1), metavar="N", help="pages of each pool (default: for all)")


def run_compare(args: argparse.Namespace) -> None:
    """Serve the same requests under every system, after a run in which programs compile."""
    from kvjax.commands.simulate import show, slo_of
    from kvjax.io.load import load
    from kvjax.serve.load.metrics import metrics
    from kvjax.serve.systems import system

    systems, slo, asked = {text: system(text) for text in args.system}, slo_of(args.slo), asked_of(args)
    keep_programs()
    model = load(args.model, dtype=args.dtype)
    requests, rows = prompts_of(model, asked, [args.method or "full"]), []
    for text, one in systems.items():
        done, late = served(model, requests, one, text, pages=args.pages)
        if late:
            print(late, file=sys.stderr)
        about: dict[str, Any] = {"system": text, "method": args.method or "full", "simulated": False}
        about |= {"costs": done.outcome.costs, "load": args.trace or args.synthetic}
        rows.append(about | metrics(done.outcome, slo))
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, len(asked))
