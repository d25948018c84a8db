"""The leaderboard: all methods on the same questions; runs comparisons, makes data, page and pictures.

    python -m scripts.studies.leaderboard run --samples 100 --out boards
        # compares on every model; goes on if killed
    python -m scripts.studies.leaderboard run --methods fitted --out boards2
        # those that are fitted, to each model
    python -m scripts.studies.leaderboard run --methods gisting h2o --out boards3
        # some, fitted where need be
    python -m scripts.studies.leaderboard speed --out boards
        # times every method beside no compression
    python -m scripts.studies.leaderboard collect --out boards boards2    # what they found becomes the data
    python -m scripts.studies.leaderboard collect --out boards --add      # beside what it has of others
    python -m scripts.studies.leaderboard                                 # prints the page
    python -m scripts.studies.leaderboard --write                         # writes docs/leaderboard.md
    python -m scripts.studies.leaderboard --pictures DIR
        # draws scores against bytes, by family

The data is kvjax/eval/report/leaderboard.json; `kvjax methods ID` and claims.py read it, too. On two
cores `run` takes about 40 minutes per model with --samples 100, and the fits of another model half as much.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.cells import Cell, summarise
from kvjax.eval.report.folder import read_results
from kvjax.eval.report.leaderboard import (
    DATA,
    BoardRun,
    Leaderboard,
    Speed,
    about_of,
    leaderboard_text,
    read_leaderboard,
)
from kvjax.methods import METHODS
from scripts.docs_tables import DOCS
from scripts.fixtures import fits
from scripts.studies.leaderboard_page import page, pictures
from scripts.studies.runner import Page, parser

MODELS = tuple(sorted((DOCS.parent / "tests" / "fixtures" / "recall_seeds").glob("[0-9]")))
# The budget at which speed is measured, for methods that have one.
BUDGET = 0.25
ROWS, TOKENS, STEPS, ROUNDS = 4, 512, 16, 9


def main() -> None:
    asked = parser(__doc__, ("run", "speed", "collect"))
    asked.add_argument("--samples", type=int, default=100, metavar="N", help="contexts (default: 100)")
    asked.add_argument(
        "--methods",
        nargs="+",
        default=["all"],
        metavar="METHOD",
        help="'fitted' is those of scripts/fixtures/fits.py; these are fitted to each model (default: all)",
    )
    asked.add_argument(
        "--models", nargs="+", type=Path, default=MODELS, metavar="DIR", help="(default: 3 seeds)"
    )
    asked.add_argument(
        "--out", nargs="+", type=Path, metavar="DIR", help="where results lie; several to collect"
    )
    asked.add_argument("--add", action="store_true", help="with collect: keep other methods and models")
    asked.add_argument("--pictures", type=Path, metavar="DIR", help="where to draw scores against bytes")
    args = asked.parse_args()
    if args.what is not None and args.out is None:
        asked.error(
            f"{args.what} was given without --out, expected the folder of its results: add --out boards"
        )
    if args.what in ("run", "speed") and len(args.out) > 1:
        asked.error(f"{args.what} was given {len(args.out)} folders, and writes into one: give one --out")
    if args.what == "run":
        run(args.models, args.methods, args.samples, args.out[0])
    elif args.what == "speed":
        speed(args.models[0], args.methods, args.out[0])
    elif args.what == "collect":
        write_atomic(DATA, collect(args.models, args.out, read_leaderboard() if args.add else None).encode())
    else:
        if args.pictures is not None:
            args.pictures.mkdir(parents=True, exist_ok=True)
            for name, data in pictures(read_leaderboard()).items():
                write_atomic(args.pictures / name, data)
        PAGE.show(args)


# Those of the data, to which other methods can only be added as they were asked.
PROTOCOLS = ("agnostic", "aware-unprotected")


def run(models: list[Path], methods: list[str], samples: int, out: Path) -> None:
    """Compare on every model, each in a folder of its own; finished comparisons are not repeated."""
    from kvjax.commands.programs import keep_programs
    from kvjax.eval.compare import compare

    keep_programs()
    for model in models:
        folder = out / model.name
        if not (folder / "metrics.json").exists():
            given = fitted(model, methods, out / "fits" / model.name)
            asked = dict(samples=samples, protocols=PROTOCOLS)
            compare(model=_named(model), methods=given, **asked, out=folder, resume=folder.exists())


def fitted(model: Path, methods: list[str], folder: Path) -> list[Any]:
    """Return the methods, with fits for the model where fits.py has one; missing fits are made."""
    import kvjax
    from kvjax.grammar.fitted import shipped_for
    from kvjax.io.gin_bindings import load_preset
    from kvjax.methods.parse import parse_method

    loaded, methods = kvjax.load(str(model)), [*fits.FITS] if methods == ["fitted"] else methods
    if shipped_for(loaded.signature):
        return methods
    found: list[Any] = []
    for method in methods:
        if method not in fits.FITS:
            found.append(method)
            continue
        file = folder / f"{method}.safetensors"
        if not file.exists():
            fits.fit(loaded, method, folder)
        _, build = parse_method(f"{method}:fitted={file}", load_preset("short"))
        found.append((method, build.takes_budget, build))
    return found


def _named(model: Path) -> str:
    """Name the model in commands: its path relative to the checkout, if it is inside."""
    try:
        return str(model.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(model)


def speed(model: Path, methods: list[str], out: Path) -> None:
    """Time prefills and steps of every method, alternating with no method; resume after an interruption."""
    import jax
    import numpy as np

    import kvjax
    from kvjax.eval.run.cellplan import plan_cells

    loaded = kvjax.load(str(model))
    file = out / "speed.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    tokens = np.random.default_rng(0).integers(0, loaded.config.vocab, (ROWS, TOKENS), np.int32)

    def once(method: Any) -> tuple[float, float]:
        """Seconds of a prompt, and of STEPS tokens after it."""
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(kvjax.prefill(loaded, tokens, method=method, room=STEPS))
        middle = time.perf_counter()
        for _ in range(STEPS):
            logits, cache = kvjax.step(loaded, cache, logits.argmax(-1).astype("int32"))
        logits.block_until_ready()
        return middle - start, time.perf_counter() - middle

    entries = plan_cells(loaded, methods, [BUDGET], "short")
    full = entries[0].method
    for entry in entries:
        if entry.label in found:
            continue
        once(full), once(entry.method)  # these compile
        rounds = [(once(full), once(entry.method)) for _ in range(ROUNDS)]
        # The minimum, because other load on the machine only adds time.
        best = [[min(one[side][phase] for one in rounds) for side in (0, 1)] for phase in (0, 1)]
        found[entry.label] = dict(zip(("prefill", "decode"), best, strict=True))
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(found, indent=1).encode() + b"\n")
        (none, mine), (before, after) = best
        print(f"{entry.label}: prefill {mine / none:.2f}x, decode {before / after:.2f}x", flush=True)


def collect(models: list[Path], folders: list[Path], old: Leaderboard | None = None) -> str:
    """Write the data, from results of `run` and `speed` in folders, and from `old` for other methods.

    If several folders have a method, the first one's cells are taken.
    """
    before = {} if old is None else {str(run.about["model"]): run for run in old.runs}
    runs = dict(before)
    for model in models:
        name = f"{model.resolve().parent.name}/{model.name}"
        there = [folder / model.name for folder in folders if (folder / model.name).is_dir()]
        if not there and old is None:
            sys.exit(f"none of {', '.join(map(str, folders))} has a folder {model.name}: run it first")
        found = [_found(folder, name) for folder in there]
        if found:
            runs[name] = functools.reduce(_added, [*found, *([before[name]] if name in before else ())])
    runs = [runs[name] for name in sorted(runs)]
    fast = {} if old is None else dict(old.speed)
    for file in (folder / "speed.json" for folder in reversed(folders)):
        timed = json.loads(file.read_text()) if file.exists() else {}
        fast |= {method: Speed(*_times(**seconds)) for method, seconds in timed.items()}
    about = {
        "rows": ROWS,
        "tokens": TOKENS,
        "steps": STEPS,
        "rounds": ROUNDS,
        "budget": BUDGET,
        "model": runs[0].about["model"],
    }
    return leaderboard_text(runs, fast, about if fast else {})


def _found(folder: Path, model: str) -> BoardRun:
    found = read_results(folder)
    return BoardRun(about_of(found.metrics) | {"model": model}, tuple(summarise(found.rows)))


def _added(run: BoardRun, other: BoardRun) -> BoardRun:
    """Add to a run the cells of further methods from another run with the same questions and model."""
    mine = {cell.method for cell in run.cells}
    if mine >= {cell.method for cell in other.cells}:
        return run
    same = ("fingerprint", "samples", "length", "protocols", "seed")
    given, has = ({name: r.about[name] for name in same} for r in (run, other))
    if given != has:
        sys.exit(
            f"{run.about['model']} was asked with {given}, and {other.about['model']} of other methods with "
            f"{has}: collect those that were asked alike, without --add if it is the data that differs"
        )
    order = {id: i for i, id in enumerate(METHODS)}
    cells = sorted((*run.cells, *(c for c in other.cells if c.method not in mine)), key=_place(order))
    revisions = dict.fromkeys([*other.about["git_revision"].split(", "), run.about["git_revision"]])
    return BoardRun(other.about | {"git_revision": ", ".join(revisions)}, tuple(cells))


def _place(order: dict[str, int]) -> Callable[[Cell], tuple[str, int]]:
    """Make the sort key of a cell: protocol, then the order of methods; a method's budgets keep theirs."""
    return lambda cell: (cell.protocol, order[cell.method])


def _times(prefill: list[float], decode: list[float]) -> tuple[float, float]:
    """Compute the ratio of a method's prefill time to that without a method, and of its decode speed."""
    return round(prefill[1] / prefill[0], 3), round(decode[0] / decode[1], 3)


PAGE = Page("leaderboard.md", {"": lambda: page(read_leaderboard())})

if __name__ == "__main__":
    main()
