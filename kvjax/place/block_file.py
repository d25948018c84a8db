"""Blocks of keys and values in files: a host reads those that match best, and holds none in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from kvjax.base.errors import InputError

# Representatives are ranked by so many bytes at a time.
AT_ONCE = 2**22


class BlockFile:
    """The blocks of one layer in two files of a folder: keys and values, and representative keys.

    Blocks are read with `os.pread` and not mapped, so that they do not count as memory of the process.

    Args:
        folder: an existing folder; files of an earlier text there are overwritten.
        name: of this layer.
        heads, key, value: KV heads and the channels of their keys and values.
        tokens, keys: tokens and representatives of a block.

    Raises:
        InputError: if the folder cannot be written, or is full.
    """

    def __init__(
        self, folder: Path, name: str, heads: int, key: int, value: int, tokens: int, keys: int
    ) -> None:
        self.shape = (heads, tokens, key + value)
        self.key, self.heads, self.keys, self.count = key, heads, keys, 0
        self.folder = folder
        try:
            self._blocks = open(folder / f"{name}.blocks", "w+b")
            self._keys = open(folder / f"{name}.keys", "w+b")
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror}") from error

    def append(self, blocks: Float[np.ndarray, "P K S F"], keys: Float[np.ndarray, "P K R H"]) -> None:
        """Write blocks, keys and values side by side, and their representative keys."""
        try:
            for file, x in ((self._blocks, blocks), (self._keys, keys)):
                file.write(np.ascontiguousarray(x, np.float32).tobytes())
                file.flush()
        except OSError as error:
            at = self.count * self.shape[1]
            raise InputError(
                f"{self._blocks.name} cannot grow after {at} tokens: {error.strerror}"
            ) from error
        self.count += len(blocks)

    def best(self, query: Float[np.ndarray, "K G H"], first: int, most: int) -> Int[np.ndarray, "K P"]:
        """Per KV head, the `first` blocks and the `most` others with the largest <query, representative>."""
        take = min(first + most, self.count)
        if take == self.count or not most:
            return np.tile(np.arange(take), (self.heads, 1))
        size = self.keys * self.heads * self.key * 4
        each = max(AT_ONCE // size, take)
        keys = np.empty((each, self.heads, self.keys, self.key), np.float32)
        # The best so far, so that memory does not grow with the text.
        best, numbers = np.empty((self.heads, 0), np.float32), np.empty((self.heads, 0), np.int64)
        for at in range(0, self.count, each):
            many = min(each, self.count - at)
            os.preadv(self._keys.fileno(), [keys[:many].data], at * size)
            score = self._scores(keys[:many], query)
            score[:, : max(first - at, 0)] = np.inf
            new = np.broadcast_to(np.arange(at, at + many), score.shape)
            best, numbers = np.concatenate([best, score], 1), np.concatenate([numbers, new], 1)
            some = np.argpartition(-best, take - 1)[:, :take]
            best, numbers = (np.take_along_axis(x, some, 1) for x in (best, numbers))
        return numbers

    def _scores(
        self, keys: Float[np.ndarray, "P K R H"], query: Float[np.ndarray, "K G H"]
    ) -> Float[np.ndarray, "K P"]:
        """Compute the largest product of a query head and a representative, for every KV head and block."""
        each = [keys[:, k].reshape(-1, self.key) @ q.T for k, q in enumerate(query)]
        return np.stack([x.reshape(len(keys), -1).max(1) for x in each])

    def read(self, numbers: Int[np.ndarray, "K P"]) -> Float[np.ndarray, "K P S F"]:
        """Read the blocks of these numbers, of every KV head its own."""
        out = np.empty((*numbers.shape, *self.shape[1:]), np.float32)
        size = out[0, 0].nbytes if out.size else 0
        for head, p in np.ndindex(*numbers.shape):
            at = (int(numbers[head, p]) * self.heads + head) * size
            found = np.frombuffer(os.pread(self._blocks.fileno(), size, at), np.float32)
            out[head, p] = found.reshape(self.shape[1:])
        return out

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all heads in both files."""
        heads, tokens, channels = self.shape
        return 4 * heads * (tokens * channels + self.keys * self.key)

    @property
    def closed(self) -> bool:
        """Whether the files are closed."""
        return self._blocks.closed

    def close(self) -> None:
        """Close both files."""
        self._blocks.close()
        self._keys.close()


def check_free(files: Sequence[BlockFile], tokens: int) -> None:
    """Raise InputError if the disk has no room for blocks of `tokens` more tokens in each of the files."""
    folder, free = files[0].folder, shutil.disk_usage(files[0].folder).free
    need = sum(file.block_bytes * -(-tokens // file.shape[1]) for file in files)
    if need > free:
        raise InputError(
            f"{tokens} more tokens of the text take {need:,} bytes in files, and {folder} has {free:,} free: "
            "give a folder on a disk with room, or a shorter text"
        )
