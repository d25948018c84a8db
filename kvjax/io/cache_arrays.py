"""The arrays of a saved cache: in one file, or in one part per process if several hold it.

A part has the pieces of arrays that its process holds, each with its place in the whole array; of replicated
pieces, the first process writes one. The main file then has no arrays: it names its parts, and is written
when all of them are on disk. Every file has a digest of each array and one of its metadata, so that a flipped
bit is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from kvjax.base.atomic_files import atomic_path
from kvjax.base.errors import InputError
from kvjax.hosts.arrays import from_pieces
from kvjax.hosts.messages import by_first, count, is_first, number_of, wait_for_all
from kvjax.io.entropy_coding import coded, decoded
from kvjax.models.files import open_safetensors, save_safetensors

# Dtypes that safetensors' numpy API can read; others are written as bytes.
_PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32")
_PART = r"\.[0-9a-f]{8}\.\d+-of-\d+"
_SEAL = "checksum"
# Start and stop along every axis.
Span = list[list[int]]


@runtime_checkable
class Readable(Protocol):
    """Arrays that are read by name, piece by piece."""

    def read(self, name: str, dtype: Any, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray: ...


class SavedArrays:
    """The arrays of a saved cache by name, read piece by piece.

    path: the file; parts: names of the files that hold them, none if the file itself does. Raises InputError
    if one is missing or truncated.
    """

    def __init__(self, path: Path, parts: Sequence[str]):
        self._whole = None if parts else _File(path)
        self._pieces: dict[str, list[tuple[Span, _File, str]]] = {}
        for part in parts:
            if not (path.parent / part).is_file():
                raise InputError(
                    f"{path} lacks its part {part}: put all {len(parts)} parts beside it, as they were saved"
                )
            file = _File(path.parent / part)
            for name, span in json.loads(file.metadata["pieces"]).items():
                self._pieces.setdefault(name.partition("@")[0], []).append((span, file, name))

    def read(self, name: str, dtype: Any, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        """Read the piece `index` of an array, a copy.

        Raises KeyError if the file lacks a part of it, InputError if its digest is wrong.
        """
        wanted = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        if self._whole is not None:
            slices = tuple(slice(*span) for span in wanted)
            return np.array(self._whole.read(name).view(dtype).reshape(shape)[slices])
        pieces = self._pieces[name]
        if sum(_size(span) for span, _, _ in pieces) < _size(wanted):
            raise KeyError(f"parts of {name}")
        out, filled = np.empty([stop - start for start, stop in wanted], dtype), 0
        for span, file, piece in pieces:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(span, wanted, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            value = file.read(piece).view(dtype).reshape([stop - start for start, stop in span])
            inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, span, strict=True))
            place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
            out[place] = value[inside]
            filled += value[inside].size
        if filled < out.size:
            raise KeyError(f"parts of {name}")
        return out

    def whole(self, name: str) -> np.ndarray:
        """Return an array of the file itself, as it is there. KeyError if it has none of that name."""
        if self._whole is None:
            raise KeyError(name)
        return self._whole.read(name)


class _File:
    """A safetensors file; the digest of every array is checked when it is read."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open_safetensors(path)
        self.metadata = check_seal(path, self._file.metadata() or {})
        self._digests = json.loads(self.metadata["arrays"])
        self._coded = json.loads(self.metadata.get("coded", "{}"))
        self._checked: set[str] = set()

    def read(self, name: str) -> np.ndarray:
        value = self._file.get_tensor(name)
        if name in self._coded:
            value = self._decoded(name, value)
        if name not in self._checked and self._digests[name] != _digest(value):
            raise InputError(f"{self.path} is damaged: {name} is not what was saved: copy or save it again")
        self._checked.add(name)
        return value

    def _decoded(self, name: str, data: np.ndarray) -> np.ndarray:
        try:
            return _plain(decoded(data, self._coded[name]))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self.path} is damaged: {name} cannot be decoded: copy or save it again"
            ) from error


