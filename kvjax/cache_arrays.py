"""The arrays of a saved cache: in one file, or in one part per process where several hold it.

A part has what its process holds first: pieces of arrays, and of each where in its array it lies. The file at
the path itself then has no arrays: it names its parts, and appears when all of them are on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from kvjax.errors import InputError
from kvjax.hosts.arrays import from_pieces
from kvjax.hosts.messages import by_first, count, is_first, number_of, wait_for_all
from kvjax.models.files import open_safetensors, save_safetensors

# What safetensors' numpy side reads back; other dtypes are written as their bytes.
_PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32")
# Start and stop along every axis.
Span = list[list[int]]


class Arrays:
    """The arrays of a saved cache by name, of which pieces are read.

    path: the file; parts: names of the files that hold them, none where the file itself does. Raises
    InputError where one is missing or truncated.
    """

    def __init__(self, path: Path, parts: Sequence[str]):
        self._whole = None if parts else open_safetensors(path)
        self._pieces: dict[str, list[tuple[Span, Any, str]]] = {}
        for part in parts:
            if not (path.parent / part).is_file():
                raise InputError(
                    f"{path} lacks its part {part}: put all {len(parts)} parts beside it, as they were saved"
                )
            file = open_safetensors(path.parent / part)
            for name, span in json.loads((file.metadata() or {})["pieces"]).items():
                self._pieces.setdefault(name.partition("@")[0], []).append((span, file, name))

    def read(self, name: str, dtype: Any, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        """The piece `index` of an array, a copy. KeyError where nothing is known of some of it."""
        wanted = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        if self._whole is not None:
            slices = tuple(slice(*span) for span in wanted)
            part = any(stop - start < n for (start, stop), n in zip(wanted, shape, strict=True))
            if part and dtype.name in _PLAIN:
                return self._whole.get_slice(name)[slices]
            return np.array(self._whole.get_tensor(name).view(dtype).reshape(shape)[slices])
        out, filled = np.empty([stop - start for start, stop in wanted], dtype), 0
        for span, file, piece in self._pieces[name]:
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(span, wanted, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            value = file.get_tensor(piece).view(dtype).reshape([stop - start for start, stop in span])
            inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, span, strict=True))
            place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(both, wanted, strict=True))
            out[place] = value[inside]
            filled += value[inside].size
        if filled < out.size:
            raise KeyError(f"parts of {name}")
        return out


def write_arrays(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """The arrays in one file, which appears whole or not at all.

    Raises InputError where it cannot be written.
    """
    before = _parts_of(path)
    with atomic(path) as temporary:
        save_safetensors(
            {name: _plain(np.ascontiguousarray(x)) for name, x in arrays.items()}, temporary, metadata
        )
    _remove(path, before)


def write_parts(path: Path, arrays: dict[str, jax.Array], metadata: dict[str, str]) -> None:
    """The arrays in a part for every process, which all call this, and a file at `path` that names the parts.

    Raises InputError where they cannot be written.
    """
    stamp = by_first(lambda: secrets.token_hex(4))
    names = [f"{path.name}.{stamp}.{i}-of-{count()}" for i in range(count())]
    pieces: dict[str, np.ndarray] = {}
    spans: dict[str, Span] = {}
    for name, x in arrays.items():
        for shard in x.addressable_shards if not x.is_fully_addressable else ():
            if shard.replica_id == 0:
                piece = f"{name}@{len(spans)}"
                pieces[piece] = _plain(np.ascontiguousarray(shard.data))
                spans[piece] = [[*s.indices(n)[:2]] for s, n in zip(shard.index, x.shape, strict=True)]
        if x.is_fully_addressable and is_first():
            pieces[f"{name}@"] = _plain(np.ascontiguousarray(x))
            spans[f"{name}@"] = [[0, n] for n in x.shape]
    with atomic(path.with_name(names[number_of()])) as temporary:
        save_safetensors(pieces, temporary, {"pieces": json.dumps(spans)})
    wait_for_all()
    if is_first():
        before = _parts_of(path)
        with atomic(path) as temporary:
            save_safetensors({}, temporary, metadata | {"parts": json.dumps(names)})
        _remove(path, before)
    wait_for_all()


def placed_array(
    arrays: Arrays, name: str, dtype: Any, shape: Sequence[int], where: jax.sharding.Sharding | None
) -> jax.Array:
    """An array where it is to lie; a process reads what its devices hold of it. None: the default device."""
    if where is None:
        # A copy: steps donate it, and the file's memory is not theirs.
        return jnp.array(arrays.read(name, dtype, shape, (slice(None),) * len(shape)))
    return from_pieces(shape, where, lambda index: arrays.read(name, dtype, shape, index))


def _plain(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.name in _PLAIN else value.reshape(-1).view(np.uint8)


def _parts_of(path: Path) -> list[str]:
    """The parts that a file names; none where there is no such file."""
    with contextlib.suppress(InputError, ValueError, TypeError):
        return json.loads((open_safetensors(path).metadata() or {}).get("parts", "[]"))
    return []


def _remove(path: Path, parts: Sequence[str]) -> None:
    for part in parts:
        with contextlib.suppress(OSError):
            (path.parent / part).unlink()


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` once its content is on disk, or vanishes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"{path} cannot be written ({why}), expected a file in a writable directory: choose another path"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
