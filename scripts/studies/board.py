"""The board of a real language model, which runs in shards and never measures anything twice.

    python -m scripts.eval --gin board-1024 --out runs/board-1024 --minutes 60 --resume
        # goes on where docs/real-model-board.jsonl and runs/board-1024 end
    python -m scripts.studies.board collect --out runs/board-1024
        # what was found, finished or not, becomes the data
    python -m scripts.studies.board              # prints the tables
    python -m scripts.studies.board --write      # writes them into docs/real-model.md and the README
    python -m scripts.studies.board picture      # draws docs/real-model-board.png
    python -m scripts.studies.claims --write     # pages that use its data
    python -m scripts.studies.prompts --write

A file of configs/eval with seeds describes a board. A shard is a few methods under one protocol on the
contexts of one seed, in a folder of its own. Shards are ordered by seed, then by methods, then by protocol.
The data has a line per task, protocol, method, budget and seed, with the scores of all contexts, the revision
that ran, and a digest of the method's source; a method whose digest has changed is run again. Only runs with
the same tasks are combined: if the question is read before compression, the longest question of all tasks
decides how many tokens are protected.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.paired import Difference, Scores, difference
from kvjax.eval.run.cellplan import PlannedCell, plan_cells
from kvjax.eval.run.revision import revision
from kvjax.eval.tasks.suite import FIRST_IN_ENGLISH
from kvjax.io.gin_bindings import load_comparison
from kvjax.models.model import Model
from scripts.docs_tables import DOCS
from scripts.studies import board_picture, real_model, real_model_picture
from scripts.studies.board_digest import source_of
from scripts.studies.runner import Page, parser

DATA = DOCS / "real-model-board.jsonl"
# Methods of a shard. They share one reading of its contexts, and are lost together if the shard is
# interrupted.
TOGETHER = 6
# The further file in a comparison's folder: the revision that runs, and the digest of every method's source.
ORIGIN = "origin.json"
OTHERS = ("preset", "seeds", "gold")
NEEDED = ("model", "methods", "budgets", "tasks", "protocols", "samples", "length")
# The methods of the README's table, by the names that papers use.
SHORT = {
    "int8": "int8", "int4": "int4", "kivi": "KIVI, 2 bits", "kvzip": "KVzip", "keydiff": "KeyDiff",
    "tova": "TOVA", "snapkv": "SnapKV", "h2o": "H2O", "streamingllm": "StreamingLLM",
    "random": "random eviction",
}  # fmt: skip
Line = dict[str, Any]


def main() -> None:
    asked = parser(__doc__, ("collect", "picture"))
    asked.add_argument("--out", nargs="+", type=Path, metavar="DIR", help="folders of boards to collect")
    args = asked.parse_args()
    if args.what == "collect":
        if not args.out:
            asked.error("collect was given without --out, expected the folders of the boards: add --out DIR")
        for folder in args.out:
            if not any(folder.glob(f"*/{ORIGIN}")):
                asked.error(
                    f"{folder} holds no shard of a board, expected the --out of scripts.eval --gin board-..."
                )
        lines = joined(read(), (line for folder in args.out for line in collect(folder)))
        write_atomic(DATA, "".join(json.dumps(line) + "\n" for line in lines).encode())
    elif args.what == "picture":
        found = {protocol: losses(at_1024(), protocol) for protocol in real_model_picture.PANELS}
        write_atomic(DATA.with_suffix(".png"), board_picture.picture(found))
    else:
        PAGE.show(args)
        README.show(args)


# --- shards ----------------------------------------------------------------------------------------------


class Shard(NamedTuple):
    """Methods under one protocol on the contexts of one seed; `cells` are those still to be measured."""

    name: str
    protocol: str
    seed: int
    cells: list[PlannedCell]


def run(given: Mapping[str, Any], out: Path, resume: bool = False) -> None:
    """Run the shards that are neither in the data nor finished in `out`; an interrupted shard resumes.

    given: arguments of `kvjax.compare`, with a list of seeds. InputError if an argument that a board needs is
    missing, and if `out` exists without `resume`.
    """
    import kvjax
    from kvjax.eval.compare import compare

    if missing := [f"compare.{name}" for name in NEEDED if not given.get(name)]:
        raise InputError(
            f"a board with compare.seeds was given without {', '.join(missing)}: add what is missing"
        )
    if out.exists() and not resume:
        raise InputError(f"{out} is there already: give --resume to go on with it, or another --out")
    model = kvjax.load(given["model"])
    for shard in shards(given, model, read()):
        folder = out / shard.name
        if (folder / "metrics.json").exists():
            continue
        origin = {"revision": revision(), "sources": {e.label: source_of(e.method) for e in shard.cells}}
        methods = [*origin["sources"]]
        if (folder / "settings.json").exists():
            methods = [*json.loads((folder / ORIGIN).read_text())["sources"]]
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / ORIGIN, json.dumps(origin, indent=1).encode())
        own = {"methods": methods, "protocols": (shard.protocol,), "seeds": None, "seed": shard.seed}
        own |= {"model": model, "baselines": False}
        compare(**{**given, **own}, out=folder, resume=(folder / "settings.json").exists())


def shards(given: Mapping[str, Any], model: Model, known: Sequence[Line]) -> Iterator[Shard]:
    """Yield the shards of a board in order, without methods whose lines are known; empty shards are left out.

    A shard's name depends on the sources of all its methods, known ones included.
    """
    preset = given.get("preset") or ("short" if given["length"] <= 1024 else "long")
    cells = plan_cells(model, given["methods"], given["budgets"], preset, given.get("baselines", True))
    labels = list(dict.fromkeys(entry.label for entry in cells))
    pieces = [labels[at : at + TOGETHER] for at in range(0, len(labels), TOGETHER)]
    digests = {entry: source_of(entry.method) for entry in cells}
    have = _counted(known, model.fingerprint, given["length"], given["tasks"])
    for seed, (number, piece), protocol in itertools.product(
        given["seeds"], enumerate(pieces), given["protocols"]
    ):
        mine = [entry for entry in cells if entry.label in piece]
        digest = hashlib.sha256(repr([(e, digests[e]) for e in mine]).encode()).hexdigest()[:8]

        def missing(e: PlannedCell, of: tuple[str, int] = (protocol, seed)) -> bool:
            key = *of, e.label, repr(e.budget), repr(e.method), digests[e]
            return any(have.get((task, *key), 0) < given["samples"] for task in given["tasks"])

        lacking = {entry.label for entry in mine if missing(entry)}
        if lacking:
            left = [entry for entry in mine if entry.label in lacking]
            yield Shard(f"{protocol}-{seed}-{number:02}-{digest}", protocol, seed, left)


def _counted(
    lines: Iterable[Line], fingerprint: str, length: int, tasks: Sequence[str]
) -> dict[tuple[Any, ...], int]:
    """How many contexts the lines of one model, length and set of tasks have, by cell and task."""
    found = {}
    for line in lines:
        same = line["fingerprint"], line["length"], line["asked"]
        if same == (fingerprint, length, sorted(tasks)):
            key = line["protocol"], line["seed"], line["method"], repr(line["budget"]), line["sentence"]
            found[line["task"], *key, line["source"]] = len(line["scores"])
    return found


# --- data ------------------------------------------------------------------------------------------------


def collect(folder: Path) -> Iterator[Line]:
    """Yield the lines of a board's shards, finished or not."""
    for origin in sorted(folder.glob(f"*/{ORIGIN}")):
        if (origin.parent / "units.jsonl").exists():
            about = json.loads(origin.read_text())
            asked = sorted(json.loads((origin.parent / "settings.json").read_text())["tasks"])
            for line in real_model.collect([origin.parent]):
                source = about["sources"][line["method"]]
                yield {**line, "asked": asked, "revision": about["revision"], "source": source}


