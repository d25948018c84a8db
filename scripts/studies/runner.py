"""Shared by all studies: arguments, data that grows row by row, child processes, and tables in docs/.

A study prints its tables; `--write` writes them into their page, and `--check` says whether the page has
them. Measurements resume: only rows that the data lacks are made.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.atomic_files import write_atomic
from scripts.docs_tables import DOCS, data_text, with_table


def parser(
    about: str | None, actions: Sequence[str] = (), seed: str | None = None, page: bool = True
) -> argparse.ArgumentParser:
    """Make a parser of an action `what`, a --seed with help `seed`, and a page's --write and --check."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if actions:
        made.add_argument("what", nargs="?", choices=actions, help="(default: print the tables)")
    if page:
        into = made.add_mutually_exclusive_group()
        into.add_argument("--write", action="store_true", help="put the tables into their page of docs/")
        into.add_argument("--check", action="store_true", help="exit with 1 where their page has others")
    if seed is not None:
        made.add_argument("--seed", type=int, default=0, help=f"{seed} (default: 0)")
    return made


def seeds(seed: int) -> list[str]:
    """Return the settings of `kvjax train` that seed the model and the data."""
    return [f"train.seed={seed}", f"data.seed={seed}"]


class Page(NamedTuple):
    """A page of docs/, and its tables by the marks around them; "" stands for the whole page."""

    name: str
    tables: Mapping[str, Callable[[], str]]

    def text(self) -> str:
        """Return the page's text as it should be."""
        path = DOCS / self.name
        text = path.read_text() if path.exists() else ""
        for mark, table in self.tables.items():
            text = with_table(text, mark, table()) if mark else table()
        return text

    def agrees(self) -> bool:
        """Whether the page has these tables."""
        return (DOCS / self.name).read_text() == self.text()

    def show(self, args: argparse.Namespace) -> None:
        """Print the tables, or do what --write or --check asks for."""
        if args.write:
            write_atomic(DOCS / self.name, self.text().encode())
        elif not args.check:
            print("\n\n".join(table().rstrip("\n") for table in self.tables.values()))
        elif not self.agrees():
            sys.exit(f"docs/{self.name} has other tables than its data gives: run this with --write")


class Data:
    """A study's data: a JSON file of docs/ whose entries down to `depth` levels have a line each."""

    def __init__(self, path: Path, empty: Mapping[str, Any] | None = None, depth: int = 2):
        self.path, self.empty, self.depth = path, empty or {}, depth

    def read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.is_file() else copy.deepcopy(dict(self.empty))

    def write(self, found: Mapping[str, Any]) -> None:
        write_atomic(self.path, (data_text(found, self.depth) + "\n").encode())

    def change(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Apply a change to the file's present data, to which another process may have added."""
        found = self.read()
        change(found)
        self.write(found)


def study(
    about: str | None, run: Callable[..., None], page: Page, model: str = "smollm2-135m", rows: bool = False
) -> None:
    """Run a study of one model, or show its page, as its arguments say.

    run: called with the loaded model, and with the rows that were asked for (or None) if `rows`.
    """
    asked = parser(about, ("run",))
    asked.add_argument("--model", default=model, metavar="MODEL", help=f"(default: {model})")
    if rows:
        asked.add_argument("--rows", nargs="+", metavar="ROW", help="(default: those that are missing)")
    args = asked.parse_args()
    if args.what != "run":
        page.show(args)
        return
    from kvjax.io.load import load

    run(load(args.model), *([args.rows] if rows else []))


def progress(names: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the names, and show the current one and their number on the terminal's last line."""
    from kvjax.eval.report.console import make_console

    todo, console = list(names), make_console()
    for i, name in enumerate(todo):
        with console.status(f"{i + 1} of {len(todo)}: {name}"):
            yield name


def apart(
    module: str, *words: str, env: Mapping[str, str] | None = None, core: int | None = None
) -> dict[str, Any] | None:
    """Run a module in a process of its own, on one core if `core` is given, and return the last JSON of it.

    None if the process fails; it prints the reason itself.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=os.environ | dict(env or {}),
        stdout=subprocess.PIPE, text=True, check=False,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def kvjax(*words: str) -> None:
    """Run a command of kvjax, and exit with its status if it fails; its output goes to standard error."""
    done = subprocess.run([sys.executable, "-m", "kvjax", *words], stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # the command has printed the reason


def train_in(folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """Train into a folder unless it has a model, resuming an interrupted run; return the log."""
    if not (folder / "model").exists():
        kvjax(*words, "--out", str(folder), *(["--resume"] if (folder / "run.json").exists() else []))
    return log_of(folder)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of a training run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
