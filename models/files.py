"""Files of a checkpoint directory: JSON, safetensors, and directories that appear whole or not at all.

Safetensors are read here rather than through the library of that name: a memory map gives any rows of a
tensor in any dtype without a copy, which is what sharded loading wants, and a file cut short is noticed
before anything is read. What the tensors mean is the business of `hf.py`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.errors import InputError

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
_LONGEST_HEADER = 10**8  # the format's own limit: beyond it the file is something else
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def check_folder(path: str | os.PathLike[str]) -> Path:
    """`path` as an existing, readable directory.

    Raises InputError where it is missing, is a file, or may not be read.
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
    """The JSON object in a file; InputError names the file and the place where it is broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error}): fetch or write the file again") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a JSON {type(data).__name__}, expected an object")
    return data


# --- safetensors -------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    code: str
    shape: tuple[int, ...]
    offset: int

    def array(self) -> np.ndarray:
        """The tensor as a read-only memory map."""
        return np.memmap(self.file, np.dtype(DTYPES[self.code]), "r", self.offset, self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Name, dtype, shape and place of every tensor in a safetensors file, checked against the file's size.

    Raises InputError where the file is missing, no safetensors file, or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        header, start = _json_header(path, size)
        header.pop("__metadata__", None)
        spans = {name: (int(a), int(b)) for name, e in header.items() for a, b in [e["data_offsets"]]}
        stored = {
            n: Stored(path, e["dtype"], tuple(e["shape"]), start + spans[n][0]) for n, e in header.items()
        }
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no safetensors file (its header is broken): fetch it again") from error
    expected = start + max((stop for _, stop in spans.values()), default=0)
    if size < expected:
        raise InputError(_truncated(path, size, str(expected)))
    for name, tensor in stored.items():
        width = np.dtype(DTYPES[tensor.code]).itemsize if tensor.code in DTYPES else None
        if width is not None and math.prod(tensor.shape) * width != spans[name][1] - spans[name][0]:
            raise InputError(f"{path} is broken: {name} has another size than its shape says; fetch it again")
    return stored


def _json_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """(the JSON at the start of a safetensors file, where its data start)."""
    with open(path, "rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise InputError(
                f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder"
            )
        if len(start) < 8:
            raise InputError(_truncated(path, size, "at least 8"))
        length = int.from_bytes(start, "little")
        if length <= size - 8:
            return json.loads(file.read(length)), 8 + length
        if length > _LONGEST_HEADER:
            raise ValueError("not the length of a header")
        raise InputError(_truncated(path, size, f"at least {8 + length}"))


def _truncated(path: Path, size: int, expected: str) -> str:
    return f"{path} is truncated: {size} bytes, its header says {expected}: fetch the file again"


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Any, fetch: Callable) -> None:
    """Writes the tensors `fetch(name) -> array` one by one, so that no second copy of them all is needed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    dtype, offset = np.dtype(dtype), 0
    for name, shape in shapes.items():
        stop = offset + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # readers map the data, which must be aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            array = np.ascontiguousarray(fetch(name), dtype)
            if array.shape != shape:
                raise ValueError(f"{name} should be {shape}, got {array.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)


# --- writing a directory -----------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike[str], marker: str) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block ends, or vanishes when it raises.

    An existing `path` is replaced if it is empty or holds the file `marker` (an older save of the same kind).
    Raises InputError where it holds something else or cannot be written.
    """
    target = Path(path).absolute()
    if target.exists() and not (target / marker).is_file() and (target.is_file() or any(target.iterdir())):
        raise InputError(f"{target} exists and holds no {marker}: give a new or empty directory to write to")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise InputError(f"{target} cannot be written ({error.strerror}): choose another place") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        old = temporary.with_name(temporary.name + ".old")
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
