"""Files of a checkpoint directory: JSON, safetensors, and atomic writes of directories.

`hf.py` says what the tensors mean.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.base.atomic_files import disk_says
from kvjax.base.errors import InputError
from kvjax.hosts.messages import by_first, is_first, wait_for_all
from kvjax.models.small_floats import SMALL_FLOATS, SmallFloats

DTYPES = ("F64", "F32", "F16", "BF16")
"""What parameters are stored in, by their names in safetensors."""

# How many rows of a tensor are in memory at once when two are compared.
_ROWS = 256

# The library's messages for a file that ends too early.
_ENDS_EARLY = ("header too small", "invalid header length", "not fully covered")


def check_folder(path: str | os.PathLike[str]) -> Path:
    """`path` as an existing, readable directory.

    Raises InputError if it is missing, is a file, or may not be read.
    """
    folder = Path(path)
    try:
        if folder.is_file():
            raise InputError(f"{folder} is a file, expected a model directory: pass {folder.parent} instead")
        if not folder.is_dir():
            raise InputError(f"{folder} does not exist, expected a model directory")
        next(folder.iterdir(), None)
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): check its permissions") from error
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; InputError names the file and the place of an error."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): fetch or write the file again") from error
    except RecursionError as error:
        raise InputError(f"{path} nests its JSON too deeply: fetch or write the file again") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


def plain_name(name: Any, by: Path, field: str) -> str:
    """Return the name of a file beside `by`, which names it. InputError for a path or anything but a name."""
    if isinstance(name, str) and re.fullmatch(r"[^/\\\0:]{1,255}", name) and name.strip(". "):
        return name
    raise InputError(
        f"{field} in {by} names the file {name!r:.80}, expected the plain name of one beside it: fetch "
        f"{by.name} again"
    )


# --- safetensors -------------------------------------------------------------------------------------


class Opened(Protocol):
    """An open file of tensors; indexing a tensor takes a tuple of slices."""

    def get_slice(self, name: str) -> Any: ...


class Stored(NamedTuple):
    """A tensor in an open file (safetensors, or GGUF decoded): its name there, dtype and shape.

    Its numbers are not read yet.
    """

    path: Path
    file: Opened
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, *index: slice) -> np.ndarray:
        """Copy the piece given by one slice (step 1) per leading dimension; no other rows are read."""
        spans = [s.indices(n) for s, n in zip(index, self.shape, strict=False)]
        return self.file.get_slice(self.name)[tuple(slice(start, stop) for start, stop, _ in spans)]

    def equals(self, other: Stored) -> bool:
        """Whether another tensor has this one's shape and numbers; read a few rows at a time."""
        if self.shape != other.shape:
            return False
        rows = self.shape[0] if self.shape else 1
        spans = (slice(i, min(i + _ROWS, rows)) for i in range(0, rows, _ROWS))
        return all(np.array_equal(self.read(span), other.read(span)) for span in spans)


def save_safetensors(
    arrays: dict[str, np.ndarray], path: str | os.PathLike[str], metadata: dict[str, str]
) -> None:
    """Write one safetensors file with the permissions that any new file of this user gets.

    The library's own writer creates files that only the user can read.
    """
    Path(path).touch()
    mode = os.stat(path).st_mode
    save_file(arrays, path, metadata)
    os.chmod(path, mode)


def open_safetensors(path: Path) -> safe_open:
    """Open a safetensors file whose header fits its size.

    Raises InputError if it is missing, is something else, or was cut short.
    """
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise InputError(_damage(path, str(error))) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def read_header(path: Path) -> dict[str, Stored]:
    """Type, shape and place of every tensor of a safetensors file, by name; nothing is read until asked for.

    Raises InputError as `open_safetensors` does.
    """
    file, small = open_safetensors(path), SmallFloats(path)
    found = ((name, file.get_slice(name)) for name in file.keys())
    return {
        n: Stored(path, small if kind in SMALL_FLOATS else file, n, kind, tuple(piece.get_shape()))
        for n, piece in found
        for kind in (piece.get_dtype(),)
    }


