"""Training texts: files through the `datasets` library, or the source of Python's standard library.

A text is held out by a hash of its content, so the choice is the same on every machine and in every order.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvjax.base.errors import InputError
from kvjax.io.json_rows import json_rows
from kvjax.train.settings import Data

BOM = "\ufeff"


@runtime_checkable
class TextSource(Protocol):
    """Texts by number; those of `datasets` stay on disk until they are used."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class Column:
    """The texts of one column of a data set, without byte order marks. empty: how many rows are skipped."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset, name
        self.rows = np.flatnonzero(~_empty(dataset.data.column(name)))
        self.empty = len(dataset) - len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        return self.dataset[int(self.rows[index])][self.name].removeprefix(BOM)


class Files:
    """Files of UTF-8 text, read on demand. empty: how many files are skipped."""

    def __init__(self, paths: Sequence[Path], empty: int = 0):
        self.paths, self.empty = paths, empty

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return self.paths[index].read_text(encoding="utf-8-sig")


def read_texts(data: Data) -> TextSource:
    """Read the texts that a run's settings name; empty ones are counted and skipped.

    Raises InputError if a file is missing or not UTF-8 (with its line), if a row lacks the field (with its
    line), if a pattern matches no file, and if all texts are empty.
    """
    if data.kind == "python":
        return Files(standard_library())
    paths = [path for name in data.files for path in _named(name)]
    full = [path for path in paths if _holds_text(path, data.kind)]
    if not full:
        raise InputError(f"{', '.join(map(str, paths[:4]))} is empty: there is nothing to train on")
    if data.kind == "text":
        return Files(full, len(paths) - len(full))
    dataset = _dataset(data.kind, full, data.field)
    names = dataset.column_names
    if data.field not in names:
        raise InputError(
            f"{full[0]} has no field {data.field!r}, only {', '.join(names)}: set data.field to one of them"
        )
    _check_rows(dataset, data.field, full, data.kind)
    texts = Column(dataset, data.field)
    if not len(texts):
        raise InputError(f"{full[0]}: the field {data.field!r} holds no texts")
    return texts


def _empty(column: Any) -> np.ndarray:
    import pyarrow
    import pyarrow.compute

    nothing = pyarrow.array(["", BOM], column.type)
    found = pyarrow.compute.is_in(column, value_set=nothing)  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(found.to_numpy())


def _check_rows(dataset: Any, field: str, paths: Sequence[Path], kind: str) -> None:
    """Raise InputError, with file and line, for the first row whose field is missing, null or not text."""
    import pyarrow

    column = dataset.data.column(field)
    texts = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
    if texts and not column.null_count:
        return
    for row in range(len(dataset)):
        value = dataset[row][field]
        if not isinstance(value, str):
            raise InputError(f"{_row_of(paths, kind, row)}: {_no_text(field, value)}")
    raise InputError(f"{paths[0]}: the field {field!r} is of {column.type}, expected texts")


def _no_text(field: str, value: Any) -> str:
    said = "is null or missing" if value is None else f"is {str(value)[:40]!r}, no text"
    return f"the field {field!r} {said}: give every row a text, or remove the row"


def _row_of(paths: Sequence[Path], kind: str, row: int) -> str:
    """Name the file that holds a row, counted over all files, and the number of the row in that file."""
    if kind != "parquet":
        return f"{paths[0]}, row {row + 1}"
    import pyarrow.parquet

    for path in paths:
        count = pyarrow.parquet.ParquetFile(path).metadata.num_rows
        if row < count:
            break
        row -= count
    return f"{path}, row {row + 1}"


def json_texts(
    paths: Sequence[str], field: str, stamps: Sequence[tuple[int, int]]
) -> Iterator[dict[str, str]]:
    """Yield the field of every row of JSON lines, or of a file that is one list; other fields are ignored.

    stamps: size and time of each file, so that `datasets` does not use its cache of an older version.
    Raises InputError for the first row that is no JSON, or whose field is no text, with its file and line.
    """
    for path in paths:
        for place, row in json_rows(path):
            if not isinstance(row, dict):
                said = json.dumps(row)[:40]
                raise InputError(f"{path}, {place} is {said}, expected an object with {field!r}")
            if field not in row and place in ("line 1", "row 1"):
                raise InputError(
                    f"{path} has no field {field!r}, only {', '.join(row)}: set data.field to one of them"
                )
            if not isinstance(value := row.get(field), str):
                raise InputError(f"{path}, {place}: {_no_text(field, value)}")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{path}, {place} holds half of a pair of surrogates: correct its text"
                ) from error
            yield {field: value}


def standard_library() -> list[Path]:
    """List Python's standard library modules, without its tests (Python Software Foundation licence)."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__"}
    found = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    return sorted(p for p in found if p.stat().st_size and _is_utf8(p))


def is_held_out(text: str, share: float) -> bool:
    """Whether a text belongs to the share that is never trained on."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < share * 2**64


def _dataset(kind: str, paths: Sequence[Path], field: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"data.kind {kind!r} needs datasets: pip install 'kvjax[train]'") from error
    # The library logs the errors that it also raises.
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    files = [str(p) for p in paths]
    try:
        if kind == "json":
            # The library's own reader guesses the types of all fields from the first rows; it then refuses a
            # file, or rewrites a text, whose values look like times.
            stamps = [(stat.st_size, stat.st_mtime_ns) for stat in (p.stat() for p in paths)]
            return datasets.Dataset.from_generator(
                json_texts,
                features=datasets.Features({field: datasets.Value("string")}),
                gen_kwargs={"paths": files, "field": field, "stamps": stamps},
            )
        return datasets.load_dataset(kind, data_files=files, split="train")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, InputError):
            raise cause from None
        # The library's exceptions differ by file format; the first line of the message has the reason.
        said = str(cause).splitlines()[0]
        raise InputError(f"{', '.join(files)} cannot be read as {kind}: {said}") from error
    finally:
        datasets.logging.set_verbosity(before)


def _named(name: str) -> list[Path]:
    """List the files that an entry of `data.files` names: one path, or the sorted matches of a pattern."""
    if Path(name).is_file() or not glob.has_magic(name):
        return [Path(name)]
    matched = [Path(found) for found in sorted(glob.glob(name, recursive=True))]
    files = [path for path in matched if path.is_file()]
    if not files:
        raise InputError(f"data.files has the pattern {name!r}, which matches no file: see from which folder")
    return files


def _holds_text(path: Path, kind: str) -> bool:
    """Whether a file is not empty. Raises InputError if it is missing, or not UTF-8 text."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: data.files names what is read, from the current folder")
    if kind == "parquet":
        return bool(path.stat().st_size)
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}, line {number} is not UTF-8 ({error.reason} at byte {error.start}): convert the "
                    "file, for example with iconv"
                ) from error
            if "\0" in text:
                raise InputError(
                    f"{path}, line {number} holds the character 0, as UTF-16 and binary files do: give UTF-8"
                )
            found = found or text not in ("", BOM)
    return found


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
