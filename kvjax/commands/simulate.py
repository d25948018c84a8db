"""`kvjax simulate`: how a serving system would handle a stream of requests, in simulated time."""

from __future__ import annotations

import argparse
import itertools
import json
from typing import TYPE_CHECKING, Any

from kvjax.commands.options import DTYPES, whole

if TYPE_CHECKING:
    from kvjax.serve.sim import Costs

HELP = "simulate serving systems on a stream of requests: throughput, latencies, goodput, waste"
EXAMPLE = """examples:
  kvjax simulate --system vllm --synthetic azure-conv:requests=500
  kvjax simulate --system vllm --system "sarathi(tokens=256)" --synthetic azure-conv --slo ttft=1,tpot=0.05
  kvjax simulate --system vllm --trace trace.csv --requests 2000 --compress 0.25 --memory 12
  kvjax simulate --system vllm --synthetic azure-conv --method full --method "kvzip(budget=0.25)"
  kvjax simulate --system sglang --synthetic tree:groups=64,rate=20 --costs costs.json

Nothing is measured: iterations cost what a costs file says, or a roofline of --model on --device."""
COLUMNS = {
    "req/s": ("request_throughput", "{:.2f}"),
    "TTFT p50": ("p50_ttft_ms", "{:.0f}"),
    "p99": ("p99_ttft_ms", "{:.0f}"),
    "TPOT p50": ("p50_tpot_ms", "{:.1f}"),
    "p99 ": ("p99_tpot_ms", "{:.1f}"),
    "goodput": ("request_goodput", "{:.2f}"),
    "waste": ("waste", "{:.1%}"),
    "preempted": ("preemptions", "{}"),
    "hits": ("hit_rate", "{:.1%}"),
    "refused": ("refused", "{}"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--system", action="append", metavar="SYSTEM", required=True,
        help="as vllm or sarathi(tokens=256), see `kvjax systems`; give it again for more",
    )  # fmt: skip
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", metavar="FILE", help="Azure's .csv or Mooncake's .jsonl")
    load.add_argument(
        "--synthetic", metavar="NAME:OPTION=N,...",
        help="azure-conv or azure-code (lengths and gaps like theirs: requests, rate, cv, seed), or tree "
        "(common prefixes: also groups, prefix, suffix, output); calls=N: calls of other programs",
    )  # fmt: skip
    add("--requests", type=whole(1), metavar="N", help="the first N of a trace (default: all)")
    add(
        "--costs", action="append", metavar="FILE",
        help="a JSON file of costs, in place of --model and --device; several of measured iterations are one",
    )  # fmt: skip
    add(
        "--model",
        default="llama-3.1-8b",
        metavar="NAME",
        help="of `kvjax plan --list` (default: %(default)s)",
    )
    add("--device", default="h100", metavar="NAME", help="one device, as h100 or v5p (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=DTYPES, help="of weights and cache (default: %(default)s)")
    add("--memory", type=float, metavar="GIB", help="for the cache (default: what the weights leave)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--method", action="append", metavar="METHOD",
        help="as int8 or snapkv(budget=0.25), on --model; give it again for more (default: the full cache)",
    )  # fmt: skip
    how.add_argument(
        "--compress", type=float, default=1.0, metavar="SHARE",
        help="the cache has this share of its bytes (default: 1)",
    )  # fmt: skip
    add("--slo", metavar="ttft=S,tpot=S", help="seconds that a request may take to count as goodput")
    add("--json", action="store_true", help="print every figure as JSON instead")
    add("--write-costs", metavar="FILE", help="write the costs that were used, for --costs")


def run(args: argparse.Namespace) -> None:
    from kvjax.base.atomic_files import check_file, write_named
    from kvjax.serve.load.metrics import metrics
    from kvjax.serve.load.synth import synthetic
    from kvjax.serve.load.traces import read_trace
    from kvjax.serve.sim import simulate
    from kvjax.serve.systems import system

    check_file(args.write_costs)
    systems, slo = {text: system(text) for text in args.system}, slo_of(args.slo)
    requests = read_trace(args.trace, args.requests) if args.trace else synthetic(args.synthetic)
    costs, methods = costs_of(args), methods_of(args)
    if args.write_costs:
        write_named(args.write_costs, (json.dumps(vars(costs), indent=1) + "\n").encode())
    load = args.trace or args.synthetic
    rows = []
    for (text, one), (method, how) in itertools.product(systems.items(), methods.items()):
        figures = metrics(simulate(one, requests, costs, compression=how), slo)
        about = {"system": text, "method": method, "simulated": True, "costs": costs.by, "load": load}
        rows.append(about | figures)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows, len(requests))


def show(rows: list[dict[str, Any]], count: int) -> None:
    """Print a line for every system, and the source of the timings."""
    from rich.table import Table

    from kvjax.commands.terminal import BOX, console

    several = any(row["method"] != "full" for row in rows)
    table = Table("system", *(["method"] if several else []), box=BOX)
    columns = {name: known for name, known in COLUMNS.items() if known[0] in rows[0]}
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        names = [row["system"], row["method"]][: 1 + several]
        table.add_row(*names, *(form.format(row[field]) for field, form in columns.values()))
    out = console()
    out.print(table)
    by, simulated = rows[0]["costs"], rows[0]["simulated"]
    out.print(f"Simulated, not measured. Costs: {by}." if simulated else f"Times are {by}.", highlight=False)
    out.print(f"{count} requests of {rows[0]['load']}; TTFT and TPOT in ms.", highlight=False, style="dim")
    if most := max(row["refused"] for row in rows):
        out.print(f"Up to {most} requests need more tokens than the pool has and were refused.")


def methods_of(args: argparse.Namespace) -> dict[str, Any]:
    """How methods change costs, by their texts."""
    from kvjax.serve.sim import Compression

    if not args.method:
        return {"full": Compression()}
    from kvjax.plan.serving import serving_compression

    return {one: Compression(**serving_compression(args.model, one, args.dtype)) for one in args.method}


def costs_of(args: argparse.Namespace) -> Costs:
    """Read the costs from a file, or of a model on a device, with options for memory and compression."""
    import dataclasses
    import math

    from kvjax.base.errors import InputError
    from kvjax.serve.sim import Costs, read_costs

    if args.costs:
        costs = read_costs(*args.costs)
    else:
        from kvjax.plan.serving import serving_costs

        costs = Costs(**serving_costs(args.model, args.device, args.dtype))
    if args.memory is not None:
        if not (math.isfinite(args.memory) and args.memory > 0):
            raise InputError(f"--memory is {args.memory}, expected GiB above 0")
        costs = dataclasses.replace(
            costs, memory=args.memory * 2**30, by=f"{costs.by}, {args.memory:g} GiB for the cache"
        )
    return costs.compressed(args.compress)


def slo_of(text: str | None) -> Any:
    """Return the objective of "ttft=0.4,tpot=0.04"; None without one."""
    from kvjax.base.errors import InputError
    from kvjax.serve.load.metrics import Slo

    if text is None:
        return None
    found = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in Slo._fields or not found[name] > 0:
            raise InputError(f"--slo was given {pair!r}, expected seconds above 0, as in ttft=0.4,tpot=0.04")
    return Slo(**found)
