"""Open questions of the field on a real language model: bits of codes, sinks, heads, windows, turns.

    kvjax get smollm2-135m
    python -m scripts.studies.field run --out runs/field --minutes 60   # goes on with the next row
    python -m scripts.studies.field collect --out runs/field            # its rows become docs/field.json
    python -m scripts.studies.field sizes                               # adds bytes of rows that lack them
    python -m scripts.studies.field                                     # prints the tables
    python -m scripts.studies.field --write                             # writes them into docs/field.md
    python -m scripts.studies.field picture                             # draws docs/field.png

Windows of prose are read and compressed, and the 128 tokens after each are fed one by one, as in `kvjax
compare --text`. docs/field.json has, per row, the KL divergence from the full cache in every window. KL is
measured with caches in float32; bytes are shares of a cache in bfloat16, from shapes alone. The
effect of reading a question before compression is taken from the pilot's data, docs/real-model.jsonl.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.base.atomic_files import write_atomic
from kvjax.base.errors import InputError
from kvjax.eval.report.cells import bootstrap_interval, budget_label
from kvjax.eval.report.console import make_console
from kvjax.eval.report.paired import difference
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.log import UnitLog
from kvjax.eval.run.revision import revision
from kvjax.grammar import Method
from kvjax.plan.cache_sizes import CacheSizes
from scripts.docs_tables import DOCS
from scripts.studies import real_model
from scripts.studies.field_picture import picture
from scripts.studies.field_rows import AGAIN, ROWS, SECOND, TOPICS, sentence
from scripts.studies.runner import Data, Page, parser
from scripts.studies.what_buys import of_the_board

DATA = Data(DOCS / "field.json", {"about": {}, "rows": {}})
TEXT = DOCS.parent / "kvjax" / "eval" / "tasks" / "ruler" / "data" / "alice29.txt"
LENGTH, WINDOWS = 1024, 6
ORIGIN = "origin.json"
LACKING = "Not measured yet."
Measured = dict[str, Any]


def main() -> None:
    asked = parser(__doc__, ("run", "collect", "sizes", "picture"))
    asked.add_argument("--out", type=Path, metavar="DIR", help="the folder of the run")
    asked.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="(default: smollm2-135m)")
    asked.add_argument("--minutes", type=int, metavar="M", help="stop after so many, at a finished row")
    asked.add_argument("--rows", nargs="+", metavar="ROW", help="these alone (default: all)")
    args = asked.parse_args()
    if args.what in ("run", "collect") and args.out is None:
        asked.error(f"{args.what} was given without --out, expected the run's folder: add --out DIR")
    if args.what == "run":
        try:
            run(args.model, args.out, args.rows, args.minutes)
        except InputError as error:
            sys.exit(f"error: {error}")
    elif args.what == "collect":
        collect(args.out)
    elif args.what == "sizes":
        sizes()
    elif args.what == "picture":
        write_atomic(DOCS / "field.png", picture(DATA.read()["rows"]))
    else:
        PAGE.show(args)


# --- measuring -------------------------------------------------------------------------------------------


def run(model: str, out: Path, names: Sequence[str] | None, minutes: int | None) -> None:
    """Measure the rows that `out` lacks, in order; rows with a second compression come last."""
    import kvjax
    from kvjax.commands.programs import keep_programs
    from kvjax.eval.run.perplexity import stream_text

    if wrong := [name for name in names or () if name not in ROWS]:
        raise InputError(f"{wrong[0]!r} is no row, expected some of {', '.join(ROWS)}")
    keep_programs()
    loaded = kvjax.load(model)
    about = {"model": loaded.name, "fingerprint": loaded.fingerprint, "text": TEXT.name}
    about |= {"length": LENGTH, "windows": WINDOWS}
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60 * (minutes or 0))
    for folder, again in ((out / "once", None), (out / "again", AGAIN)):
        rows = {
            n: row for n, row in ROWS.items() if n in (names or ROWS) and row.again == (again is not None)
        }
        entries = [PlannedCell(name, None, sentence(row)) for name, row in rows.items()]
        if not entries:
            continue
        log = UnitLog(folder, about, resume=(folder / "settings.json").exists())
        write_atomic(folder / ORIGIN, json.dumps({"revision": revision()}).encode())
        try:
            stream_text(
                loaded, entries, TEXT, length=LENGTH, windows=WINDOWS, chunk=again, log=log,
                console=make_console(),
            )  # fmt: skip
        except KeyboardInterrupt:
            sys.exit(f"stopped; go on with: python -m scripts.studies.field run --out {out}")
        finally:
            log.close()
    signal.alarm(0)


def collect(out: Path) -> None:
    """Merge what a run has measured so far, finished or not, into the data."""
    found = DATA.read()
    for folder in (out / "once", out / "again"):
        if not (folder / "units.jsonl").exists():
            continue
        about = json.loads((folder / "settings.json").read_text())
        if found["about"] not in ({}, about):
            sys.exit(
                f"{out} was measured as {about}, and {DATA.path} as {found['about']}: remove the file first"
            )
        found["about"] = about
        ran = json.loads((folder / ORIGIN).read_text())["revision"]
        windows: dict[str, list[Measured]] = {}
        for line in (folder / "units.jsonl").read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                for one in json.loads(line)["rows"]:
                    windows.setdefault(one["method"], []).append(one)
        found["rows"] |= {
            name: measured(name, several) | {"revision": ran} for name, several in windows.items()
        }
    found["rows"] = {name: found["rows"][name] for name in ROWS if name in found["rows"]}
    DATA.write(found)


def sizes() -> None:
    """Add the share of a bfloat16 cache's bytes to rows of the data that lack it."""
    config = of_the_board()
    full = CacheSizes(config, "bfloat16", LENGTH, [Method()]).nbytes(Method())
    for name in [name for name, row in DATA.read()["rows"].items() if "bfloat16" not in row]:
        method = sentence(ROWS[name])
        share = CacheSizes(config, "bfloat16", LENGTH, [method]).nbytes(method) / full
        DATA.change(lambda data, name=name, share=share: data["rows"][name].update(bfloat16=round(share, 4)))


