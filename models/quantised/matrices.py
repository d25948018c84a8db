"""Matrices decoded on indexing: codes, scales and zero points as stored in files.

Each has a `shape` and returns the piece [rows, columns] as an array. A format's decoder nests a few of them,
so no more than the requested rows is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.files import Stored


@runtime_checkable
class Matrix(Protocol):
    """Numbers [rows, columns], read when a piece is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray: ...


class Plain(NamedTuple):
    """A stored matrix, unchanged; a vector is one column, a scalar one number."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, int]:
        shape = self.stored.shape
        return (shape[0] if shape else 1, shape[1] if len(shape) > 1 else 1)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        if len(self.stored.shape) > 1:
            return self.stored.read(*index)
        whole = self.stored.read(slice(None)) if self.stored.shape else np.asarray(self.stored.read())
        return whole.reshape(self.shape)[index]


class UnpackedMatrix(NamedTuple):
    """Unsigned numbers of `bits` bits in the words of a matrix, `count` of them in a row.

    A row's words, of `width` bits, are one stream, the lowest bit of a word first: number i is bits [i bits,
    (i + 1) bits). order: which of every len(order) numbers is at each place. change: a function applied to
    words [rows, words] first, with their first column.
    """

    words: Matrix
    bits: int
    count: int
    width: int = 32
    order: tuple[int, ...] = (0,)
    change: Callable[[np.ndarray, int], np.ndarray] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.count

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        columns = np.arange(self.count)[index[1]]
        size = len(self.order)
        bit = (columns - columns % size + np.argsort(self.order)[columns % size]) * self.bits
        if not len(bit):
            return np.zeros((len(range(self.shape[0])[index[0]]), 0), np.uint32)
        first, stop = int(bit.min()) // self.width, int(bit.max() + self.bits - 1) // self.width + 1
        words = self.words[index[0], first:stop]
        words = words.view(f"u{words.itemsize}").astype(np.uint32, copy=False)
        if self.change is not None:
            words = self.change(words, first)
        at, shift = bit // self.width - first, (bit % self.width).astype(np.uint32)
        out = words[:, at] >> shift
        # Numbers that continue in the next word.
        over = np.flatnonzero(shift + self.bits > self.width)
        out[:, over] |= words[:, at[over] + 1] << (np.uint32(self.width) - shift[over])
        return out & np.uint32(2**self.bits - 1)


class Transposed(NamedTuple):
    """The transpose of a matrix."""

    matrix: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[::-1]

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return self.matrix[index[1], index[0]].T


class BlockNumbers(NamedTuple):
    """Numbers shared by blocks of a matrix [rows, columns], in float32.

    Row r, column c has the number [r // block[0], c // block[1]]; groups: instead of blocks, the column of
    the numbers for each column.
    """

    numbers: Matrix
    shape: tuple[int, int]
    block: tuple[int, int]
    groups: Stored | None = None

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (np.arange(n)[i] for i, n in zip(index, self.shape, strict=True))
        rows, columns = rows // self.block[0], self._groups(columns)
        if not len(rows) or not len(columns):
            return np.zeros((len(rows), len(columns)), np.float32)
        top, left = int(rows.min()), int(columns.min())
        held = self.numbers[top : int(rows.max()) + 1, left : int(columns.max()) + 1]
        return held.astype(np.float32)[rows - top][:, columns - left]

    def _groups(self, columns: np.ndarray) -> np.ndarray:
        if self.groups is None:
            return columns // self.block[1]
        found = self.groups.read(slice(None))
        # compressed-tensors fills it with -1 if columns keep their order.
        if (found == -1).all():
            return columns // self.block[1]
        if (found < 0).any() or (found >= self.numbers.shape[1]).any():
            raise InputError(
                f"{self.groups.name} names groups from {found.min()} to {found.max()}, expected 0 to "
                f"{self.numbers.shape[1] - 1}: fetch the checkpoint again"
            )
        return found[columns]


class Float4(NamedTuple):
    """The values of 4-bit floats (E2M1)."""

    codes: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return float4(self.codes[index])


class Exponents(NamedTuple):
    """Powers of two from bytes that hold their exponents plus 127 (E8M0)."""

    bytes: Matrix

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bytes.shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        return powers(self.bytes[index])


class AffineMatrix(NamedTuple):
    """(codes - zeros - offset) * scales / divisor, in float32."""

    codes: Matrix
    scales: Matrix
    zeros: Matrix | None = None
    offset: int = 0
    divisor: Stored | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (*index, slice(None), slice(None))[:2]
        codes = self.codes[rows, columns].astype(np.float32)
        if self.zeros is not None:
            codes -= self.zeros[rows, columns].astype(np.float32, copy=False)
        if self.offset:
            codes -= self.offset
        scales = self.scales[rows, columns].astype(np.float32, copy=False)
        if self.divisor is not None:
            scales /= np.float32(np.ravel(self.divisor.read())[0])
        codes *= scales
        return codes


def float4(codes: np.ndarray) -> np.ndarray:
    """Decode 4-bit floats (E2M1), one code per element: 0, 0.5, 1, 1.5, 2, 3, 4, 6, then negative."""
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def powers(exponents: np.ndarray) -> np.ndarray:
    """2 ** (exponent - 127) of bytes; 255 is NaN (OCP Microscaling Formats 1.0, section 5.4.1)."""
    return exponents.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
