"""Opens a GGUF file, or all files of a split one: metadata, and where each tensor is.

The `gguf` package reads the header; numbers stay in the mapped file until a tensor is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.files import first_bytes

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Names of the files that one was split into."""

# Its code in the format.
_FLOAT_32 = 6
# The package's exceptions for an invalid header.
_WRONG = (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError)


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file with its undecoded numbers, [..., rows, bytes or numbers of a row].

    kind: the package's name of their encoding. shape: as decoded, the outermost axis first.
    """

    data: np.ndarray
    kind: str
    shape: tuple[int, ...]


class Gguf(NamedTuple):
    """An open GGUF file: its metadata by key, its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: dict[str, StoredTensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Read the value of a metadata key: a number, a boolean, a text or a list."""
        if key not in self.fields:
            return default
        try:
            value = self.fields[key].contents()
            # 1e-5 is meant, not the float32 nearest to it.
            return float(str(np.float32(value))) if self.fields[key].types[0] == _FLOAT_32 else value
        except _WRONG as error:
            raise InputError(
                f"{self.path}: its {key} cannot be read ({error}): fetch the file again"
            ) from error

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture", ""))

    def of(self, key: str, default: Any = None) -> Any:
        """Read the value of a key of the file's architecture, `llama.block_count` for "block_count"."""
        return self.get(f"{self.architecture}.{key}", default)

    def holds(self, name: str) -> bool:
        """Whether some layer has a tensor of this name, such as "attn_q.bias"."""
        return any(held.startswith("blk.") and held.split(".", 2)[-1] == name for held in self.tensors)

    def need(self, key: str) -> Any:
        """`of` for a required key. Raises InputError."""
        value = self.of(key)
        if value is None:
            raise InputError(
                f"{self.path} lacks {self.architecture}.{key} in its metadata: fetch or convert it again"
            )
        return value


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by content or by name."""
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            return path.suffix.lower() == ".gguf" or file.read(4) == MAGIC
    except OSError:
        return path.suffix.lower() == ".gguf"


def open_gguf(path: Path) -> Gguf:
    """Open a GGUF file; of a split one any of its files may be named.

    Raises InputError if the `gguf` package is missing, and for a file that is not GGUF, is cut short, or
    belongs to a split with missing files.
    """
    first = _open_one(path)
    count = first.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return first
    name = SPLIT.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise InputError(
            f"{path} is one of {count} files, expected a name like model-00001-of-{count:05d}.gguf: give it "
            "the name that it was published under, beside the others"
        )
    files = [path.with_name(f"{name[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise InputError(
            f"{path.parent} lacks {', '.join(absent)} beside {path.name}: fetch the missing files"
        )
    opened = [first if file == path else _open_one(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for one in opened:
        if doubled := sorted(set(tensors) & set(one.tensors)):
            raise InputError(f"{doubled[0]} is in {one.path.name} and in a file beside it: fetch them again")
        tensors |= one.tensors
    return Gguf(path, opened[0].fields, tensors)


def _open_one(path: Path) -> Gguf:
    reader_class = _reader_class()
    if (start := first_bytes(path))[:4] != MAGIC:
        raise InputError(
            f"{path} is no GGUF file: it starts with {start[:4]!r}, expected {MAGIC!r}; fetch it again"
        )
    try:
        reader = reader_class(path)
        tensors = {t.name: _held(t) for t in reader.tensors}
    except EOFError as error:
        raise InputError(
            f"{path} is cut short: it has {path.stat().st_size} bytes, its head names more; fetch it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
    except _WRONG as error:
        raise InputError(_unknown(path, str(error))) from error
    if wrong := next((name for name in tensors if not name.isprintable()), None):
        raise InputError(f"{path} is a damaged GGUF file (a tensor is called {wrong!r:.40}): fetch it again")
    if reader.byte_order != "I":
        raise InputError(f"{path} is of the other byte order: convert it on a machine like this one")
    return Gguf(path, reader.fields, tensors)


def _unknown(path: Path, why: str) -> str:
    number = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", why)
    if number is None:
        return f"{path} is a damaged GGUF file ({why:.100}): fetch it again"
    import gguf

    known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if decodes(kind.name))
    return f"{path} has weights of an unknown type {number[1]}: these are read: {known}"


def _held(tensor: Any) -> StoredTensor:
    return StoredTensor(tensor.data, tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)))


def _reader_class() -> Any:
    """Make the package's reader over a plain array, whose slices are cheaper, with checks of the file's end.

    Without these checks, a truncated file would be read as if it were whole, or without end. Lists, of which
    a vocabulary has a hundred thousand entries, are sliced here, in a tenth of the time.
    """
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise InputError("GGUF files need the package gguf: pip install 'kvjax[gguf]'") from error

    class Reader(GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

        def _get(self, offset: Any, dtype: Any, count: Any = 1, *rest: Any, **named: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise EOFError
            return super()._get(offset, dtype, count, *rest, **named)

        def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
            start = int(orig_offs)
            if int(raw_type) != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            of, count = (self._slice(at, size).view(f"u{size}") for at, size in ((start, 4), (start + 4, 8)))
            kind, many, begin = GGUFValueType(int(of[0])), int(count[0]), start + 12
            if kind == GGUFValueType.STRING:
                parts = self._strings(begin, many)
                end = begin + 8 * many + sum(map(len, parts))
            elif (dtype := GGUFReader.gguf_scalar_to_np.get(kind)) is not None:
                parts = [self._slice(begin, np.dtype(dtype).itemsize * many).view(dtype)]
                end = begin + parts[0].nbytes
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [GGUFValueType.ARRAY, *([kind] if many else [])]
            return end - start, [of, count, *parts], [*range(2, 2 + len(parts))], types

        def _strings(self, at: int, many: int) -> list[np.ndarray]:
            """Strings that follow each other, each after its length."""
            raw, parts = self.data.data, []
            for _ in range(many):
                first = at + 8
                at = first + int.from_bytes(raw[at:first], "little")
                if at > len(raw):
                    raise EOFError
                parts.append(self.data[first:at])
            return parts

        def _slice(self, start: int, size: int) -> np.ndarray:
            if start + size > len(self.data):
                raise EOFError
            return self.data[start : start + size]

    return Reader


# --- numbers -----------------------------------------------------------------------------------------


_PLAIN = ("F64", "F32", "F16")
# How many bytes are decoded at a time: for larger results malloc fetches fresh pages every time.
_PIECE = 2**14


def decodes(kind: str) -> bool:
    """Whether the package decodes a weight type, tested with one block of zeros."""
    import gguf

    if kind in _PLAIN:
        return True
    known = gguf.GGMLQuantizationType[kind]
    try:
        decoded(np.zeros((1, gguf.GGML_QUANT_SIZES[known][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def decoded(data: np.ndarray, kind: str) -> np.ndarray:
    """Decode the numbers of whole rows of a tensor, to float32 (float64 and float16 unchanged)."""
    if kind in _PLAIN:
        return data
    import gguf

    of = getattr(gguf.quants, kind, None)
    if of is None or data.ndim != 2:
        return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    # The package decodes 16 rows at a time, which in small models are a few kilobytes.
    of.init_grid()
    rows = max(1, _PIECE // max(data.shape[1], 1))
    out = np.empty(gguf.quants.quant_shape_from_byte_shape(data.shape, of.qtype), np.float32)
    for i in range(0, len(data), rows):
        out[i : i + rows] = of.dequantize_rows(data[i : i + rows])
    return out


def check_kinds(file: Gguf) -> None:
    """Raise InputError if a tensor has a type that the package knows but does not decode."""
    kinds = {tensor.kind: name for name, tensor in file.tensors.items()}
    unread = [kind for kind in kinds if not decodes(kind)]
    if not unread:
        return
    import gguf

    known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if decodes(kind.name))
    raise InputError(
        f"{file.path} has weights of the type {unread[0]} ({kinds[unread[0]]}), which gguf does not decode: "
        f"these are read: {known}"
    )
