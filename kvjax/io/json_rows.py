"""Rows of a JSON lines file, or of a file with one JSON list, with their locations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvjax.base.errors import InputError


def json_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Each row's location in the file, and the row; texts in a list become the field `text`.

    Raises InputError for a line that is not JSON, with its number.
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