def first_bytes(path: Path) -> bytes:
    """Read the first 8 bytes of a file of weights; InputError for an unreadable one or a Git LFS pointer."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if start == b"version ":
        raise InputError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
    return start


def _damage(path: Path, why: str) -> str:
    first_bytes(path)
    if any(text in why for text in _ENDS_EARLY):
        size = path.stat().st_size
        return f"{path} is truncated: {size} bytes, its header says otherwise: fetch the file again"
    return (
        f"{path} is no safetensors file, or a damaged one ({why.rpartition('header: ')[2]}): fetch it again"
    )


# --- writing a directory -----------------------------------------------------------------------------


# The files of a saved model; a folder with any other file is not replaced.
_OURS = re.compile(
    r"config\.json|generation_config\.json|tokenizer(_config)?\.json|special_tokens_map\.json|"
    r"chat_template\.jinja|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|kvjax\.json|params"
)


@contextlib.contextmanager
def atomic_folder(
    path: str | os.PathLike[str], marker: str, together: bool = False, overwrite: bool = False
) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `path` when the block ends, or removed if it raises.

    An existing `path` is replaced if it is empty, or with `overwrite` if it is an older save of the same
    kind, which has the file `marker`. together: whether all hosts write to it, in a folder that they share.
    Raises InputError if it holds something else or cannot be written.
    """
    target = Path(path).absolute()
    begin = partial(_begun, target, marker, overwrite)
    temporary = Path(by_first(begin) if together else begin())
    mine = is_first() or not together
    try:
        yield temporary
        if together:
            wait_for_all()
        if mine:
            _put(temporary, target, marker, overwrite)
        if together:
            wait_for_all()
    except BaseException as error:
        if mine:
            shutil.rmtree(temporary, ignore_errors=True)
        # Orbax, safetensors and tokenizers raise classes of their own.
        if isinstance(error, Exception) and (cause := disk_says(error)) is not None:
            raise InputError(
                f"the model could not be written to {target} ({cause}): free some space, or choose another "
                "place"
            ) from error
        raise


def check_replaceable(path: str | os.PathLike[str], marker: str, overwrite: bool = False) -> None:
    """Raise InputError if a model may not be written to `path`, because something there would be lost."""
    target = Path(path).absolute()
    names = _names_in(target)
    if names == []:
        return
    if names is None or marker not in names:
        raise InputError(f"{target} exists and holds no {marker}: give a new or empty directory to write to")
    if not overwrite:
        raise InputError(
            f"{target} holds a model, which is not replaced unasked: give a new directory, or say "
            "overwrite=True (--overwrite)"
        )
    if others := [name for name in names if not _OURS.fullmatch(name)]:
        raise InputError(
            f"{target} holds {', '.join(others[:3])} beside a model, which would be lost: move it away, or "
            "give a new directory"
        )


def _names_in(target: Path) -> list[str] | None:
    """List the names in a folder; empty if it does not exist, and None if it is not a folder.

    Another call may replace the folder meanwhile: then the new one is listed.
    """
    while True:
        try:
            before = target.stat().st_ino
            names = sorted(os.listdir(target))
            if target.stat().st_ino == before:
                return names
        except FileNotFoundError:
            if not os.path.lexists(target):
                return []
            if target.is_symlink():
                return None
        except NotADirectoryError:  # the path, or a folder above it, is a file
            return None if os.path.lexists(target) else []
        except OSError as error:
            raise InputError(f"{target} cannot be read ({error.strerror}): choose another place") from error


def _begun(target: Path, marker: str, overwrite: bool) -> str:
    """Make a new folder beside a target that may be replaced."""
    check_replaceable(target, marker, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(target)
        temporary.mkdir()
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}): choose another place") from error
    return str(temporary)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")


def _put(temporary: Path, target: Path, marker: str, overwrite: bool) -> None:
    """Rename a complete folder to its target, then remove the older one; on failure the older one stays."""
    while True:
        old = None
        if target.exists():
            check_replaceable(target, marker, overwrite)
            old = _beside(target)
            with contextlib.suppress(FileNotFoundError):  # another call was first
                target.rename(old)
        try:
            temporary.rename(target)
        except OSError as error:
            # Another call's complete folder, which is replaced in turn.
            there = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            if not there and old is not None and old.exists():
                old.rename(target)
            if not there:
                raise
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        if not temporary.exists():
            return
