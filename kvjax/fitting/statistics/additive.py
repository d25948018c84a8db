"""Codebooks whose sums commute with RoPE, stage by stage, by expectation and maximisation (CommVQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Complex, Float

from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.store.additive import CommutingSums

# How many rows of a head a stage is fitted to, and how many iterations it takes.
ROWS, TURNS = 2048, 10
# Rows whose pairs are compared at a time.
STRIP = 64


def fit_sums(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    channels: int | None = None,
    bits: int | None = None,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the codebooks of keys, before RoPE, and of values of every head, in one pass (arXiv:2506.18879).

    channels, bits: those of the method unless they are given. Raises InputError for a model whose layers are
    not all plain attention with slots of their own, for heads of an odd number of channels, for bits or
    channels that do not exist, and for texts with fewer tokens than a codebook has vectors.
    """
    only_slots(model, "codebooks")
    own = [word for word in words_of(method) if isinstance(word, CommutingSums)]
    channels = own[0].channels if channels is None else channels
    bits = own[0].bits if bits is None else bits
    try:
        stages = CommutingSums(channels, bits, "key").stages(model.config.head_dim)
    except ValueError as error:
        raise InputError(f"channels={channels}, bits={bits}: {error}") from error
    if model.config.head_dim % 2:
        raise InputError(f"heads have {model.config.head_dim} channels, expected pairs, which RoPE rotates")
    read = read_keys_values(model, batches, progress, raw=True)
    if read.k.shape[2] < 2**bits:
        raise InputError(
            f"the texts have {read.k.shape[2]} tokens, expected at least one for each of {2**bits} vectors: "
            "give more"
        )
    rng, found = np.random.RandomState(seed), {}
    for of, x in (("key", read.k), ("value", read.v)):
        layers, heads, tokens, width = x.shape
        drawn = rng.permutation(tokens)[:ROWS]
        books = np.empty((layers, heads, stages, 2**bits, width), np.float32)
        for at in progress(list(np.ndindex(layers, heads))):
            half = np.split(x[at][drawn].astype(np.float64), 2, -1)
            fits = codebooks(half[0] + 1j * half[1], stages, 2**bits, rng)
            books[at] = np.concatenate([np.real(fits), np.imag(fits)], -1)
        found[f"{of} codebooks"] = books
    return Fitted(found, "CommutingSums", model.signature)


def codebooks(
    rows: Complex[np.ndarray, "T P"], stages: int, entries: int, rng: np.random.RandomState
) -> Complex[np.ndarray, "R C P"]:
    """Codebooks c_r with small sum |x - sum_r (c_r[a_r] + i c_r[b_r])|^2; each stage fits what is left.

    A pair of channels is one complex number, and a right angle a factor i.
    """
    out, left = [], rows
    for _ in range(stages):
        book = stage(left, entries, rng)
        left = left - _sums(book, nearest(left, book))
        out.append(book)
    return np.stack(out)


def stage(
    rows: Complex[np.ndarray, "T P"], entries: int, rng: np.random.RandomState
) -> Complex[np.ndarray, "C P"]:
    """One codebook, by expectation and maximisation with a temperature that falls to 0.

    Expectation: pairs (a, b) have chances that fall with their distance over the temperature; maximisation:
    the least squares solution for the codebook. A vector without rows stays.
    """
    book = rows[rng.randint(0, len(rows), entries)] / 2
    heat = np.square(np.abs(rows)).sum(-1).mean() / 8
    for turn in range(TURNS):
        first, second, pairs = chances(rows, book, 0.0 if turn + 2 >= TURNS else heat * 2.0**-turn)
        # G c = h, with g = e_a + i e_b for a pair (a, b): sums of conj(g) g' and conj(g) x.
        both = 1j * pairs
        gram = np.diag(first.sum(0) + second.sum(0)) + both + both.conj().T
        heard = (first - 1j * second).T @ rows
        ridge = 1e-6 * len(rows) / entries
        book = np.linalg.solve(gram + ridge * np.eye(entries), heard + ridge * book)
    return book


class Chances(NamedTuple):
    """The chances p[t, a, b] of every pair of a row, summed over b, over a, and over the rows."""

    first: Float[np.ndarray, "T C"]
    second: Float[np.ndarray, "T C"]
    pairs: Float[np.ndarray, "C C"]


def chances(rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"], heat: float) -> Chances:
    """Compute the chances of pairs; at temperature 0 the nearest pair of a row has all of it.

    A distance is d1[t, a] + d2[t, b] + d3[a, b], so exp of it is a product, and sums over a or b are products
    of matrices, which take a twentieth of the time of an array [T, C, C].
    """
    entries = len(book)
    if heat <= 0:
        a, b = nearest(rows, book).T
        counts = np.bincount(a * entries + b, minlength=entries**2).reshape(entries, entries)
        return Chances(np.eye(entries)[a], np.eye(entries)[b], counts.astype(float))
    *each, joint = distances(rows, book)
    one, two = (np.exp((x.min(-1, keepdims=True) - x) / heat) for x in each)
    both = np.exp((joint.min() - joint) / heat)
    share = np.einsum("ta,ta->t", one, two @ both.T)
    lost = share < 1e-200
    one = one / np.where(lost, 1.0, share)[:, None] * ~lost[:, None]
    soft = Chances(one * (two @ both.T), two * (one @ both), both * (one.T @ two))
    # In the remaining rows all products underflow, so the pairs of vectors are computed one by one.
    for mine in np.array_split(np.flatnonzero(lost), -(-lost.sum() // STRIP) or 1):
        one, two, joint = distances(rows[mine], book)
        far = one[:, :, None] + (two[:, None] + joint)
        chance = np.exp((far.min((1, 2), keepdims=True) - far) / heat)
        chance /= chance.sum((1, 2), keepdims=True)
        soft.first[mine], soft.second[mine] = chance.sum(2), chance.sum(1)
        soft.pairs[:] += chance.sum(0)
    return soft


def distances(
    rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"]
) -> tuple[Float[np.ndarray, "T C"], Float[np.ndarray, "T C"], Float[np.ndarray, "C C"]]:
    """Compute the parts of |x - c[a] - i c[b]|^2 - |x|^2 that depend on x and a, on x and b, on a and b."""
    met = rows @ book.conj().T
    own = np.square(np.abs(book)).sum(-1)
    both = 2 * np.real(book @ (1j * book).conj().T)
    return own - 2 * np.real(met), own - 2 * np.imag(met), both


def nearest(rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"]) -> np.ndarray:
    """Find the nearest pair of every row, [T, 2]."""
    one, two, both = (x.astype(np.float32) for x in distances(rows, book))
    found = np.empty((len(rows), 2), int)
    for t in range(0, len(rows), STRIP):
        far = one[t : t + STRIP, :, None] + (two[t : t + STRIP, None, :] + both)
        found[t : t + STRIP] = np.stack(np.divmod(far.reshape(len(far), -1).argmin(-1), len(book)), -1)
    return found


def _sums(book: Complex[np.ndarray, "C P"], pairs: np.ndarray) -> Complex[np.ndarray, "T P"]:
    return book[pairs[:, 0]] + 1j * book[pairs[:, 1]]
