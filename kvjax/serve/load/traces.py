"""Readers of traces of real requests: Azure's CSV, and Mooncake's JSON lines with hashes of blocks."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.serve.requests import Request

# (arrival, prompt, output) by column names, for both formats in which Azure's trace is published.
AZURE = (
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK = 512


def read_trace(path: str | Path, count: int | None = None) -> list[Request]:
    """Read at most `count` requests of a trace; the first arrives at second 0.

    .csv is Azure's (seconds, or times of day), .jsonl Mooncake's (milliseconds, and a hash for every 512
    tokens). Raises InputError, with the file, the line and the field, for another schema.
    """
    path = Path(path)
    kinds = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in kinds:
        raise InputError(f"trace {path} is neither .csv (Azure) nor .jsonl (Mooncake): name it by its form")
    try:
        with path.open(newline="") as file:
            found = list(itertools.islice(kinds[path.suffix](path, file), count))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace {path} cannot be read ({error}): give another path") from error
    if not found:
        raise InputError(f"trace {path} has no request, expected one a line")
    return found


def _azure(path: Path, file: Any) -> Iterator[Request]:
    rows = csv.DictReader(file)
    names = next((one for one in AZURE if set(one) <= set(rows.fieldnames or ())), None)
    if names is None:
        raise InputError(
            f"trace {path}, line 1: the columns are {', '.join(rows.fieldnames or ())}, expected "
            f"{', '.join(AZURE[0])} or {', '.join(AZURE[1])}"
        )
    first = None
    for id, row in enumerate(rows):
        line = rows.line_num
        at = _seconds(row[names[0]], path, line, names[0])
        first = at if first is None else first
        prompt, output = (_whole(row[name], path, line, name) for name in names[1:])
        yield Request(id, _after(at - first, path, line, names[0]), prompt, output)


def _mooncake(path: Path, file: Any) -> Iterator[Request]:
    first = None
    for id, text in enumerate(file):
        line = id + 1
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict) or (missing := [name for name in MOONCAKE if name not in row]):
            what = f"has no field {missing[0]!r}" if isinstance(row, dict) else "is no JSON object"
            raise InputError(f"trace {path}, line {line} {what}, expected {', '.join(MOONCAKE)}")
        at = _seconds(row["timestamp"], path, line, "timestamp") / 1e3
        first = at if first is None else first
        prompt, output = (_whole(row[name], path, line, name) for name in MOONCAKE[1:3])
        keys = row["hash_ids"]
        if not isinstance(keys, list) or len(keys) != -(-prompt // MOONCAKE_BLOCK):
            raise InputError(
                f"trace {path}, line {line}: hash_ids does not have one id for every {MOONCAKE_BLOCK} of "
                f"{prompt} tokens"
            )
        yield Request(
            id, _after(at - first, path, line, "timestamp"), prompt, output, tuple(keys), MOONCAKE_BLOCK
        )


def _seconds(value: Any, path: Path, line: int, field: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        try:
            # Azure's times have seven decimals, of which Python parses six.
            return datetime.fromisoformat(str(value)[:26]).timestamp()
        except ValueError:
            number = math.nan
    if not math.isfinite(number):
        raise InputError(f"trace {path}, line {line}: {field} is {value!r}, expected a time")
    return number


def _after(seconds: float, path: Path, line: int, field: str) -> float:
    if seconds < 0:
        raise InputError(f"trace {path}, line {line}: {field} is before the first request's, expected later")
    return seconds


def _whole(value: Any, path: Path, line: int, field: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, float):
        raise InputError(
            f"trace {path}, line {line}: {field} is {value!r}, expected a whole number from 1 up"
        )
    return number
