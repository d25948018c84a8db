"""Schemes of bits.py: which numbers are coded together, in which basis and by how many bits, in numpy.

A scheme takes keys or values [L, K, S, H] of a window, and those of other windows to fit to, and gives what
comes back of its codes, the bits that a number takes with its share of ranges, and with entropy-coded codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from kvjax.fitting.loops.bases import CodeSettings, Start, through_codes
from kvjax.store.rotate import hadamard

# Numbers that share a range, and the bits of a range's two ends.
GROUP, RANGE = 64, 32
# Of a standard normal number in codes of 0 to 8 bits: the steps of least error, and the squared errors.
STEPS = (0.0, 1.596, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000818)


class Back(NamedTuple):
    """Numbers that come back of codes, bits per number, the same with entropy-coded codes, fitted numbers."""

    x: Float[np.ndarray, "L K S H"]
    bits: float
    coded: float
    fitted: int = 0


Numbers = Float[np.ndarray, "L K S H"]
Scheme = Callable[[Numbers, Numbers], Back]


def ranges(bits: int, axis: str, sinks: int = 0) -> Scheme:
    """Codes between the least and the largest number of `GROUP` channels of a token or tokens of a channel.

    sinks: first tokens that stay as they are, in 16 bits.
    """

    def scheme(x: Numbers, fit: Numbers) -> Back:
        rest = x[:, :, sinks:]
        rows = np.swapaxes(rest, -1, -2) if axis == "channel" else rest
        found, codes = _between(rows, bits)
        found = np.swapaxes(found, -1, -2) if axis == "channel" else found
        # A channel's codes share their frequencies.
        each = codes if axis == "channel" else np.swapaxes(codes, -1, -2)
        many = rows.shape[-1]
        share, side = sinks / x.shape[2], RANGE * -(-many // GROUP) / many
        plain, coded = ((1 - share) * (n + side) + 16 * share for n in (bits, entropy(each)))
        return Back(np.concatenate([x[:, :, :sinks], found], 2), plain, coded)

    return scheme


def rotated(bits: int, seed: int) -> Scheme:
    """Codes of tokens behind a Hadamard rotation of every head's channels with random signs."""
    inner = ranges(bits, "token")

    def scheme(x: Numbers, fit: Numbers) -> Back:
        turn = hadamard(x.shape[-1], seed)
        back = inner(x @ turn.T, fit)
        return back._replace(x=back.x @ turn)

    return scheme


def learnt(bits: int) -> Scheme:
    """Put the same behind a rotation and scales of a layer, learnt through the codes (FlatQuant)."""
    inner = ranges(bits, "token")

    def scheme(x: Numbers, fit: Numbers) -> Back:
        layers, heads, tokens, width = fit.shape
        turn = np.broadcast_to(hadamard(width, 0), (layers, width, width))
        start = Start(turn, np.swapaxes(turn, -1, -2), np.zeros((layers, width)), np.arange(width))
        rows = fit.reshape(layers, heads * tokens, width)
        found = through_codes(rows, start, CodeSettings(bits, min(GROUP, width), 1.0), ("skew", "scales"))
        matrix, inverse = (found[n][:, None].astype(np.float64) for n in ("matrix", "inverse"))
        back = inner(x @ inverse, fit)
        return back._replace(x=back.x @ matrix, fitted=2 * layers * width**2)

    return scheme


class Rows:
    """Main components of rows: of a token's head, of all its heads, or of its heads in all layers.

    sinks: first tokens of every window that stay as they are, in 16 bits. What was fitted last is kept, since
    it serves all numbers of bits.
    """

    def __init__(self, over: str, sinks: int = 0):
        self.over, self.sinks = over, sinks
        self.fit: Numbers | None = None

    def of(self, x: Numbers) -> Float[np.ndarray, "X S W"]:
        """Arrange the rows of lists of tokens that share a basis."""
        layers, heads, tokens, width = x.shape
        lists = {"head": layers * heads, "layer": layers, "all layers": 1}[self.over]
        return x.reshape(lists, -1, tokens, width).swapaxes(1, 2).reshape(lists, tokens, -1)

    def fitted(self, fit: Numbers, tokens: int) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        """Fit the means of rows of windows of so many tokens, and their components with variances."""
        if self.fit is not fit:
            known = self.of(fit[:, :, np.arange(fit.shape[2]) % tokens >= self.sinks])
            self.mean = known.mean(1, keepdims=True)
            self.bases, self.fit = [components(one) for one in known - self.mean], fit
        return self.mean, self.bases


