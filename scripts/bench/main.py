"""Prefill and decode speed of kvjax, beside transformers + kvpress where they are installed.

Runs one random Llama on one prompt, in a process pinned to as many cores as it has threads. Rounds alternate
between the libraries, so that other load on the machine affects both. Reports median wall seconds, compile
seconds separately, and a lower bound: (weights + cache) / measured read bandwidth.

    python scripts/bench.py --tokens 4096 16384 --json bench.json

On a GPU or TPU, ten minutes for the tables of docs/benchmarks.md that need one:

    python scripts/bench.py --accelerator --write
"""

from __future__ import annotations

import argparse
import platform
import statistics
from typing import Any

from scripts.bench.libraries import LLAMA, METHODS, Ours, Theirs, measure, theirs_can
from scripts.bench.report import print_rows, write_json
from scripts.bench.timing import pin, read_bandwidth


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


def row(side: Any, name: str, tokens: int, rounds: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """Take the medians of the rounds, as one row of the table."""

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


def main() -> None:
    args = arguments()
    if args.accelerator:
        from scripts.bench import accelerator

        accelerator.main(args)
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
    write_json(args.json, {"arguments": vars(args), "bandwidth": bandwidth, "rows": rows})


if __name__ == "__main__":
    main()
