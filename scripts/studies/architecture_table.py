"""Quality of architectures per byte of state: each is trained on the same text, then measured.

    python -m scripts.studies.architecture_table train --steps 4000     # all rows, two at a time, a core each
    python -m scripts.studies.architecture_table train --seconds 1500 --rows mha gqa mla
    python -m scripts.studies.architecture_table train --steps 1000 --jobs 7 --accelerator
        # seven share a GPU
    python -m scripts.studies.architecture_table recall                 # and each on associative recall
    python -m scripts.studies.architecture_table speed
        # on an idle machine: speeds that are missing
    python -m scripts.studies.architecture_table --write                # the table in docs/architectures.md
    python -m scripts.studies.architecture_table --picture F.png
        # and bits per byte against bytes of state

The text is the standard library's source. All rows get the same number of steps, and so the same bytes. With
--seconds, every row trains briefly first, and the number of steps is what the slowest row does in that time.
Runs are in --out and resume after an interruption; rows that the data has under the same budget are skipped.
The data, docs/architecture-table.json, holds all settings and seeds to repeat a row. Speed depends on the
architecture and not on its weights, so a short run with new weights measures it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.io.gin_bindings import load_training, training_files
from kvjax.train.data.texts import is_held_out, read_texts
from kvjax.train.settings import OF_WORDS, Data
from scripts.docs_tables import DOCS
from scripts.studies import runner
from scripts.studies.architecture_measures import answered, measured, speeds
from scripts.studies.architecture_picture import draw
from scripts.studies.runner import Page, train_in

DATA = runner.Data(DOCS / "architecture-table.json", empty={"rows": {}})
CONTEXTS = (1024, 8192, 65536)
# Enough steps to measure how fast a row trains; the first ones compile.
TRIAL = 8


# For associative recall, layers have half the channels, attention has biases, and one table embeds and
# unembeds.
NARROW = ("model.d_model=64", "model.d_ff=128", "model.tied=True", "model.qkv_bias=True")

_WIDTH = "'d_model': 64, 'heads': 4, 'kv_heads': 4, 'head_dim': 32, 'd_ff': 128"
BLOCK_NARROW = (
    f"model.blocks={{'layers': 3, 'qkv_bias': True, {_WIDTH}}}",
    f"model.tokens={{'layers': 2, 'qkv_bias': True, 'tied': True, {_WIDTH}}}",
)


class Row(NamedTuple):
    """A row of the table: its name, its training file, and the settings that halve its channels."""

    name: str
    gin: str
    narrow: tuple[str, ...] = NARROW


ROWS = {
    "mha": Row("MHA", "bytes"),
    "gqa": Row("GQA", "bytes-gqa"),
    "mqa": Row("MQA", "bytes-mqa"),
    "mla": Row("MLA", "bytes-mla"),
    "tpa": Row("TPA", "bytes-tpa"),
    "cla": Row("CLA", "bytes-cla"),
    "mlkv": Row("MLKV", "bytes-mlkv"),
    "lckv": Row("LCKV", "bytes-lckv"),
    "yoco": Row("YOCO", "bytes-yoco"),
    "block": Row("Block Transformer", "bytes-block", BLOCK_NARROW),
    "mixattention": Row("MixAttention", "bytes-mixattention"),
    "svformer": Row("SVFormer", "bytes-svformer"),
    "pod": Row("PoD", "bytes-pod"),
    "forgetting": Row("Forgetting Transformer", "bytes-forgetting"),
    "gau": Row("GAU (FLASH)", "bytes-gau"),
    "linear": Row("Linear Transformer", "bytes-linear"),
    "based": Row("Based", "bytes-based"),
    "retnet": Row("RetNet", "bytes-retnet"),
    "gla": Row("GLA", "bytes-gla"),
    "hgrn": Row("HGRN", "bytes-hgrn"),
    "rwkv7": Row("RWKV-7", "bytes-rwkv7"),
    "mamba": Row("Mamba", "bytes-mamba"),
    "mamba2": Row("Mamba-2", "bytes-mamba2"),
    "gated-deltanet": Row("Gated DeltaNet", "bytes-gated-deltanet"),
    "kda": Row("KDA", "bytes-kda"),
    "log-linear": Row("Log-linear Mamba-2", "bytes-log-linear-mamba2"),
    "kimi-linear": Row("Kimi-Linear-like hybrid", "bytes-kimi-linear"),
    "mixcon": Row("MixCon", "bytes-mixcon"),
    "mcsd": Row("MCSD", "bytes-mcsd"),
}


# The settings of an associative-recall run, applied after those of the row's own file. Stages are (steps,
# length, rows), with 4, then 8 and 16 pairs.
RECALL = (
    "data.kind=pairs", "train.stages=[(800,16,256),(200,32,128),(250,64,64)]",
    "train.log_every=50", "optimiser.peak=3e-3", "optimiser.schedule=wsd", "optimiser.warmup=20",
    "optimiser.weight_decay=0.0",
)  # fmt: skip
# How many pairs the rows of its questions have.
PAIRS = (4, 8, 16)


def main(words: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(words)
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}, expected at least 1")
    data = runner.Data(args.data, DATA.empty)
    if args.what is None:
        Page("architectures.md", {"measured": lambda: table(data.read())}).show(args)
        if args.picture is not None:
            draw(data.read(), args.picture)
        return
    if args.what == "one":
        print(json.dumps(KINDS[args.kind].measure(args.rows[0], args)))
        return
    missing = [id for id in args.rows if ROWS[id].gin not in training_files()]
    if missing:
        print(f"left out, for want of a training file: {', '.join(missing)}")
    rows = [id for id in args.rows if id not in missing]
    if args.what == "train":
        for id in rows:
            _check_held_out(id, args)
    if args.steps is None and args.what == "train":
        args.steps = _steps_in(args.seconds, rows, args)
    kind = KINDS[args.what]
    budget = kind.budget(args)
    found = data.read()
    todo = [id for id in rows if found["rows"].get(id, {}).get(kind.name) != budget]
    print(f"{len(rows) - len(todo)} rows are there; {len(todo)} to do", flush=True)
    # Parallel runs would compete for memory.
    with ThreadPoolExecutor(1 if args.what == "speed" else args.jobs) as pool:
        rows_of = {pool.submit(_apart, id, i, args): id for i, id in enumerate(todo)}
        # Only the parent writes the data, each row as soon as it is measured.
        for done in as_completed(rows_of):
            id, result = rows_of[done], done.result()
            if result is None:
                continue
            found = data.read()
            row = found["rows"].get(id, {"name": ROWS[id].name, "gin": ROWS[id].gin})
            found["rows"][id] = row | result | {kind.name: budget}
            data.write(found)
            print(f"{id}: {kind.said.format(**result)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = runner.parser(__doc__, (*KINDS, "one"))
    parser.add_argument("--kind", choices=KINDS, default="train", help="of one: what is measured")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, help="of train: steps of every row")
    parser.add_argument("--seconds", type=float, default=1500.0, help="or: the time of the slowest row")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time, a core each (default: 2)")
    parser.add_argument(
        "--accelerator", action="store_true", help="rows share a GPU or TPU, and no core is set apart"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="SECTION.NAME=VALUE", help="for all rows")
    parser.add_argument("--out", type=Path, default=Path("runs/architectures"), metavar="DIR")
    parser.add_argument("--data", type=Path, default=DATA.path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="where to draw bits and bytes")
    return parser


def _apart(id: str, place: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run `one` on a core of its own; return the JSON it prints last; None, with a message, if it fails."""
    words = ["one", "--kind", args.what, "--rows", id, "--out", str(args.out)]
    words += ["--steps", str(args.steps)] if args.steps else []
    words += ["--set", *args.set] if args.set else []
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    alone = args.accelerator or len(cores) < 2 or args.jobs < 2
    core = None if alone else cores[place % len(cores)]
    module = "scripts.studies.architecture_table"
    found = runner.apart(module, *words, env=_environment(args.accelerator), core=core)
    if found is None:
        print(f"{id} failed; its run goes on when this is started again", flush=True)
    return found