def joined(old: Iterable[Line], new: Iterable[Line]) -> list[Line]:
    """Merge lines in a fixed order; of two for the same cell, task and seed, keep the new one.

    If the method is the same, and its source is or both found the same on the contexts that both have, the
    new one is kept only if it has as many contexts; else the old one becomes one of the new source.
    """
    found: dict[tuple[Any, ...], Line] = {}
    for line in (*old, *new):
        key = *(line[x] for x in ("length", "asked", "protocol", "seed", "method", "task")), line["budget"]
        key = tuple(map(repr, key))
        there = found.get(key)
        if there is None or not _alike(there, line) or len(line["scores"]) > len(there["scores"]):
            found[key] = line
        else:
            found[key] = {**there, "source": line["source"]}
    return [found[key] for key in sorted(found)]


def _alike(old: Line, new: Line) -> bool:
    """Return whether two lines are of one method, by its source or by what was found on shared contexts."""
    if any(old[x] != new[x] for x in ("sentence", "fingerprint")):
        return False
    both = zip(old["nll"], new["nll"], strict=False)
    return old["source"] == new["source"] or all(abs(a - b) < 1e-3 for a, b in both)


def read() -> list[Line]:
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


# --- tables ----------------------------------------------------------------------------------------------


class Loss(NamedTuple):
    """A method's loss relative to the full cache under one protocol; `kept` is its bytes in percent."""

    method: str
    budget: float | None
    kept: float
    contexts: int
    nats: Difference
    right: Difference


