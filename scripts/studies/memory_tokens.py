"""Models trained with memory tokens: how many questions they answer from a quarter of their cache.

    python -m scripts.studies.memory_tokens run --out runs/memory       # goes on where it was cut
    python -m scripts.studies.memory_tokens run --seed 1 --out runs/memory   # other data
    python -m scripts.studies.memory_tokens                             # prints the table
    python -m scripts.studies.memory_tokens --write                     # writes it into docs/training.md

For every row, `kvjax train --gin gisting` trains a model under a method (half an hour of one core), and
`kvjax compare` evaluates it under that method and with its full cache. The reference is recall-tiny, from
which training starts, with its full cache, and with the first and newest tokens alone at about the same
share. All answer the same samples, with contexts as long as in training. Results are in
docs/memory-tokens.json, those of seeds other than 0 under "seeds" of their row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.docs_tables import DOCS
from scripts.studies import runner
from scripts.studies.runner import Data, Page, train_in

DATA = Data(DOCS / "memory-tokens.json")
START, BUDGET = "recall-tiny", "0.25"
# The method under which a row is trained, and the steps.
ROWS = {
    "gisting": ("gisting:tokens=16", 4000),
    "loma": ("loma", 2000),
    "ccm": ("ccm(tokens=4,chunk=16)", 2000),
    "ccm-merge": ("ccm-merge(tokens=16,chunk=32)", 4000),
}
ASKED = ["--protocol", "agnostic", "--tasks", "get", "--length", "64", "--samples", "300"]


def main() -> None:
    asked = runner.parser(__doc__, ("run",), seed="of the data and of what learns")
    asked.add_argument("--out", type=Path, metavar="DIR", help="where runs lie")
    asked.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="(default: all)")
    args = asked.parse_args()
    if args.what is None:
        PAGE.show(args)
    elif args.out is None:
        asked.error("run needs --out DIR, where runs lie")
    else:
        for name in runner.progress(args.rows):
            add(name, args.out, args.seed)


def add(name: str, out: Path, seed: int = 0) -> None:
    """Train a row, compare it, and add the results to the data."""
    from kvjax.methods.parse import with_file

    (method, steps), run = ROWS[name], f"{name}-{seed}" if seed else name
    folder = out / run
    if seed and name not in DATA.read():
        raise SystemExit(f"{name} has no row of seed 0 yet: run it without --seed first")
    trained = ["train", "--gin", "gisting", "--set", f"train.method={method}", f"train.steps={steps}"]
    trained += runner.seeds(seed) if seed else []
    log = train_in(folder, trained)
    known = with_file(method, folder / f"{name}.safetensors")
    mine = _cells(out, f"{run}-own", str(folder / "model"), "full", known)
    learned = {
        "train": " ".join(["kvjax", *trained]),
        "tokens": log[-1]["tokens"],
        "cpu_seconds": log[-1]["cpu_seconds"],
        "own full": mine["full"],
        "own": mine[name],
    }
    if not seed:
        before = _cells(out, "start", START, "full", "streaming-llm", "--budgets", BUDGET)
        beside = {"start": before["full"], "streaming-llm": before["streamingllm"]}
    found = DATA.read()  # another process may have added a row meanwhile
    if seed:
        found[name].setdefault("seeds", {})[str(seed)] = learned
    else:
        seeds = {"seeds": found[name]["seeds"]} if "seeds" in found.get(name, {}) else {}
        found[name] = {"method": method} | learned | beside | seeds
    DATA.write(found)


def _cells(out: Path, name: str, model: str, *methods: str) -> dict[str, Any]:
    """Return the cells of a comparison by their methods' names."""
    folder = out / f"compare-{name}"
    if not (folder / "metrics.json").exists():
        runner.kvjax("compare", "--model", model, "--methods", *methods, *ASKED, "--out", str(folder))
    cells = json.loads((folder / "metrics.json").read_text())["cells"]
    numbers = ("mean", "mean_low", "mean_high", "kept_bytes", "full_bytes")
    return {
        cell["method"].partition(":")[0]: {n: cell[n] for n in numbers} | cell["tasks"]["get"]
        for cell in cells
    }


def table() -> str:
    """Markdown: the accuracy of every row, and its bytes."""
    head = [
        "method",
        "steps",
        "of the full cache",
        "answers",
        "other seeds",
        "its model, full cache",
        START,
        "sinks + newest",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in DATA.read().values():
        own, steps = row["own"], row["train"].rpartition("=")[2]
        cells = [
            f"`{row['method']}`",
            steps,
            f"{own['kept_bytes'] / own['full_bytes']:.0%}",
            f"**{_said(own)}**",
            ", ".join(f"{one['own']['mean']:.0%}" for _, one in sorted(row.get("seeds", {}).items())),
        ]
        cells += [_said(row[name]) for name in ("own full", "start", "streaming-llm")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _said(cell: dict[str, Any]) -> str:
    return f"{cell['mean']:.0%} ({cell['mean_low']:.0%} to {cell['mean_high']:.0%})"


PAGE = Page("training.md", {"memory tokens": table})

if __name__ == "__main__":
    main()