def measured(name: str, windows: Sequence[Measured]) -> Measured:
    """Measure a row of the data: the method, the bytes, and KL and top-1 agreement in every window."""
    late = [one["distances"][-1] for one in windows]
    return {
        "sentence": repr(sentence(ROWS[name])),
        "kept": round(windows[0]["kept_bytes"] / windows[0]["full_bytes"], 4),
        "kl": [round(one["kl"], 6) for one in windows],
        "top1": [round(one["top1"], 4) for one in windows],
        "late": {"first": late[0]["first"], "last": late[0]["last"], "kl": [round(x["kl"], 6) for x in late]},
    }


# --- tables ----------------------------------------------------------------------------------------------


def topic_table(rows: Mapping[str, Measured], names: Sequence[str]) -> str:
    """Write the difference of each row of a topic from the full cache, and from the topic's first row."""
    if not any(name in rows for name in names):
        return LACKING
    head = f"| | bytes, % of bfloat16 | KL, nats per token | more than *{names[0]}* | same top token, % |"
    out = [head, "|---|--:|--:|--:|--:|"]
    for name in names:
        if name not in rows:
            out.append(f"| {name} | not measured yet | | | |")
            continue
        row = rows[name]
        top = f"{100 * np.mean(row['top1']):.1f}"
        more = _more(row["kl"], rows[names[0]]["kl"]) if name != names[0] and names[0] in rows else "–"
        held = f"{100 * row['bfloat16']:.1f}" if "bfloat16" in row else "–"
        out.append(f"| {name} | {held} | {_interval(row['kl'])} | {more} | {top} |")
    return "\n".join(out)


def second_table(rows: Mapping[str, Measured]) -> str:
    """KL on the same tokens after one compression, and after two."""
    if not any(f"{name}, again" in rows for name in SECOND):
        return LACKING
    out = ["| a quarter of the slots | compressed once | compressed again | more |", "|---|--:|--:|--:|"]
    for name in SECOND:
        once, again = (rows.get(x, {}).get("late", {}).get("kl") for x in (name, f"{name}, again"))
        if once is None or again is None:
            out.append(f"| {name} | not measured yet | | |")
        else:
            out.append(f"| {name} | {_interval(once)} | {_interval(again)} | {_more(again, once)} |")
    return "\n".join(out)


def question_table(lines: Sequence[Measured]) -> str:
    """How much likelier right answers are if the question is read before compression."""
    lines = [line for line in real_model.comparable(lines) if line["task"] != "cwe"]
    out = ["| method | budget | later | before | before - later |", "|---|--:|--:|--:|--:|"]
    for method, budget in real_model.cells(lines):
        cell = [line for line in lines if (line["method"], line["budget"]) == (method, budget)]
        nll = {
            protocol: {
                (line["task"], str(i)): value
                for line in cell
                if line["protocol"] == protocol
                for i, value in enumerate(line["nll"])
            }
            for protocol in ("agnostic", "aware")
        }
        later, before = (f"{np.mean([*nll[p].values()]):.3f}" for p in ("agnostic", "aware"))
        found = difference(nll["aware"], nll["agnostic"], shares=False)
        if method != "full" and found is not None:
            text = f"{found.mean:+.3f}"
            text += "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
            out.append(f"| {method} | {budget_label(budget)} | {later} | {before} | {text} |")
    return "\n".join(out)


def setting(found: Mapping[str, Any]) -> str:
    """Describe the setting: model, text and lengths."""
    about, rows = found["about"], found["rows"]
    if not rows:
        return "KL: no rows yet."
    return (
        f"KL: {about['model']} (fingerprint {about['fingerprint']}), {about['windows']} windows of "
        f"`{about['text']}`, {about['length']} tokens compressed, the 128 tokens after them fed one by one; "
        f"{len(rows)} of {len(ROWS)} rows so far."
    )


def _interval(values: Sequence[float]) -> str:
    low, high = bootstrap_interval(values)
    return f"{np.mean(values):.4f} [{low:.4f}, {high:.4f}]"


def _more(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Write the paired difference over windows, with its interval if there are enough windows."""
    named = [{("text", str(i)): value for i, value in enumerate(values)} for values in (ours, theirs)]
    found = difference(named[0], named[1], shares=False)
    assert found is not None
    text = f"{found.mean:+.4f}"
    return text if found.low is None else f"{text} [{found.low:+.4f}, {found.high:+.4f}]"


def _topic(name: str) -> str:
    return topic_table(DATA.read()["rows"], TOPICS[name])


PAGE = Page(
    "field.md",
    {
        "setting": lambda: setting(DATA.read()),
        **{name: (lambda name=name: _topic(name)) for name in TOPICS},
        "question": lambda: question_table(real_model.read()),
        "second": lambda: second_table(DATA.read()["rows"]),
    },
)

if __name__ == "__main__":
    main()
