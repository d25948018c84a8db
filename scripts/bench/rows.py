"""Shared by the parts of the accelerator benchmark: rows that survive a kill, and a deadline."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvjax.base.atomic_files import write_atomic

KEY = ("part", "side", "name", "tokens", "batch", "device", "smoke")


class Rows:
    """Measured rows in a file, one JSON object per line, written as they are measured."""

    def __init__(self, path: str):
        self.path = Path(path)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        # A kill may have cut off the last line: that row is measured again.
        whole = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in whole]
        if text and not text.endswith("\n"):
            self.path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")

    def has(self, **key: Any) -> bool:
        return any(all(r.get(k) == key.get(k) for k in KEY) for r in self.rows)

    def drop(self, **key: Any) -> None:
        """Remove the rows that match all of these fields."""
        self.rows = [r for r in self.rows if any(r.get(k) != v for k, v in key.items())]
        write_atomic(self.path, "".join(json.dumps(r) + "\n" for r in self.rows).encode())

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        told = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in row.items()
            if k not in ("device", "smoke", "versions")
        )
        print(f"  {told}", flush=True)


class Deadline:
    """When to stop: a row starts only if one as long as the row before it would finish in time."""

    def __init__(self, at: float, first: float):
        """first: the expected seconds of the first row."""
        self.at, self.expected, self.left_out = at, first, []

    def run(self, what: str, row: Callable[[], None]) -> None:
        """Run the row if there is time. A failure is printed, and the other rows still run."""
        start = time.time()
        if start + self.expected > self.at:
            self.left_out.append(what)
            return
        try:
            row()
        except Exception as error:
            print(f"  {what} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        self.expected = time.time() - start

    def report(self) -> None:
        if self.left_out:
            print(f"  left out for time: {'; '.join(self.left_out)}", flush=True)


def child_arguments() -> argparse.Namespace:
    """Return the arguments that the parent process passes to a part that runs in its own process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--rows", required=True)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()
