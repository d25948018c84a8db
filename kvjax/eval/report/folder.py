"""Reads a results folder: its rows, and metrics.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.eval.report.figures import Timings

_ROW = ("id", "method", "budget", "kept_bytes", "full_bytes", "read_bytes")
_KINDS: dict[str, tuple[str, ...]] = {"text": (*_ROW, "nll", "full_nll", "kl", "top1", "tokens")}
_KINDS["questions"] = (*_ROW, "task", "protocol", "score", "span_kept")
_NEXT = "give the --out of a finished `kvjax compare`"


class Results(NamedTuple):
    """The files of a finished comparison: lines of results.jsonl, and metrics.json."""

    rows: list[dict[str, Any]]
    metrics: dict[str, Any]

    @property
    def of_text(self) -> bool:
        """Whether a text was predicted, instead of questions answered."""
        return "text" in self.metrics

    @property
    def timings(self) -> Timings:
        """The timings, by method and budget."""
        names = ("prefill_ms", "decode_tokens_per_s")
        cells = self.metrics.get("cells", [])
        return {
            (cell["method"], cell["budget"]): {k: v for k, v in cell.items() if k.startswith(names)}
            for cell in cells
        }


def read_results(folder: str | Path) -> Results:
    """Read the results of a finished comparison; InputError if there are none, or they cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: {_NEXT}")
    lines, told = folder / "results.jsonl", folder / "metrics.json"
    if (folder / "units.jsonl").exists() and not lines.exists():
        raise InputError(
            f"the run in {folder} is not finished: go on with the same `kvjax compare` and --resume"
        )
    try:
        metrics = json.loads(told.read_bytes())
        rows = [json.loads(line) for line in lines.read_bytes().splitlines()]
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read ({error.strerror}): {_NEXT}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"results.jsonl or metrics.json of {folder} holds no JSON: {_NEXT}") from error
    if not isinstance(metrics, dict):
        raise InputError(f"{told} does not describe a comparison: {_NEXT}")
    needed = {*_KINDS["text" if "text" in metrics else "questions"]}
    if not rows or not all(isinstance(row, dict) and row.keys() >= needed for row in rows):
        raise InputError(f"{lines} holds other lines than a comparison's: {_NEXT}")
    return Results(rows, metrics)
