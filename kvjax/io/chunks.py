"""Chunks of a cache: the keys and values of some tokens of a row in all layers, as bytes of their own.

A coder that was fitted to a model makes bytes of arrays and arrays of bytes. A message has a header, a
chunk's bytes and a checksum of both, so that chunks can be sent and decoded one by one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kvjax.base.errors import InputError
from kvjax.state.cache import Cache, Slots

_HEAD, _MAGIC = struct.Struct("<4sBBIII"), b"kvjc"
_RAW, _CODED = 0, 1
Numbers = Float[np.ndarray, "L K T H"]
# (bytes of a chunk in every quality, chunks that are left, this one included) -> the quality to send.
Choice = Callable[[list[int], int], int]


@runtime_checkable
class Coder(Protocol):
    """What makes bytes of keys and values, float32 [L, K, T, H], and arrays of bytes again.

    sizes: layers, KV heads, channels. sinks, newest: how many first and last tokens stay as they are.
    qualities: how many qualities there are; 0 is the best. `decode` raises ValueError for damaged bytes.
    """

    sizes: tuple[int, int, int]
    sinks: int
    newest: int
    qualities: int

    def encode(self, k: Numbers, v: Numbers, start: int, quality: int) -> bytes: ...

    def decode(self, data: bytes, tokens: int, start: int, quality: int) -> tuple[Numbers, Numbers]: ...


class KeyValueChunk(NamedTuple):
    """Keys and values [L, K, T, H] of the tokens from `start` on of a row."""

    row: int
    start: int
    k: np.ndarray
    v: np.ndarray


def messages(cache: Cache, coder: Coder, tokens: int, quality: int | Choice) -> Iterator[bytes]:
    """Yield the chunks of a cache, in the order of their tokens, row by row."""
    counts = (np.asarray(dense_parts(cache)[0][1].pos[0, :, 0]) >= 0).sum(-1)
    spans = [_spans(int(count), coder, tokens) for count in counts]
    left = sum(kind == _CODED for of_row in spans for _, _, kind in of_row)
    for row, of_row in enumerate(spans):
        k, v = _row(cache, row)
        _check_sizes(coder, k)
        for start, end, kind in of_row:
            mine = k[:, :, start:end], v[:, :, start:end]
            level, data = 0, b"".join(np.ascontiguousarray(x).tobytes() for x in mine)
            if kind == _CODED:
                floats = [x.astype(np.float32) for x in mine]
                each = [quality] if isinstance(quality, int) else range(coder.qualities)
                made = {q: coder.encode(floats[0], floats[1], start, q) for q in each}
                sizes = [len(x) for x in made.values()]
                level = quality if isinstance(quality, int) else quality(sizes, left)
                data, left = made[level], left - 1
            head = _HEAD.pack(_MAGIC, kind, level, row, start, end - start)
            yield head + data + struct.pack("<I", zlib.crc32(head + data))


def read_message(message: bytes, coder: Coder, dtype: Any) -> KeyValueChunk:
    """Read the chunk of a message. dtype: of the cache. InputError if the message is cut or damaged."""
    why = "expected what kvjax.send_cache gave: ask for it again"
    if len(message) < _HEAD.size + 4:
        raise InputError(f"a chunk has {len(message)} bytes and is cut, {why}")
    body, (crc,) = message[:-4], struct.unpack("<I", message[-4:])
    if zlib.crc32(body) != crc or body[:4] != _MAGIC:
        raise InputError(f"a chunk of {len(message)} bytes is cut or damaged, {why}")
    _, kind, level, row, start, tokens = _HEAD.unpack(body[: _HEAD.size])
    data, (layers, heads, width) = body[_HEAD.size :], coder.sizes
    try:
        if kind == _RAW:
            both = np.frombuffer(data, dtype).reshape(2, layers, heads, tokens, width)
            return KeyValueChunk(row, start, both[0], both[1])
        return KeyValueChunk(row, start, *coder.decode(data, tokens, start, level))
    except (ValueError, IndexError, zlib.error) as error:
        raise InputError(
            f"a chunk of {tokens} tokens from {start} on cannot be decoded ({error}), expected one of this "
            "coder: give the coder that it was sent with"
        ) from error


def dense_parts(cache: Any) -> list[tuple[str, Any]]:
    """Return the slots of all groups with their names in a file. InputError unless the cache is plain."""
    if cache.strides:
        raise InputError(
            "the cache is of a model whose layers are stacked as a pattern, expected layers in the order in "
            "which coders are fitted: read the texts with model.in_runs()"
        )
    for group in cache.groups:
        part = group.tail
        plain = isinstance(part, Slots) and part.v is not None and not part.far and part.near is None
        if group.bodies or group.sinks is not None or group.state is not None or not plain:
            break
        k, v = (getattr(part, name) for name in "kv")
        if hasattr(k, "codec") or hasattr(v, "codec") or k.shape != v.shape:
            break
    else:
        if not cache.pools:
            return [(f"groups.{i}.tail", group.tail) for i, group in enumerate(cache.groups)]
    raise InputError(
        "such a coder takes keys and values of all tokens in plain arrays of one width, and this cache has "
        "codes, pages, states or latents: prefill with method='full', or give coder='range'"
    )


def slots_of(pos: Int[np.ndarray, "L K S"]) -> Int[np.ndarray, "T"]:
    """Find the slots of a row's tokens, in the order of their positions.

    InputError if tokens are missing, or lie in other slots in other lists.
    """
    first = pos[0, 0]
    order = np.argsort(first, kind="stable")[(first < 0).sum() :]
    if (pos != first).any() or (first[order] != np.arange(len(order))).any():
        raise InputError(
            "such a coder takes the keys and values of all tokens, and some of this cache's were evicted: "
            "prefill with method='full', or give coder='range'"
        )
    return order


def _row(cache: Cache, row: int) -> tuple[Numbers, Numbers]:
    """Return a row's keys and values in the order of tokens, in the cache's dtype."""
    parts = [part for _, part in dense_parts(cache)]
    if len({(part.k.shape[2:3], part.k.shape[4:]) for part in parts}) > 1:
        raise InputError(
            "such a coder takes layers of equal numbers of heads and channels, and this model's differ: give "
            "coder='range'"
        )
    pos = np.concatenate([np.asarray(part.pos[:, row]) for part in parts])
    slots = slots_of(pos)
    k, v = (
        np.concatenate([np.asarray(getattr(part, n)[:, row])[:, :, slots] for part in parts]) for n in "kv"
    )
    return k, v


def _check_sizes(coder: Coder, k: Numbers) -> None:
    layers, heads, _, width = k.shape
    if (layers, heads, width) != coder.sizes:
        raise InputError(
            f"the coder was fitted to (layers, KV heads, channels) {coder.sizes}, this cache has "
            f"{(layers, heads, width)}: fit one to this model with kvjax.fit_coder"
        )


def _spans(tokens: int, coder: Coder, size: int) -> list[tuple[int, int, int]]:
    """(first token, end, kind) of every chunk: first and newest tokens as they are, `size` others coded."""
    sinks = min(coder.sinks, tokens)
    end = max(tokens - coder.newest, sinks)
    found = [(0, sinks, _RAW)] if sinks else []
    found += [(i, min(i + size, end), _CODED) for i in range(sinks, end, size)]
    return found + ([(end, tokens, _RAW)] if end < tokens else [])


class Filling:
    """Arrays of keys and values by their names in a file, which chunks fill, one after the other.

    saved: a cache with a `kvjax.io.cache_tree.Saved` for every array. pos: of every group [Lg, B, K, S].
    """

    def __init__(self, saved: Any, pos: list[np.ndarray], coder: Coder):
        self.coder, self.parts = coder, dense_parts(saved)
        shapes = [
            (len(x), x.shape[2], part.k.shape[-1]) for x, (_, part) in zip(pos, self.parts, strict=True)
        ]
        found = sum(n for n, _, _ in shapes), shapes[0][1], shapes[0][2]
        if found != coder.sizes or any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise InputError(
                f"the coder was fitted to (layers, KV heads, channels) {coder.sizes}, these chunks have "
                f"{found}: give the coder that they were sent with"
            )
        self.arrays = {
            f"{name}.{n}": np.zeros(getattr(part, n).shape, getattr(part, n).dtype)
            for name, part in self.parts
            for n in "kv"
        }
        rows = range(pos[0].shape[1])
        self.slots = [slots_of(np.concatenate([x[:, row] for x in pos])) for row in rows]
        self.seen = [np.zeros(len(slots), bool) for slots in self.slots]
        self.dtype = jnp.dtype(self.parts[0][1].k.dtype)

    def add(self, message: bytes) -> KeyValueChunk:
        """Decode a chunk and write it to its slots. InputError if it is damaged or of another cache."""
        chunk = read_message(message, self.coder, self.dtype)
        end = chunk.start + chunk.k.shape[2]
        if chunk.row >= len(self.slots) or end > len(self.slots[chunk.row]):
            raise InputError(
                f"a chunk has tokens {chunk.start} to {end - 1} of row {chunk.row}, and the cache not, "
                "expected those of one cache: give the chunks of one cache"
            )
        slots, at = self.slots[chunk.row][chunk.start : end], 0
        for name, part in self.parts:
            layers = part.k.shape[0]
            for n, x in (("k", chunk.k), ("v", chunk.v)):
                held = self.arrays[f"{name}.{n}"]
                held[:, chunk.row][:, :, slots] = x[at : at + layers].astype(held.dtype)
            at += layers
        self.seen[chunk.row][chunk.start : end] = True
        return chunk

    def check_whole(self) -> None:
        """Raise InputError if tokens are missing."""
        missing = sum(int((~seen).sum()) for seen in self.seen)
        if missing:
            raise InputError(
                f"chunks with {missing} of {sum(map(len, self.seen))} tokens are missing, expected all that "
                "kvjax.send_cache gave: ask for the rest"
            )