def losses(lines: Sequence[Line], protocol: str) -> list[Loss]:
    """For every method with all tasks: how much less likely right answers are than with the full cache.

    lines: of one length and of the same tasks (`alike`). Budgets largest first, and within one the least loss
    first. Differences are paired by context.
    """
    mine = [line for line in lines if line["protocol"] == protocol]
    tasks = {line["task"] for line in mine}
    by_cell: dict[tuple[str, float | None], list[Line]] = {}
    for line in mine:
        by_cell.setdefault((line["method"], line["budget"]), []).append(line)
    full = by_cell.get(("full", None), [])
    found = []
    for (method, budget), cell in by_cell.items():
        if {line["task"] for line in cell} < tasks or method == "full":
            continue
        lost = difference(_by_sample(cell, "nll"), _by_sample(full, "nll"), shares=False)
        right = difference(_by_sample(cell, "scores"), _by_sample(full, "scores"))
        if lost is not None and right is not None:
            kept = 100 * float(np.mean([line["kept"] for line in cell]))
            found.append(Loss(method, budget, kept, lost.samples // len(tasks), lost, right))
    return sorted(found, key=lambda x: (-(x.budget or 2), x.nats.mean))


def table(lines: Sequence[Line], protocol: str) -> str:
    """Write the losses of all methods under a protocol."""
    head = (
        "| method | budget | bytes, % | contexts | -log p, above the full cache's | right answers, points |"
    )
    rows = [
        f"| {x.method} | {budget_label(x.budget)} | {x.kept:.1f} | {x.contexts} | {_signed(x.nats)} "
        f"| {_signed(x.right, 100)} |"
        for x in losses(lines, protocol)
    ]
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|", *rows])


def short_table(lines: Sequence[Line], sizes: Mapping[str, Sequence[float]]) -> str:
    """Write the losses of a few methods, at a quarter of the slots if they evict.

    sizes: by sentence, the share of a bfloat16 cache's bytes comes first, as in docs/what-buys-what.json. The
    board's own bytes are shares of a float32 cache, beside which codes look half as large.
    """
    by_protocol = [{(x.method, x.budget): x for x in losses(lines, p)} for p in ("agnostic", "aware")]
    sentences = {(line["method"], line["budget"]): line["sentence"] for line in lines}
    rows = []
    for method, label in SHORT.items():
        found = [by.get((method, None)) or by.get((method, 0.25)) for by in by_protocol]
        if found[0] is not None:
            nats = ["–" if x is None else f"{round(x.nats.mean, 2) + 0.0:+.2f}" for x in found]
            held = sizes[sentences[method, found[0].budget]][0]
            rows.append(f"| {label} | {100 * held:.0f} | {' | '.join(nats)} |")
    head = "| method | bytes, % of bfloat16 | loss, question comes later | loss, question is read first |"
    return "\n".join([head, "|---|--:|--:|--:|", *rows])


def _sizes() -> Mapping[str, Sequence[float]]:
    return json.loads((DOCS / "what-buys-what.json").read_text())["sizes"]


def alike(lines: Sequence[Line], length: int, tasks: Sequence[str]) -> list[Line]:
    """Take the lines of one length, from runs that asked these tasks."""
    return [line for line in lines if (line["length"], line["asked"]) == (length, sorted(tasks))]


def counts(mine: Sequence[Line]) -> str:
    """One sentence on what the tables of these lines contain."""
    names = lambda found: ", ".join(f"`{one}`" for one in sorted(found))  # noqa: E731
    if not mine:
        return "No rows yet."
    tasks = sorted({line["task"] for line in mine})
    out = []
    for protocol in sorted({line["protocol"] for line in mine}):
        of = [line for line in mine if line["protocol"] == protocol]
        by = {}
        for line in of:
            by.setdefault((line["method"], repr(line["budget"])), set()).add(line["task"])
        whole = {method for (method, _), found in by.items() if found >= {*tasks}}
        out.append(f"{len(whole)} methods under `{protocol}` ({names(whole)})")
    return f"So far, of {len(tasks)} tasks ({names(tasks)}): {'; '.join(out)}."


def _by_sample(lines: Iterable[Line], what: str) -> Scores:
    return {
        (line["task"], f"{line['seed']}-{i:04}"): value
        for line in lines
        for i, value in enumerate(line[what])
    }


def _signed(found: Any, unit: float = 1.0) -> str:
    """Write a difference with its interval, if there are enough contexts for one."""
    digits = 3 if unit == 1 else 0
    number = lambda x: f"{round(unit * x, digits) + 0.0:+.{digits}f}"  # noqa: E731  # no -0
    if found.low is None:
        return number(found.mean)
    return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"


def turns_table(lines: Sequence[Line]) -> str:
    """Write losses of methods whose context answers one question, beside five's in one conversation."""
    alone = {(x.method, x.budget): x for x in losses(lines, "agnostic")}
    head = "| method | budget | bytes, % | answers | a question alone | five in a conversation |"
    rows = [
        f"| {x.method} | {budget_label(x.budget)} | {x.kept:.1f} | {x.nats.samples} "
        f"| {_signed(one.nats) if (one := alone.get((x.method, x.budget))) else '–'} | {_signed(x.nats)} |"
        for x in losses(lines, "multi-turn")
    ]
    return "\n".join([head, "|---|--:|--:|--:|--:|--:|", *rows])


def of_board(name: str) -> list[Line]:
    """Take the lines of the board that a file of configs/eval describes: of its length and tasks."""
    given = load_comparison(name, [*NEEDED, *OTHERS])
    return alike(read(), given["length"], given["tasks"])


def at_1024() -> list[Line]:
    """Take the lines of the board at 1024 tokens."""
    return of_board("board-1024")


PAGE = Page(
    "real-model.md",
    {
        "board counts": lambda: counts(at_1024()),
        "board agnostic": lambda: table(at_1024(), "agnostic"),
        "board aware": lambda: table(at_1024(), "aware"),
        "board needle": lambda: table(alike(read(), 1024, FIRST_IN_ENGLISH), "aware"),
        "board turns": lambda: turns_table(of_board("board-turns")),
        "board 4096 agnostic": lambda: table(of_board("board-4096"), "agnostic"),
    },
)

README = Page("../README.md", {"board short": lambda: short_table(at_1024(), _sizes())})

if __name__ == "__main__":
    main()
