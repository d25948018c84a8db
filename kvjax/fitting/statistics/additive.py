"""Codebooks whose sums commute with RoPE, stage by stage, by expectation and maximisation (CommVQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    """Fits the codebooks of keys, before RoPE, and of values of every head, in one pass (arXiv:2506.18879).

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
        chance = chances(rows, book, 0.0 if turn + 2 >= TURNS else heat * 2.0**-turn)
        first, second = chance.sum(2), chance.sum(1)
        # G c = h, with g = e_a + i e_b for a pair (a, b): sums of conj(g) g' and conj(g) x.
        both = 1j * chance.sum(0)
        gram = np.diag(first.sum(0) + second.sum(0)) + both + both.conj().T
        heard = (first - 1j * second).T @ rows
        ridge = 1e-6 * len(rows) / entries
        book = np.linalg.solve(gram + ridge * np.eye(entries), heard + ridge * book)
    return book


def chances(
    rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"], heat: float
) -> Float[np.ndarray, "T C C"]:
    """The chance of every pair (a, b) of a row; at temperature 0 the nearest pair has all of it."""
    far = distances(rows, book)
    if heat <= 0:
        out = np.zeros_like(far)
        flat = far.reshape(len(rows), -1).argmin(-1)
        out.reshape(len(rows), -1)[np.arange(len(rows)), flat] = 1.0
        return out
    chance = np.exp((far.min((1, 2), keepdims=True) - far) / heat)
    return chance / chance.sum((1, 2), keepdims=True)


def distances(
    rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"]
) -> Float[np.ndarray, "T C C"]:
    """|x - c[a] - i c[b]|^2 - |x|^2 for all pairs."""
    met = rows @ book.conj().T
    own = np.square(np.abs(book)).sum(-1)
    both = 2 * np.real(book @ (1j * book).conj().T)
    return (own - 2 * np.real(met))[:, :, None] + (own - 2 * np.imag(met))[:, None, :] + both


def nearest(rows: Complex[np.ndarray, "T P"], book: Complex[np.ndarray, "C P"]) -> np.ndarray:
    """The nearest pair of every row, [T, 2]."""
    flat = distances(rows, book).reshape(len(rows), -1).argmin(-1)
    return np.stack(np.divmod(flat, len(book)), -1)


def _sums(book: Complex[np.ndarray, "C P"], pairs: np.ndarray) -> Complex[np.ndarray, "T P"]:
    return book[pairs[:, 0]] + 1j * book[pairs[:, 1]]
