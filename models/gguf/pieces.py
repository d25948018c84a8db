"""Tensors as a checkpoint on the hub has them, read from those of a GGUF file a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.models.gguf.reader import StoredTensor, decoded


class DecodedTensor(NamedTuple):
    """A tensor as a checkpoint on the hub has it, decoded when it is read.

    rows, columns: which of the file's tensor are its own, in order, if they differ. undo: a function that
    reverses the conversion of its numbers. shape: that of the checkpoint, with as many numbers.
    """

    held: StoredTensor
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    undo: Callable[[np.ndarray], np.ndarray] | None = None

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        data, kind, _ = self.held
        if data.ndim != 2 or len(self.shape) != 2 or not index:
            return self._small(index)
        taken = data[index[0]] if self.rows is None else data[self.rows[index[0]]]
        out = decoded(np.ascontiguousarray(taken), kind)
        out = out if self.columns is None else out[:, self.columns]
        return (out if self.undo is None else self.undo(out))[:, *index[1:]]

    def _small(self, index: tuple[slice, ...]) -> np.ndarray:
        """Vectors, and convolutions, which have more axes here than in the file."""
        out = decoded(np.ascontiguousarray(self.held.data), self.held.kind)
        out = out if self.rows is None else out[self.rows]
        return (out if self.undo is None else self.undo(out)).reshape(self.shape)[index].copy()


class JoinedProjection(NamedTuple):
    """DeepSeek's `kv_b_proj`, joined from the two tensors of newer files, head by head.

    keys [heads, latents, channels], values [heads, channels, latents]: a head's rows are those of its keys,
    then those of its values.
    """

    keys: StoredTensor
    values: StoredTensor
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        heads, each = self.keys.shape[0], self.keys.shape[2] + self.values.shape[1]
        start, stop, _ = index[0].indices(heads * each)
        first, last = start // each, -(-stop // each)
        rows = [self._head(head) for head in range(first, last)]
        out = np.concatenate(rows) if rows else np.empty((0, self.shape[1]), np.float32)
        return out[start - first * each : stop - first * each, *index[1:]]

    def _head(self, head: int) -> np.ndarray:
        keys, values = (decoded(np.ascontiguousarray(x.data[head]), x.kind) for x in (self.keys, self.values))
        return np.concatenate([keys.T, values])


class StackedExperts(NamedTuple):
    """All experts' matrices [inputs, outputs] as one tensor, gate and up joined in their outputs.

    parts: the tensors of the file, [experts, outputs, inputs] or, of biases, [experts, outputs].
    by_turns: whether outputs of gate and up alternate, as of gpt-oss, or follow each other, as of Llama 4.
    """

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    by_turns: bool

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *rest = index or (slice(None),)
        held = [decoded(np.ascontiguousarray(part.data[first]), part.kind) for part in self.parts]
        joined = np.stack(held, axis=2 if self.by_turns else 1)
        out = joined.reshape(len(held[0]), -1, *held[0].shape[2:])
        return np.ascontiguousarray(out.swapaxes(1, -1) if out.ndim == 3 else out)[:, *rest]


class ConcatenatedTensors(NamedTuple):
    """Several tensors of a file, concatenated along their outputs.

    parts: [outputs, inputs] or [experts, outputs, inputs] each. rows: which outputs of all of them, of
    matrices alone, are its rows, in order; None for all as they are.
    """

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    rows: np.ndarray | None = None

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *rest = index or (slice(None),)
        if len(self.shape) == 3:
            held = [decoded(np.ascontiguousarray(part.data[first]), part.kind) for part in self.parts]
            return np.concatenate(held, axis=1)[:, *rest]
        wanted = (np.arange(self.shape[0]) if self.rows is None else self.rows)[first]
        out, start = np.empty((len(wanted), self.shape[1]), np.float32), 0
        for part in self.parts:
            here = (start <= wanted) & (wanted < start + part.shape[0])
            out[here] = decoded(np.ascontiguousarray(part.data[wanted[here] - start]), part.kind)
            start += part.shape[0]
        return out[:, *rest]


Piece = DecodedTensor | JoinedProjection | StackedExperts | ConcatenatedTensors
"""What a loader may take rows of."""
