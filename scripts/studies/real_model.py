"""A real language model of 135 million parameters: accuracy of the full cache, then methods at budgets.

    kvjax get smollm2-135m
    python -m scripts.eval --gin pilot-full --out runs/pilot-full   # about 20 minutes of two cores
    python -m scripts.eval --gin pilot --out runs/pilot             # about 90; --minutes, --resume
    python -m scripts.studies.real_model collect --out runs/pilot runs/pilot-full
        # what they found, finished or not, becomes the data
    python -m scripts.studies.real_model                            # prints the tables
    python -m scripts.studies.real_model --write                    # writes them into docs/real-model.md
    python -m scripts.studies.real_model picture                    # draws docs/real-model.png

docs/real-model.jsonl has a line per task, protocol, method and budget, with the scores of all contexts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.cells import MeanScore, bootstrap_interval, budget_label, score_of
from scripts.docs_tables import DOCS
from scripts.studies.real_model_picture import picture
from scripts.studies.runner import Page, parser

DATA = DOCS / "real-model.jsonl"
# The conditions under which the board measures a task at a budget by whole answers.
LEAST, TASKS = 0.7, 3
ORDER = ("full", "kvzip", "tova", "h2o", "snapkv", "random")
Line = dict[str, Any]


def main() -> None:
    asked = parser(__doc__, ("collect", "picture"))
    asked.add_argument("--out", nargs="+", type=Path, metavar="DIR", help="folders of comparisons to collect")
    args = asked.parse_args()
    if args.what == "collect":
        if not args.out:
            asked.error("collect was given without --out, expected the folders of the runs: add --out DIR")
        text = "".join(json.dumps(line) + "\n" for line in collect(args.out))
        write_atomic(DATA, text.encode())
    elif args.what == "picture":
        write_atomic(DATA.with_suffix(".png"), picture(comparable(read())))
    else:
        PAGE.show(args)


# --- data ------------------------------------------------------------------------------------------------


def collect(folders: Sequence[Path]) -> list[Line]:
    """Write a line per cell and task of the results so far; the first folder that has a sample is used.

    Scores are in the order in which contexts were read, which is the same for all methods.
    """
    found: dict[tuple[str, str, str, str], dict[str, Line]] = {}
    about: dict[tuple[str, str, str, str], Line] = {}
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        sentences = {(label, repr(budget)): text for label, budget, text in settings["cells"]}
        for row in _rows(folder):
            key = row["protocol"], row["task"], row["method"], repr(row["budget"])
            found.setdefault(key, {}).setdefault(row["id"], row)
            same = {name: settings[name] for name in ("fingerprint", "length", "seed")}
            about.setdefault(key, {**same, "sentence": sentences[key[2:]]})
    lines = []
    for key, rows in sorted(found.items()):
        lines.append({**_line([*rows.values()]), **about[key]})
    return lines


def _rows(folder: Path) -> Iterator[Line]:
    units = folder / "units.jsonl"
    if not units.exists():
        sys.exit(f"{folder} has no units.jsonl: run `python -m scripts.eval --out {folder}` first")
    for line in units.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield from json.loads(line)["rows"]


def _line(rows: Sequence[Line]) -> Line:
    first = rows[0]
    spans = [row["span_kept"] for row in rows if row["span_kept"] is not None]
    return {
        **{name: first[name] for name in ("protocol", "task", "method", "budget")},
        "scores": [round(row["score"], 4) for row in rows],
        "nll": [round(row["nll"], 4) for row in rows],
        "kept": round(float(np.mean([row["kept_bytes"] / row["full_bytes"] for row in rows])), 4),
        "span_kept": round(float(np.mean(spans)), 4) if spans else None,
    }


def read() -> list[Line]:
    return [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []


# --- tables ----------------------------------------------------------------------------------------------


def full_table(lines: Sequence[Line]) -> str:
    """Write the full cache's scores, task by task."""
    out = ["| task | contexts | right, % | -log p, nats per token |", "|---|--:|--:|--:|"]
    full = [line for line in lines if line["method"] == "full" and line["protocol"] == "agnostic"]
    for line in sorted(full, key=lambda line: -np.mean(line["scores"])):
        score = score_of(line["scores"])
        out.append(f"| {line['task']} | {score.samples} | {_percent(score)} | {np.mean(line['nll']):.3f} |")
    return "\n".join(out)


