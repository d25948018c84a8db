"""8-bit float tensors of a safetensors file, which numpy lacks: read from the bytes of the file.

The safetensors library checks the header of the file; its numpy reader has no such dtypes.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SMALL_FLOATS: dict[str, Any] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""Their dtypes by their names in safetensors."""


class SmallFloats:
    """The 8-bit float tensors in a file whose header the library has checked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _head(self) -> tuple[int, dict[str, Any]]:
        """(offset of the numbers, the header's entry of each tensor)."""
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length, json.loads(file.read(length))

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")

    def get_slice(self, name: str) -> _Piece:
        """Return a tensor, to be indexed by slices."""
        base, head = self._head
        start, stop = head[name]["data_offsets"]
        data = self._bytes[base + start : base + stop].view(SMALL_FLOATS[head[name]["dtype"]])
        return _Piece(data.reshape(head[name]["shape"]))


class _Piece:
    """A mapped tensor, of which indexing copies a piece."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return np.array(self.data[index])
