"""Speed of this checkout relative to an older one, on the same prompts in alternating rounds.

Each checkout runs in its own process, on the same cores, with `Ours` from its own `scripts/bench`. Reports
the median over rounds of old seconds / new seconds (1.1: ten percent faster), with a 95% interval that
assumes no distribution.

    git worktree add ../before v0.1 && python -m scripts.bench.versions --old ../before --tokens 4096
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
PHASES = ("prefill", "decode")
SETTINGS = ("tokens", "ratio", "decode", "threads", "only_decode")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the older version")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default: 4096)")
    parser.add_argument("--methods", nargs="+", default=["none", "snapkv"], help="names of scripts/bench.py")
    parser.add_argument("--rounds", type=int, default=10, help="at least 6, for an interval (default: 10)")
    parser.add_argument("--ratio", type=float, default=0.5, help="share of the slots kept (default: 0.5)")
    parser.add_argument("--decode", type=int, default=24, help="tokens decoded per round (default: 24)")
    parser.add_argument("--threads", type=int, default=1, help="cores of each process (default: 1)")
    parser.add_argument(
        "--only-decode", action="store_true", help="read prompts once per method, and measure rounds of steps"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write all seconds, after every round"
    )
    args = parser.parse_args()
    if not (args.old / "scripts" / "bench.py").is_file():
        parser.error(f"--old {args.old} has no scripts/bench.py: give the root of a checkout of kvjax")
    if args.rounds < 6:
        parser.error(f"--rounds {args.rounds}: an interval of 95% needs at least 6")
    return args


class Side:
    """A process that measures one checkout, a round of one method at a time."""

    def __init__(self, checkout: Path, args: argparse.Namespace):
        settings = json.dumps({n: getattr(args, n) for n in SETTINGS})
        paths = os.pathsep.join([str(checkout), str(checkout / "scripts")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", settings],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.checkout = checkout

    def round(self, method: str) -> dict[str, float]:
        """Seconds of one prefill (if it is measured) and one decode; the first call compiles before timing.

        Raises RuntimeError if the process has ended; its own message is on the terminal.
        """
        assert self.process.stdin and self.process.stdout
        print(method, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.checkout} ended while it measured {method}")
        return json.loads(line)


def sides() -> Any:
    """`Ours` and the timing functions of the measured checkout; old checkouts have them in one file."""
    try:
        from scripts.bench import libraries
    except ImportError:
        import bench as libraries  # type: ignore[no-redef]
    return libraries


def serve(settings: dict[str, Any]) -> None:
    """Read names of methods from the standard input; answer each with the seconds of one round, as JSON."""
    sys.path.pop(0)  # this file's folder, which would take precedence over the measured checkout
    bench = sides()
    bench.pin(settings["threads"])
    import numpy as np

    ours = bench.Ours(settings["ratio"], settings["decode"])
    prompt = np.random.default_rng(0).integers(1, bench.LLAMA["vocab"], (1, settings["tokens"]))
    rounds: dict[str, list[dict[str, Any]]] = {}
    for line in sys.stdin:
        of_method = rounds.setdefault(line.strip(), [])
        if settings["only_decode"]:
            of_method.append({"decode_s": decode_again(ours, line.strip(), prompt)})
        else:
            bench.measure(ours, line.strip(), prompt, of_method)
        found = of_method[-1]
        print(json.dumps({p: found[f"{p}_s"] for p in PHASES if f"{p}_s" in found}), flush=True)


_caches: dict[str, Any] = {}


def decode_again(ours: Any, method: str, prompt: Any) -> float:
    """Seconds of steps after a prompt, which is read once; steps consume a copy of its cache."""
    import jax

    bench = sides()

    def copied() -> Any:
        return jax.block_until_ready(jax.tree.map(lambda a: a.copy(), _caches[method]))

    if method not in _caches:
        _caches[method] = ours.prefill(method, prompt)
        ours.decode(method, copied(), prompt.shape[1])
    cache = copied()
    return bench.timed(lambda: ours.decode(method, cache, prompt.shape[1]))[1]


def row(method: str, phase: str, old: list[float], new: list[float]) -> dict[str, Any]:
    """One line of the table: medians, the median of the ratios, and the interval's ends."""
    from scipy.stats import quantile_test

    ratios = [before / after for before, after in zip(old, new, strict=True)]
    low, high = quantile_test(ratios, p=0.5).confidence_interval(0.95)
    return {
        "method": method,
        "phase": phase,
        "old_s": round(statistics.median(old), 3),
        "new_s": round(statistics.median(new), 3),
        "old / new": round(statistics.median(ratios), 3),
        "from": round(float(low), 3),
        "to": round(float(high), 3),
    }


def main() -> None:
    args = arguments()
    from kvjax.base.atomic_files import write_atomic
    from kvjax.eval.report.console import make_console
    from scripts.bench.report import print_rows

    sides = {"old": Side(args.old.resolve(), args), "new": Side(HERE, args)}
    seconds: dict[str, list[dict[str, dict[str, float]]]] = {method: [] for method in args.methods}
    console = make_console()
    try:
        for i in range(args.rounds):
            # The order of the two alternates between rounds.
            order = list(sides) if i % 2 == 0 else list(reversed(sides))
            for method in args.methods:
                with console.status(f"round {i + 1} of {args.rounds}: {method}"):
                    seconds[method].append({side: sides[side].round(method) for side in order})
            if args.json:
                write_atomic(args.json, json.dumps(seconds, indent=1).encode())
    finally:
        for side in sides.values():
            side.process.terminate()
    rows = []
    for method, rounds in seconds.items():
        for phase in rounds[0]["new"]:
            rows.append(row(method, phase, *([r[side][phase] for r in rounds] for side in ("old", "new"))))
    print_rows(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
