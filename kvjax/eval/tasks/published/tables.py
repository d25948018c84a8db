"""Rows of JSONL, JSON and parquet files; errors about a field name its file and row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.io.json_rows import json_rows

KINDS = (".parquet", ".jsonl", ".json")
# How many rows of a parquet file are in memory at once: a row can be megabytes long.
_ROWS = 16


class TableRow(NamedTuple):
    """One row: `where` names its file and place, as in "data.parquet row 17"."""

    where: str
    data: Mapping[str, Any]
    file: Path

    def text(self, field: str, default: str | None = None) -> str:
        """Read a field that is a text; InputError for any other, and for a missing one without `default`."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(field, "a text")
        return value

    def filled(self, field: str) -> str:
        """Read a field that is a text and not empty."""
        if not (value := self.text(field)).strip():
            raise self.wrong(field, "a text that is not empty")
        return value

    def texts(self, field: str) -> tuple[str, ...]:
        """Read a field that is a list of texts or numbers, or one of them; InputError if it is empty."""
        value = self.data.get(field)
        items = value if isinstance(value, list | tuple) else [value]
        if not items or not all(isinstance(x, str | int | float) and str(x).strip() for x in items):
            raise self.wrong(field, "a text or a list of texts, none of them empty")
        return tuple(map(str, items))

    def whole(self, field: str, least: int = 1) -> int:
        """Read a field that is a whole number."""
        value = self.data.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise self.wrong(field, "a whole number")
        if value < least:
            raise self.wrong(field, f"a whole number of at least {least}")
        return int(value)

    def rows(self, field: str) -> list[TableRow]:
        """Read a field that is a list of objects, as rows."""
        value = self.data.get(field)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(x, dict) for x in value):
            raise self.wrong(field, "a list of objects")
        return [TableRow(f"{self.where}, {field} {i}", x, self.file) for i, x in enumerate(value, 1)]

    def wrong(self, field: str, expected: str) -> InputError:
        """Make the error about a field: its value, and the expected one."""
        if field not in self.data:
            there = ", ".join(self.data) or "none"
            return InputError(
                f"{self.where}: field {field!r} is missing; expected {expected} (its fields: {there})"
            )
        return InputError(f"{self.where}: field {field!r} is {self.data[field]!r:.60}; expected {expected}")


def read_rows(file: Path) -> Iterator[TableRow]:
    """Yield the rows of a file, one after the other; InputError if it cannot be read, or holds none."""
    places = _parquet(file) if file.suffix == ".parquet" else json_rows(str(file))
    row = None
    try:
        for place, data in places:
            row = TableRow(f"{file} {place}", data, file)
            if not isinstance(data, dict):
                raise InputError(f"{row.where} is {data!r:.40}, expected an object with fields")
            yield row
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read ({error}): expected JSON in UTF-8, or parquet") from error
    if row is None:
        raise InputError(f"{file} is empty, expected at least one row")


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(f"{file} needs the package pyarrow: pip install 'kvjax[eval]'") from error
    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_ROWS):
                for data in batch.to_pylist():
                    number += 1
                    yield f"row {number}", data
    except pyarrow.ArrowException as error:
        said = str(error).splitlines()[0]
        raise InputError(f"{file} cannot be read as parquet ({said}): fetch it again") from error


def files_of(path: Path) -> list[Path]:
    """List the file, or the tables of a folder in order; hidden folders are skipped."""
    if path.is_file():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix in KINDS and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    # JSON files beside tables describe them.
    return [file for file in found if file.suffix != ".json"] or found
