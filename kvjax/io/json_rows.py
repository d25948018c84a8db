"""Rows of JSON lines, or of a file that is one JSON list, with where each stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError


def json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Where a row stands in its file, and the row; of a list of texts, each as the field `text`.

    Raises InputError for a line that is no JSON, with its number.
    """
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not (text := line.strip()):
                continue
            try:
                if number == 1 and text.startswith("["):
                    for row, item in enumerate(json.loads(line + file.read()), 1):
                        yield f"row {row}", {"text": item} if isinstance(item, str) else item
                    return
                found = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, line {number} is no JSON: {error}") from error
            yield f"line {number}", found