def pilot_table(lines: Sequence[Line], protocol: str) -> str:
    """Scores and -log p of every method, over all tasks, and over those that the full cache can do."""
    mine = [line for line in comparable(lines) if line["protocol"] == protocol]
    tasks = [task for task in answered(lines) if any(line["task"] == task for line in mine)]
    head = f"| method | budget | bytes, % | {' | '.join(tasks)} | -log p, these tasks | -log p, all tasks |"
    out = [head, f"|---|--:|--:|{'--:|' * (len(tasks) + 2)}"]
    for method, budget in cells(mine):
        cell = [line for line in mine if (line["method"], line["budget"]) == (method, budget)]
        by_task = {line["task"]: line for line in cell}
        scores = [_percent(score_of(by_task[task]["scores"])) if task in by_task else "–" for task in tasks]
        own = [_nll([by_task[t] for t in some if t in by_task]) for some in (tasks, [*by_task])]
        kept = 100 * np.mean([line["kept"] for line in cell])
        out.append(f"| {method} | {budget_label(budget)} | {kept:.1f} | {' | '.join((*scores, *own))} |")
    return "\n".join(out)


def decision_table(lines: Sequence[Line]) -> str:
    """Write the tasks and budgets at which full, SnapKV and random have disjoint intervals."""
    out = ["| protocol | budget | told apart by whole answers | told apart by -log p |", "|---|--:|---|---|"]
    for protocol in dict.fromkeys(line["protocol"] for line in lines):
        for budget in sorted({line["budget"] for line in lines if line["budget"]}, reverse=True):
            answers = [t for t in answered(lines) if _apart(lines, protocol, t, budget, "scores")]
            tasks = dict.fromkeys(line["task"] for line in lines)
            likely = [t for t in tasks if _apart(lines, protocol, t, budget, "nll")]
            out.append(f"| {protocol} | {budget} | {_listed(answers)} | {_listed(likely)} |")
    return "\n".join(out)


def comparable(lines: Sequence[Line]) -> list[Line]:
    """Find the tasks that all methods were asked at all budgets, and the contexts that all of them have."""
    found = []
    for protocol in dict.fromkeys(line["protocol"] for line in lines):
        of_protocol = [line for line in lines if line["protocol"] == protocol]
        every = {*cells(of_protocol)}
        for task in dict.fromkeys(line["task"] for line in of_protocol):
            mine = [line for line in of_protocol if line["task"] == task]
            count = min(len(line["scores"]) for line in mine)
            if {*cells(mine)} == every:
                found += [{**x, "scores": x["scores"][:count], "nll": x["nll"][:count]} for x in mine]
    return found


def answered(lines: Iterable[Line]) -> list[str]:
    """Choose the tasks that the full cache answers well enough, best first."""
    full = {
        line["task"]: float(np.mean(line["scores"]))
        for line in lines
        if line["method"] == "full" and line["protocol"] == "agnostic"
    }
    return sorted((task for task, mean in full.items() if mean >= LEAST), key=lambda task: -full[task])


def cells(lines: Iterable[Line]) -> list[tuple[str, float | None]]:
    """Methods in a fixed order, larger budgets first."""
    there = {(line["method"], line["budget"]) for line in lines}
    return sorted(there, key=lambda cell: (ORDER.index(cell[0]), -(cell[1] or 1)))


def _apart(lines: Sequence[Line], protocol: str, task: str, budget: float, what: str) -> bool:
    """Whether the 95% intervals of full, SnapKV and random are disjoint, on the contexts that all have."""
    wanted = [("full", None), ("snapkv", budget), ("random", budget)]
    found = []
    for method, given in wanted:
        of = [
            x
            for x in lines
            if (x["protocol"], x["task"], x["method"], x["budget"]) == (protocol, task, method, given)
        ]
        if not of:
            return False
        found.append(of[0][what])
    count = min(map(len, found))
    if what == "scores":
        ends = [(score.low, score.high) for score in (score_of(values[:count]) for values in found)]
    else:
        ends = [bootstrap_interval(values[:count]) for values in found]
    ends.sort()
    return all(high < low for (_, high), (low, _) in zip(ends, ends[1:], strict=False))


def _percent(score: MeanScore) -> str:
    return f"{100 * score.mean:.0f} [{100 * score.low:.0f}, {100 * score.high:.0f}]"


def _nll(lines: Sequence[Line]) -> str:
    return f"{np.mean([np.mean(line['nll']) for line in lines]):.3f}" if lines else "–"


def _listed(tasks: Sequence[str]) -> str:
    return ", ".join(tasks) or "none"


PAGE = Page(
    "real-model.md",
    {
        "full": lambda: full_table(read()),
        "agnostic": lambda: pilot_table(read(), "agnostic"),
        "aware": lambda: pilot_table(read(), "aware"),
        "decision": lambda: decision_table(read()),
    },
)

if __name__ == "__main__":
    main()
