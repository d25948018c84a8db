"""CacheGen: whole numbers of every layer's scale, coded by frequencies that were counted in other texts."""

from __future__ import annotations

import struct

import numpy as np
from jaxtyping import Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.io.chunks import Numbers
from kvjax.io.entropy_coding import library

WORD = "FrequencyCoder"


class FrequencyCoder:
    """CacheGen's encoder (arXiv:2310.07240, section 5): a range coder for every layer's channels.

    A token of a layer has the scale max |x| over all heads in float16, and whole numbers from -c to c, fewer
    in upper layers and in lower qualities. Their frequencies are of each layer and channel.
    fitted: "key most", "value most" [L, Q] with c, and "key counts", "value counts" [L, Q, K H, 2 c + 1] of
    other texts, padded with zeros, and "sizes" [1, 3].
    """

    sinks = newest = 0

    def __init__(self, fitted: Fitted):
        arrays = {name: np.asarray(x) for name, x in fitted.arrays.items()}
        layers, heads, width = (int(n) for n in arrays["sizes"][0])
        self.sizes = layers, heads, width
        self.qualities = arrays["key most"].shape[1]
        self.sides = [(arrays[f"{of} most"], arrays[f"{of} counts"]) for of in ("key", "value")]

    def encode(self, k: Numbers, v: Numbers, start: int, quality: int) -> bytes:
        """Encode a chunk as bytes in a quality from 0, the best, on."""
        coder, scales = library().stream.queue.RangeEncoder(), b""
        for x, (most, counts) in zip((k, v), self.sides, strict=True):
            for layer, rows in enumerate(x):
                c = int(most[layer, quality])
                scale, codes = symbols(rows, c)
                scales += scale.tobytes()
                for line, count in zip(codes, counts[layer, quality], strict=True):
                    coder.encode(line, _model(count, c))
        return scales + coder.get_compressed().astype("<u4").tobytes()

    def decode(self, data: bytes, tokens: int, start: int, quality: int) -> tuple[Numbers, Numbers]:
        """Keys and values. ValueError for other bytes than `encode` gives."""
        layers, heads, width = self.sizes
        head = 2 * 2 * layers * tokens
        if quality >= self.qualities or len(data) < head or (len(data) - head) % 4:
            raise ValueError(f"{len(data)} bytes in quality {quality}")
        scales = np.frombuffer(data[:head], "<f2").reshape(2, layers, tokens).astype(np.float32)
        words = np.array(struct.unpack(f"<{(len(data) - head) // 4}I", data[head:]), np.uint32)
        coder, out = (
            library().stream.queue.RangeDecoder(words),
            np.empty((2, layers, heads, tokens, width), np.float32),
        )
        try:
            for side, (most, counts) in enumerate(self.sides):
                for layer in range(layers):
                    c = int(most[layer, quality])
                    lines = [coder.decode(_model(n, c), tokens) for n in counts[layer, quality]]
                    whole = np.stack(lines).reshape(heads, width, tokens) - c
                    out[side, layer] = np.moveaxis(whole * (scales[side, layer] / c), 1, 2)
        except AssertionError as error:
            raise ValueError(str(error)) from error
        return out[0], out[1]


def symbols(rows: Float[np.ndarray, "K T H"], most: int) -> tuple[np.ndarray, Int[np.ndarray, "KH T"]]:
    """Return the scale of every token, in float16, and symbols from 0 to 2 `most` of every channel.

    >>> scale, found = symbols(np.array([[[1.0, -2.0]], [[0.4, 0.0]]]), 2)
    >>> scale.tolist(), found.ravel().tolist()
    ([2.0], [3, 0, 2, 2])
    """
    largest = np.abs(rows).max((0, 2))
    if not largest.max(initial=0.0) < np.finfo(np.float16).max:
        raise InputError(
            f"keys and values up to {largest.max():.3g} are beyond what float16 holds, expected at most "
            "65504: give coder='range'"
        )
    scale = largest.astype(np.float16)
    by = np.where(scale > 0, scale, 1).astype(np.float32)[None, :, None]
    whole = np.clip(np.rint(rows / by * most), -most, most).astype(np.int32) + most
    return scale, np.ascontiguousarray(np.moveaxis(whole, 1, 2).reshape(-1, rows.shape[1]))


def _model(count: Int[np.ndarray, "C"], most: int) -> object:
    """Frequencies in which every symbol occurs."""
    chances = count[: 2 * most + 1].astype(np.float32) + np.float32(0.5)
    return library().stream.model.Categorical(chances / chances.sum(), perfect=False)
