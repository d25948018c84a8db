"""Texts to train on: files through the `datasets` library, or the source of Python's standard library.

A text is held out by a hash of what it says, so the choice is the same on every machine and in every order.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvjax.errors import InputError
from kvjax.train.settings import Data


@runtime_checkable
class Texts(Protocol):
    """Texts by number; those of `datasets` stay on disk until they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str: ...


class Column:
    """One column of a data set."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> str:
        return self.dataset[index][self.name]


class Files:
    """Files of UTF-8 text, read when they are asked for."""

    def __init__(self, paths: Sequence[Path]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        return self.paths[index].read_text(encoding="utf-8")


def read_texts(data: Data) -> Texts:
    """The texts that a run's settings name.

    Raises InputError where a file is missing, empty or not UTF-8 (with its line), lacks the field, or where a
    pattern matches no file.
    """
    if data.kind == "python":
        return Files(standard_library())
    paths = [path for name in data.files for path in _named(name)]
    for path in paths:
        _check_file(path, binary=data.kind == "parquet")
    if data.kind == "text":
        return Files(paths)
    texts = Column(_dataset(data.kind, paths), data.field)
    names = texts.dataset.column_names
    if data.field not in names:
        raise InputError(
            f"{paths[0]} has no field {data.field!r}, only {', '.join(names)}: set data.field to one of them"
        )
    if not len(texts) or not isinstance(texts[0], str):
        raise InputError(f"{paths[0]}: the field {data.field!r} holds no texts")
    return texts


def standard_library() -> list[Path]:
    """The modules of Python's standard library, without its tests (Python Software Foundation licence)."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__"}
    found = [p for p in root.rglob("*.py") if not left_out & set(p.relative_to(root).parts)]
    return sorted(p for p in found if p.stat().st_size and _is_utf8(p))


def is_held_out(text: str, share: float) -> bool:
    """Whether a text belongs to the share that is never trained on."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return number < share * 2**64


def _dataset(kind: str, paths: Sequence[Path]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(f"data.kind {kind!r} needs datasets: pip install 'kvjax[train]'") from error
    # The library logs what it also raises.
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return datasets.load_dataset(kind, data_files=[str(p) for p in paths], split="train")
    except Exception as error:
        # What the library raises depends on the form of the file; its first line says what is wrong.
        cause = str(error.__cause__ or error).splitlines()[0]
        raise InputError(f"{', '.join(map(str, paths))} cannot be read as {kind}: {cause}") from error
    finally:
        datasets.logging.set_verbosity(before)


def _named(name: str) -> list[Path]:
    """The files that a name of `data.files` stands for: itself, or in their order those that it matches."""
    if Path(name).is_file() or not glob.has_magic(name):
        return [Path(name)]
    matched = [Path(found) for found in sorted(glob.glob(name, recursive=True))]
    files = [path for path in matched if path.is_file()]
    if not files:
        raise InputError(f"data.files has the pattern {name!r}, which matches no file: see from which folder")
    return files


def _check_file(path: Path, binary: bool) -> None:
    if not path.is_file():
        raise InputError(f"there is no file {path}: data.files names what is read, from the current folder")
    if not path.stat().st_size:
        raise InputError(f"{path} is empty: there is nothing to train on")
    if binary:
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}, line {number} is not UTF-8 ({error.reason} at byte {error.start}): convert the "
                    "file, for example with iconv"
                ) from error


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