def _environment(accelerator: bool) -> dict[str, str]:
    """Make the environment of a row's process: it shares a device's memory, or computes on one core."""
    if accelerator:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"}


def trained(id: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train a row, or resume its training, and measure quality and bytes."""
    folder = args.out / f"{id}-{args.steps}"
    log = _train(id, folder, [f"train.steps={args.steps}", *args.set])
    run = json.loads((folder / "run.json").read_text())
    seeds = {"seeds": {"train": run["train"]["seed"], "data": run["data"]["seed"]}}
    found = {"bits_per_byte": log[-1]["bits_per_byte"], "tokens": log[-1]["tokens"]}
    return found | seeds | measured(folder / "model", CONTEXTS)


def recalled(id: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compute the shares of questions that a row answers after learning associative recall."""
    folder = args.out / f"{id}-recall"
    log = _train(id, folder, [*RECALL, *ROWS[id].narrow, *args.set])
    found = {"answered": answered(folder / "model", PAIRS), "recall_tokens": log[-1]["tokens"]}
    return found | {"recall_losses": [line["loss"] for line in log]}


def timed(id: str, args: argparse.Namespace) -> dict[str, Any]:
    """How fast a row trains and decodes, from a run that is too short to learn anything."""
    folder = args.out / f"{id}-trial"
    log = _trial(id, args)
    return {"training_tokens_per_second": speed_of(log), **speeds(folder / "model", CONTEXTS)}


def _check_held_out(id: str, args: argparse.Namespace) -> None:
    """Exit if a row would train but no held-out text is left to measure its bits per byte on."""
    try:
        data = Data(**load_training(ROWS[id].gin, args.set)["data"])
        texts = [] if data.kind in OF_WORDS else read_texts(data)
    except InputError as error:
        sys.exit(str(error))
    if not any(is_held_out(text, data.held_out) for text in texts):
        sys.exit(
            f"{id} would read data.kind {data.kind!r}, of which no text is held out with "
            f"data.held_out={data.held_out}, and bits per byte are measured there: give more files"
        )


def _train(id: str, folder: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Train a run to its end; return its log."""
    return train_in(folder, ["train", "--gin", ROWS[id].gin, "--set", *settings])


def speed_of(log: list[dict[str, Any]]) -> int:
    """Tokens per second of a core: the median over a log, whose first line includes compilation."""
    found = (
        (b["tokens"] - a["tokens"]) / (b["cpu_seconds"] - a["cpu_seconds"])
        for a, b in itertools.pairwise(log)
    )
    return round(statistics.median(found))


class Kind(NamedTuple):
    """A kind of measurement: its name in the data, its function, what it depends on, and its message."""

    name: str
    measure: Callable[[str, argparse.Namespace], dict[str, Any]]
    budget: Callable[[argparse.Namespace], Any]
    said: str


KINDS = {
    "train": Kind(
        "budget", trained,
        lambda args: {"steps": args.steps, "set": args.set},
        "{bits_per_byte} bits per byte",
    ),
    "recall": Kind(
        "recall_budget", recalled,
        lambda args: {"set": [*RECALL, *args.set]},
        "answered, by pairs: {answered}",
    ),
    "speed": Kind(
        "speed_budget", timed, lambda args: {"steps": TRIAL, "set": args.set},
        "{training_tokens_per_second} tokens per second in training",
    ),
}  # fmt: skip


def _trial(id: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the log of a new short run."""
    folder = args.out / f"{id}-trial"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [f"train.steps={TRIAL}", "train.log_every=2", "train.evaluate_rows=1", *args.set]
    return _train(id, folder, settings)


def _steps_in(seconds: float, rows: list[str], args: argparse.Namespace) -> int:
    """How many steps the slowest of the rows does in that time, estimated by a short run of each."""
    slowest = 0.0
    for id in rows:
        log = _trial(id, args)
        step = log[-1]["tokens"] / TRIAL
        slowest = max(slowest, step / statistics.median(line["tokens_per_second"] for line in log[1:]))
        print(f"{id}: {1 / slowest:.2f} steps per second or more", flush=True)
    return max(1, int(seconds / slowest))


def table(found: dict[str, Any]) -> str:
    """Write the rows in order, the best bits per byte in bold; a missing measurement is an empty cell."""
    rows = [found["rows"][id] for id in ROWS if id in found["rows"]]
    if not rows:
        return "No row is measured yet: `python -m scripts.studies.architecture_table train`."
    sizes = [f"{n // 1024}k" for n in CONTEXTS]
    head = [
        "architecture", "parameters", "bits per byte, held out", "a text read once / again",
        f"recall of {' / '.join(map(str, PAIRS))} pairs", *(f"state at {n}" for n in sizes),
        *(f"decode tokens/s at {n}" for n in sizes), "training tokens/s",
    ]  # fmt: skip
    best = min(row["bits_per_byte"] for row in rows if "bits_per_byte" in row)
    *fewer, most = sorted({row["tokens"] for row in rows if "tokens" in row})
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cells(row, best, most))} |" for row in rows]
    less = f", with * on {' or '.join(f'{n:,}' for n in fewer)}" if fewer else ""
    notes = [
        f"Trained on {most:,} bytes of text{less}.",
        "*A text read once / again*: bits per byte of 120 held-out bytes, and of the same bytes when they",
        "follow a second time, so that a model can look them up in its state. *State*: bytes of one",
        "row, with keys and values in bfloat16. *Recall*: the share of 2048 unseen questions for the value",
        "of a key that a model answers after training on such questions alone. Empty cells were not",
        "measured: `python -m scripts.studies.architecture_table recall` fills them, and `... speed` on an",
        "idle machine.",
    ]
    return "\n".join([*lines, "", *notes])


def _cells(row: dict[str, Any], best: float, most: int) -> list[str]:
    def cell(form: str, *path: str) -> str:
        x: Any = row
        for name in path:
            x = {} if x is None else x.get(name)
        return "" if x is None or x == {} else form.format(x)

    bits = cell("{:.3f}", "bits_per_byte")
    return [
        row["name"] + ("*" if row.get("tokens", most) < most else ""),
        cell("{:,}", "parameters"),
        f"**{bits}**" if row.get("bits_per_byte") == best else bits,
        " / ".join(f"{x:.3f}" for x in row.get("recall_bits", ())),
        " / ".join(f"{row['answered'][str(n)]:.0%}" for n in PAIRS if "answered" in row),
        *(cell("{:,}", "state_bytes", str(n)) for n in CONTEXTS),
        *(cell("{:,.0f}", "decode_tokens_per_second", str(n)) for n in CONTEXTS),
        cell("{:,}", "training_tokens_per_second"),
    ]


PAGE = Page("architectures.md", {"measured": lambda: table(DATA.read())})

if __name__ == "__main__":
    main()