def principal(bits: float, rows: Rows) -> Scheme:
    """Codes of main components of rows.

    Components have 0 to 8 bits each, `bits` per number on average, given out where they reduce the squared
    error most; each is coded in steps of its standard deviation in the fitted texts, so ranges take no bits.
    """

    def scheme(x: Numbers, fit: Numbers) -> Back:
        mean, bases = rows.fitted(fit, x.shape[2])
        given = rows.of(x[:, :, rows.sinks :])
        lists, tokens, wide = given.shape
        share = allotted(np.concatenate([size for _, size in bases]), round(bits * lists * wide))
        ends = np.cumsum([len(size) for _, size in bases])[:-1]
        back, entropies, numbers = np.empty_like(given), 0.0, 0
        for i, ((vectors, size), mine) in enumerate(zip(bases, np.split(share, ends), strict=True)):
            z, codes = gaussian((given[i] - mean[i]) @ vectors, np.sqrt(size), mine)
            back[i] = z @ vectors.T + mean[i]
            entropies += sum(entropy(codes[:, j][None]) for j in np.flatnonzero(mine))
            numbers += int((mine > 0).sum()) * wide
        layers, heads, whole, width = x.shape
        found = back.reshape(lists, tokens, -1, width).swapaxes(1, 2).reshape(layers, heads, tokens, width)
        kept = rows.sinks / whole
        plain, coded = (
            (1 - kept) * total / (lists * wide) + 16 * kept for total in (float(share.sum()), entropies)
        )
        return Back(np.concatenate([x[:, :, : rows.sinks], found], 2), plain, coded, numbers)

    return scheme


def components(rows: Float[np.ndarray, "S W"]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the main components of rows as columns [W, min(S, W)], and their variances."""
    tokens, width = rows.shape
    if tokens >= width:
        squares, vectors = np.linalg.eigh(rows.T @ rows / tokens)
        return vectors[:, ::-1], np.maximum(squares[::-1], 0.0)
    squares, inner = np.linalg.eigh(rows @ rows.T / tokens)
    # The mean is taken away, so one direction fewer than tokens has a variance.
    squares, inner = squares[:0:-1], inner[:, :0:-1]
    vectors = rows.T @ (inner / np.sqrt(np.maximum(squares, 1e-30) * tokens))
    return vectors, np.maximum(squares, 0.0)


def allotted(variances: Float[np.ndarray, "C"], total: int) -> Int[np.ndarray, "C"]:
    """Bits of components that sum to `total`, at most 8 each, for the least sum of squared errors.

    Gains fall with every bit of a component, so the largest gains of all are the optimum.
    """
    gains = variances[:, None] * -np.diff(ERRORS)
    best = np.argsort(-gains, axis=None, kind="stable")[:total]
    return np.bincount(best // gains.shape[1], minlength=len(variances))


def gaussian(
    z: Float[np.ndarray, "S C"], sizes: Float[np.ndarray, "C"], bits: Int[np.ndarray, "C"]
) -> tuple[Float[np.ndarray, "S C"], Int[np.ndarray, "S C"]]:
    """Numbers that come back of codes of the nearest of 2^bits even steps around 0, and the codes."""
    step = np.maximum(sizes * np.array(STEPS)[bits], 1e-30)
    most = 2.0 ** (bits - 1)
    codes = np.clip(np.floor(z / step), -most, most - 1)
    return np.where(bits > 0, (codes + 0.5) * step, 0.0), np.where(bits > 0, codes, 0).astype(np.int64)


def _between(rows: Float[np.ndarray, "*b N"], bits: int) -> tuple[np.ndarray, Int[np.ndarray, "*b N"]]:
    """Numbers that come back of codes between the float16 ends of each `GROUP`, and the codes."""
    n = rows.shape[-1]
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -n % GROUP)], mode="edge")
    groups = padded.reshape(*rows.shape[:-1], -1, GROUP)
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
    step = (groups.max(-1, keepdims=True) - low) / (2**bits - 1)
    step = step.astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint((groups - low) / np.where(step > 0, step, 1.0)), 0, 2**bits - 1)
    back = (codes * step + low).reshape(padded.shape)[..., :n]
    return back, codes.astype(np.int64).reshape(padded.shape)[..., :n]


def entropy(codes: Int[np.ndarray, "*b S"]) -> float:
    """Compute the mean, over lines of codes, of the entropy of their frequencies, in bits per code."""
    lines = codes.reshape(-1, codes.shape[-1])
    lines = lines - lines.min()
    most = int(lines.max()) + 1
    counts = np.bincount((np.arange(len(lines))[:, None] * most + lines).ravel(), minlength=len(lines) * most)
    shares = counts.reshape(len(lines), most) / codes.shape[-1]
    return float(-(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(1).mean())