def sealed(metadata: dict[str, str]) -> dict[str, str]:
    """Metadata with a digest of itself."""
    plain = {name: value for name, value in metadata.items() if name != _SEAL}
    return plain | {_SEAL: hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def check_seal(path: Path, metadata: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a file. InputError if its digest is wrong."""
    if sealed(metadata) != metadata:
        raise InputError(f"{path} is damaged: its header is not what was saved: copy or save it again")
    return metadata


def check_parts(path: Path, parts: Any) -> list[str]:
    """Return the names of a cache's parts, plain names of files beside it. InputError for anything else."""
    if isinstance(parts, list) and all(
        isinstance(part, str) and re.fullmatch(rf"[^/\\\0]+{_PART}", part) for part in parts
    ):
        return parts
    raise InputError(
        f"{path} names parts that are no files of a cache beside it: it was not written by kvjax.save_cache"
    )


def write_arrays(
    path: Path, arrays: dict[str, Any], metadata: dict[str, str], coder: str | None = None
) -> None:
    """Write the arrays to one file, atomically. coder: compresses them.

    Raises InputError if the file cannot be written.
    """
    before = _parts_of(path)
    _write(path, {name: np.ascontiguousarray(x) for name, x in arrays.items()}, metadata, coder)
    _remove(path, before)


def write_parts(
    path: Path, arrays: dict[str, jax.Array], metadata: dict[str, str], coder: str | None = None
) -> None:
    """Write one part per process (all must call this), and a file at `path` that names the parts.

    Raises InputError if they cannot be written.
    """
    stamp = by_first(lambda: secrets.token_hex(4))
    names = [f"{path.name}.{stamp}.{i}-of-{count()}" for i in range(count())]
    pieces: dict[str, np.ndarray] = {}
    spans: dict[str, Span] = {}
    for name, x in arrays.items():
        for shard in x.addressable_shards if not x.is_fully_addressable else ():
            if shard.replica_id == 0:
                piece = f"{name}@{len(spans)}"
                pieces[piece] = np.ascontiguousarray(shard.data)
                spans[piece] = [[*s.indices(n)[:2]] for s, n in zip(shard.index, x.shape, strict=True)]
        if x.is_fully_addressable and is_first():
            pieces[f"{name}@"] = np.ascontiguousarray(x)
            spans[f"{name}@"] = [[0, n] for n in x.shape]
    _write(path.with_name(names[number_of()]), pieces, {"pieces": json.dumps(spans)}, coder)
    wait_for_all()
    if is_first():
        before = _parts_of(path)
        _write(path, {}, metadata | {"parts": json.dumps(names)})
        _remove(path, before)
    wait_for_all()


def placed_array(
    arrays: Readable, name: str, dtype: Any, shape: Sequence[int], where: jax.sharding.Sharding | None
) -> jax.Array:
    """Place an array by the sharding `where` (None: default device); a process reads only its pieces."""
    if where is None:
        # A copy, because steps donate it, and the file's memory must not be donated.
        return jnp.array(arrays.read(name, dtype, shape, (slice(None),) * len(shape)))
    return from_pieces(shape, where, lambda index: arrays.read(name, dtype, shape, index))


def _plain(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.name in _PLAIN else value.reshape(-1).view(np.uint8)


def _digest(value: np.ndarray) -> str:
    found = hashlib.sha256(f"{value.dtype.name} {value.shape}".encode())
    found.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def _size(span: Sequence[Sequence[int]]) -> int:
    return math.prod(stop - start for start, stop in span)


def _parts_of(path: Path) -> list[str]:
    """Find the parts named by the file at `path` that were written for this very file."""
    with contextlib.suppress(InputError, KeyError, ValueError, TypeError, RecursionError):
        metadata = check_seal(path, open_safetensors(path).metadata() or {})
        names = check_parts(path, json.loads(metadata.get("parts", "[]")))
        return [name for name in names if _is_part(path, name)]
    return []


def _is_part(path: Path, name: str) -> bool:
    if not re.fullmatch(re.escape(path.name) + _PART, name):
        return False
    with contextlib.suppress(InputError):
        return "pieces" in check_seal(path, open_safetensors(path.parent / name).metadata() or {})
    return False


def _remove(path: Path, parts: Sequence[str]) -> None:
    for part in parts:
        with contextlib.suppress(OSError):
            (path.parent / part).unlink()


def _write(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str], coder: str | None = None
) -> None:
    """Write one file, atomically. Raises InputError if it cannot be written."""
    plain = {name: _plain(x) for name, x in arrays.items()}
    # Digests are of the arrays before coding.
    digests = {"arrays": json.dumps({name: _digest(x) for name, x in plain.items()})}
    if coder is not None:
        small = {name: made for name, x in arrays.items() if (made := coded(x)) is not None}
        plain |= {name: data for name, (data, _) in small.items()}
        digests["coded"] = json.dumps({name: how for name, (_, how) in small.items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_safetensors(plain, temporary, sealed(metadata | digests))
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be written ({why}), expected a file in a writable directory: choose another path"
        ) from error
