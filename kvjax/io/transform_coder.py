"""KVTC: main components of a token's keys, or values, in all layers, in bits that were found for each."""

from __future__ import annotations

import zlib

import numpy as np
from jaxtyping import Float, UInt8

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted
from kvjax.io.chunks import Numbers

WORD = "TransformCoder"
# Components whose bits are found together, and the sizes of groups that share a range, in as many of these.
UNIT = 16
GROUPS, BITS = (1, 4, 16, 64), (1, 2, 4, 8)


class TransformCoder:
    """Transform coding (KVTC, arXiv:2511.01815): y = (x - mean) V, ranges and codes of groups of y, deflate.

    x are the keys before RoPE, or the values, of all layers and heads of a token, V main components of a few
    texts. A group of components has 0, 1, 2, 4 or 8 bits and, for every token, a least number and a step in
    float16. fitted: "key mean", "value mean" [1, W], "key basis", "value basis" [1, W, R], "key groups",
    "value groups" [1, G, 2] with sizes and bits, "turns" [L, h], the angle of each pair of channels per
    position, "whole" [1, 2], how many first and newest tokens stay as they are, and "sizes" [1, 3].
    """

    qualities = 1

    def __init__(self, fitted: Fitted):
        arrays = {name: np.asarray(x) for name, x in fitted.arrays.items()}
        layers, heads, width = (int(n) for n in arrays["sizes"][0])
        self.sizes = layers, heads, width
        self.sinks, self.newest = (int(n) for n in arrays["whole"][0])
        self.turns = arrays["turns"].astype(np.float64)
        self.sides = [
            tuple(arrays[f"{of} {name}"][0] for name in ("mean", "basis", "groups"))
            for of in ("key", "value")
        ]

    def encode(self, k: Numbers, v: Numbers, start: int, quality: int) -> bytes:
        """Encode a chunk whose first token is at position `start` as bytes."""
        parts: list[bytes] = []
        for x, (mean, basis, groups) in zip((turned(k, self.turns, start, -1), v), self.sides, strict=True):
            y, at = (rows_of(x) - mean) @ basis, 0
            for size, bits in groups:
                if bits:
                    low, step, codes = quantised(y[:, at : at + size], int(bits))
                    parts += [low.tobytes(), step.tobytes(), codes.T.tobytes()]
                at += size
        return zlib.compress(b"".join(parts), 9)

    def decode(self, data: bytes, tokens: int, start: int, quality: int) -> tuple[Numbers, Numbers]:
        """Keys, rotated, and values. ValueError for other bytes than `encode` gives."""
        asked = sum(tokens * (4 + size) for _, _, groups in self.sides for size, bits in groups if bits)
        raw = zlib.decompressobj().decompress(data, asked + 1)
        if len(raw) != asked:
            raise ValueError(f"{len(raw)} bytes of codes, expected {asked}")
        out, place = [], 0
        for mean, basis, groups in self.sides:
            y, at = np.zeros((tokens, basis.shape[1]), np.float32), 0
            for size, bits in groups:
                if bits:
                    ends = [place, place + 2 * tokens, place + 4 * tokens, place + (4 + size) * tokens]
                    low, step = (
                        np.frombuffer(raw[a:b], np.float16) for a, b in zip(ends, ends[1:3], strict=False)
                    )
                    codes = np.frombuffer(raw[ends[2] : ends[3]], np.uint8).reshape(size, tokens).T
                    y[:, at : at + size] = dequantised(low, step, codes)
                    place = ends[3]
                at += size
            out.append(numbers_of(y @ basis.T + mean, self.sizes))
        return turned(out[0], self.turns, start, 1), out[1]


def rows_of(x: Numbers) -> Float[np.ndarray, "T W"]:
    """Arrange what all layers and heads hold of a token side by side."""
    return np.moveaxis(x, 2, 0).reshape(x.shape[2], -1)


def numbers_of(rows: Float[np.ndarray, "T W"], sizes: tuple[int, ...]) -> Numbers:
    """Invert `rows_of`."""
    layers, heads, width = sizes
    return np.moveaxis(rows.reshape(-1, layers, heads, width), 0, 2).astype(np.float32)


def turned(x: Numbers, turns: Float[np.ndarray, "L h"], start: int, sign: int) -> Numbers:
    """Keys rotated by their positions from `start` on (sign 1) or back (-1), in pairs (i, i + h)."""
    half = turns.shape[1]
    angle = sign * (start + np.arange(x.shape[2]))[:, None] * turns[:, None, None, :]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


def quantised(
    y: Float[np.ndarray, "T G"], bits: int
) -> tuple[np.ndarray, np.ndarray, UInt8[np.ndarray, "T G"]]:
    """Quantise; return the least number and the step of every token's group, in float16, and its codes."""
    if not np.abs(y).max(initial=0.0) < np.finfo(np.float16).max:
        raise InputError(
            f"main components up to {np.abs(y).max():.3g} are beyond what float16 holds, expected at most "
            "65504: give coder='range'"
        )
    low = y.min(-1).astype(np.float16)
    step = ((y.max(-1) - low) / (2**bits - 1)).astype(np.float16)
    by = np.where(step > 0, step, 1).astype(np.float32)[:, None]
    codes = np.clip(np.rint((y - low.astype(np.float32)[:, None]) / by), 0, 2**bits - 1)
    return low, step, codes.astype(np.uint8)


def dequantised(low: np.ndarray, step: np.ndarray, codes: np.ndarray) -> Float[np.ndarray, "T G"]:
    """Decode what `quantised` gives."""
    return low.astype(np.float32)[:, None] + step.astype(np.float32)[:, None] * codes


def allotted(
    errors: dict[tuple[int, int], Float[np.ndarray, "n"]], energy: Float[np.ndarray, "n"], budget: int
) -> list[tuple[int, int]]:
    """(size in units, bits) of groups, from the first component on, by dynamic programming.

    They have the least sum of errors. errors: by (size, bits), of a group that begins at unit i; energy: the
    error of unit i in no bits. budget: of a token, in units of 16 bits: a group of n units takes n times its
    bits, and two more for its range.
    """
    count = len(energy)
    best = np.zeros((count + 1, budget + 1))
    choice = np.zeros((count, budget + 1), int)
    options = [(1, 0), *errors]
    for i in reversed(range(count)):
        each = np.full((len(options), budget + 1), np.inf)
        each[0] = energy[i] + best[i + 1]
        for j, (size, bits) in enumerate(options[1:], 1):
            cost = size * bits + 2
            if i + size <= count and cost <= budget:
                each[j, cost:] = errors[size, bits][i] + best[i + size, : budget + 1 - cost]
        best[i], choice[i] = each.min(0), each.argmin(0)
    found, i, left = [], 0, budget
    while i < count:
        size, bits = options[choice[i, left]]
        found.append((size, bits))
        i, left = i + size, left - (size * bits + 2 if bits else 0)
    return found
