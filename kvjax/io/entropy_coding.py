"""Entropy coding: compresses arrays without loss, with a range coder over bytes or half bytes.

Codes of 4 bits are half bytes of their words, so that a channel's codes have frequencies of their own; in
floats, the bytes of sign and exponent take few values. The coder is the library `constriction`, which
only this module needs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8

from kvjax.base.errors import InputError

# Frequencies are stored in one byte each; arrays of fewer bytes are not coded.
_MOST, _SMALLEST = 255, 512
# An array is not coded if less than this share of it would be saved.
_WORTH = 0.01


def check_coder(coder: str | None) -> None:
    """Raise InputError for a coder that does not exist, or whose library is not installed."""
    if coder not in (None, "range"):
        raise InputError(f"coder is {coder!r:.40}, expected 'range', a fitted coder or None")
    if coder is not None:
        library()


def coded(value: np.ndarray) -> tuple[UInt8[np.ndarray, "n"], dict[str, Any]] | None:
    """Encode an array in fewer bytes, with the parameters of `decoded`; None if it would hardly be smaller.

    Symbols are bytes or half bytes; frequencies are per index of an array's first axis, or per channel of [L,
    B, K, S, H]: whichever gives fewer bytes, frequencies included.

    >>> codes = np.random.default_rng(0).binomial(15, 0.3, (1, 1, 2, 512, 16)).astype(np.uint8)
    >>> small, how = coded(codes)
    >>> (decoded(small, how) == codes).all(), small.nbytes < 0.4 * codes.nbytes, how["by"]
    (np.True_, True, 'layer')
    """
    if value.nbytes < _SMALLEST:
        return None
    plans = [(bits, by) for bits in (4, 8) for by in ("layer", "channel") if by == "layer" or value.ndim == 5]
    each = [(bits, by, *_frequencies(_lines(value, bits, by), bits)) for bits, by in plans]
    bits, by, tables, size = min(each, key=lambda plan: plan[3])
    if size > (1 - _WORTH) * 8 * value.nbytes:
        return None
    words = _encoded(_lines(value, bits, by), tables)
    packed = zlib.compress(tables.tobytes(), 9)
    parts = [np.array([len(packed)], "<u4").tobytes(), packed, words.astype("<u4").tobytes()]
    how = {"dtype": value.dtype.name, "shape": list(value.shape), "bits": bits, "by": by}
    return np.frombuffer(b"".join(parts), np.uint8), how


def decoded(data: UInt8[np.ndarray, "n"], how: dict[str, Any]) -> np.ndarray:
    """Decode the array encoded by `coded`. ValueError if the bytes are damaged."""
    dtype, shape, bits, by = jnp.dtype(how["dtype"]), tuple(how["shape"]), how["bits"], how["by"]
    lines, length = _sizes(shape, dtype.itemsize * 8 // bits, by)
    raw = data.tobytes()
    end = 4 + int(np.frombuffer(raw[:4], "<u4")[0])
    if end > len(raw) or (len(raw) - end) % 4:
        raise ValueError("coded bytes are cut")
    try:
        unpacked = zlib.decompressobj().decompress(raw[4:end], lines * 2**bits + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    tables = np.frombuffer(unpacked, np.uint8).reshape(lines, 2**bits)
    symbols = _decoded(np.frombuffer(raw[end:], "<u4").astype(np.uint32), tables, length)
    return _array(symbols, shape, dtype, bits, by)


def library() -> ModuleType:
    try:
        import constriction
    except ImportError as error:
        raise InputError(
            "caches are coded by the library constriction, which is not installed: pip install 'kvjax[coder]'"
        ) from error
    return constriction


# --- symbols -----------------------------------------------------------------------------------------


def _lines(value: np.ndarray, bits: int, by: str) -> UInt8[np.ndarray, "lines length"]:
    """Arrange the symbols of an array in lines; the symbols of a line share their frequencies."""
    whole = np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(*value.shape, -1)
    if bits == 4:
        whole = np.stack([whole & 15, whole >> 4], -1).reshape(*value.shape, -1)
    split = whole.reshape(_split(value.shape, whole.shape[-1], by))
    return np.ascontiguousarray(split.transpose(_ORDER[by])).reshape(_sizes(value.shape, whole.shape[-1], by))


def _array(
    symbols: UInt8[np.ndarray, "lines length"], shape: tuple[int, ...], dtype: Any, bits: int, by: str
) -> np.ndarray:
    """Invert `_lines`."""
    split, order = _split(shape, dtype.itemsize * 8 // bits, by), _ORDER[by]
    whole = symbols.reshape([split[i] for i in order]).transpose(np.argsort(order)).reshape(-1)
    if bits == 4:
        whole = whole[0::2] | (whole[1::2] << 4)
    return np.ascontiguousarray(whole).view(dtype).reshape(shape)


# The axes of the lines first: layer and byte of a number; with "channel", also head and channel.
_ORDER = {"layer": (0, 2, 1), "channel": (0, 2, 4, 5, 1, 3)}


def _split(shape: tuple[int, ...], places: int, by: str) -> tuple[int, ...]:
    if by == "channel":
        return (*shape, places)
    layers = shape[0] if len(shape) > 2 else 1
    return (layers, math.prod(shape) // layers, places)


def _sizes(shape: tuple[int, ...], places: int, by: str) -> tuple[int, int]:
    """How many lines there are, and how many symbols each has."""
    split = _split(shape, places, by)
    lines = math.prod(split[i] for i in _ORDER[by][: 4 if by == "channel" else 2])
    return lines, math.prod(split) // lines


# --- the coder ---------------------------------------------------------------------------------------


def _frequencies(
    lines: UInt8[np.ndarray, "lines length"], bits: int
) -> tuple[UInt8[np.ndarray, "lines symbols"], float]:
    """Count the integer frequencies of every line, and how many bits lines and frequencies take together."""
    places = np.arange(len(lines), dtype=np.int64)[:, None] << bits
    counts: Int[np.ndarray, "n"] = np.bincount((places + lines).reshape(-1), minlength=len(lines) << bits)
    counts = counts.reshape(len(lines), -1)
    # Symbols that occur have a frequency of at least 1.
    scaled = np.ceil(counts * (_MOST / counts.max(1, keepdims=True)))
    tables = np.minimum(scaled, _MOST).astype(np.uint8)
    used = counts > 0
    chances = np.where(used, tables, 1) / tables.sum(1, keepdims=True, dtype=np.int64)
    size = -(counts * np.log2(chances)).sum() + 8 * len(zlib.compress(tables.tobytes(), 1)) + 64
    return tables, float(size)


def _models(tables: UInt8[np.ndarray, "lines symbols"]) -> Iterator[tuple[int, Any]]:
    """Yield the lines with more than one symbol, each with its frequency model."""
    model = library().stream.model
    for i in np.flatnonzero((tables > 0).sum(1) > 1):
        yield int(i), model.Categorical(tables[i].astype(np.float32), perfect=False)


def _encoded(lines: UInt8[np.ndarray, "lines length"], tables: np.ndarray) -> np.ndarray:
    encoder = library().stream.queue.RangeEncoder()
    for i, model in _models(tables):
        encoder.encode(lines[i].astype(np.int32), model)
    return encoder.get_compressed()


def _decoded(words: np.ndarray, tables: np.ndarray, length: int) -> UInt8[np.ndarray, "lines length"]:
    decoder = library().stream.queue.RangeDecoder(words)
    out = np.repeat(tables.argmax(1).astype(np.uint8)[:, None], length, 1)
    try:
        for i, model in _models(tables):
            out[i] = decoder.decode(model, length)
    except AssertionError as error:
        raise ValueError(str(error)) from error
    return out
