"""Tokens per second of training: the MHA model in kvjax and in torch, and other architectures.

    python -m scripts.bench.training                       # both tables, on an idle machine
    python -m scripts.bench.training --lengths 1024 --rounds 3 --threads 2

Rounds of all sides alternate, so that other load on the machine affects all of them. torch takes part if it
is installed (`pip install torch`): it starts from the same weights, and both must give the same loss on the
same rows before anything is timed. Reports median wall seconds per step, without compilation.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.report import table, write_json
from scripts.bench.timing import median_in_turn, pin

LINEAR = (
    "bytes-linear", "bytes-retnet", "bytes-gla", "bytes-gated-deltanet", "bytes-kda", "bytes-mamba2",
    "bytes-rwkv7",
)  # fmt: skip
Step = Callable[[], float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gin", nargs="+", default=list(LINEAR), metavar="FILE", help="beside plain softmax")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192], help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, whatever its rows (8192)")
    parser.add_argument("--rounds", type=int, default=5, help="whose medians are told (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="cores of the process (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="where to write the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    pin(args.threads, alone=False)
    check(args)
    found: dict[str, Any] = {"torch": beside_torch(args), "lengths": {}}
    for length in args.lengths:
        found["lengths"][length] = at_length(length, args)
    write_json(args.json, found)


def check(args: argparse.Namespace) -> None:
    """Exit with a message if something cannot be measured, before measuring anything."""
    from kvjax.base.errors import InputError
    from kvjax.io.gin_bindings import load_training

    try:
        for name in args.gin:
            load_training(name)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    if min(*args.lengths, args.tokens, args.rounds, args.threads) < 1:
        raise SystemExit("error: --lengths, --tokens, --rounds and --threads are whole numbers from 1 on")
    if args.json and not Path(args.json).parent.is_dir():
        raise SystemExit(f"error: there is no folder {Path(args.json).parent} for --json: make it first")


def beside_torch(args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of the MHA model in kvjax and in torch, on rows of 256 bytes."""
    rows, length = 16, 256
    ours = Ours("bytes", rows, length)
    sides: dict[str, Step] = {"kvjax": ours.step}
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: kvjax alone")
    else:
        from scripts.bench.torch_decoder import Theirs

        theirs = Theirs(ours.config, ours.params, ours.tokens, ours.optimiser, args.threads)
        sides["torch"] = theirs.step
    first = {name: step() for name, step in sides.items()}
    if max(first.values()) - min(first.values()) > 1e-3:
        raise SystemExit(f"the models differ: their first losses are {first}")
    seconds = median_in_turn(sides, args.rounds)
    speeds = {name: rows * length / x for name, x in seconds.items()}
    show(f"MHA, {rows} rows of {length}", speeds, "torch")
    return speeds


def at_length(length: int, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of architectures at one row length."""
    rows = max(1, args.tokens // length)
    sides = {name: Ours(name, rows, length).step for name in ("bytes", *args.gin)}
    for step in sides.values():
        step()
    seconds = median_in_turn(sides, args.rounds)
    speeds = {name: rows * length / x for name, x in seconds.items()}
    show(f"{rows} rows of {length}", speeds, "bytes")
    return speeds


def show(what: str, speeds: dict[str, float], other: str) -> None:
    """Print the speeds, and their ratios to one of them."""
    lines = [[n, f"{x:,.0f}", f"{x / speeds.get(other, x):.2f}"] for n, x in speeds.items()]
    print("\n" + table([what, "tokens/s", f"beside {other}"], lines))


class Ours:
    """Training steps of `kvjax train` by one of its gin files, on the same random rows again and again.

    settings: further settings, as `--set` takes them.
    """

    def __init__(self, gin: str, rows: int, length: int, *settings: str):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from kvjax.io.gin_bindings import load_training
        from kvjax.models.params import init
        from kvjax.train.loop import begin
        from kvjax.train.optimiser import optimiser
        from kvjax.train.settings import training
        from kvjax.train.step import BatchParts, make_step

        changes = [f"train.batch={rows}", f"train.length={length}", "optimiser.schedule=constant"]
        run = training(load_training(gin, [*changes, "optimiser.warmup=0", *settings]), vocab=257)
        assert run.config is not None
        self.config, self.optimiser = run.config, run.optimiser
        self.params = init(run.config, jax.random.key(0))
        self.tokens = np.random.default_rng(0).integers(0, 256, (rows, length + 1)).astype(np.int32)
        rule = optimiser(run.optimiser, run.loop)
        # A step consumes its state, but the weights are needed again.
        copied = jax.tree.map(jnp.copy, self.params)
        self.state, _ = begin(copied, run, run.config, rule, None)
        weights = jnp.ones((1, *self.tokens.shape), jnp.float32)
        self.parts = BatchParts(jnp.asarray(self.tokens)[None], weights, None)
        self.step_of = make_step(run.config, run.loop, rule)

    def step(self) -> float:
        """One training step; returns its loss in nats per token."""
        self.state, found = self.step_of(self.state, self.parts)
        return float(found.loss)


if __name__ == "__main__":
    main()
