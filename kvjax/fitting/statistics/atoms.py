"""Dictionaries of keys and values whose sparse sums are near them (CSR)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.store.atoms import Atoms

# How many rows of a layer a dictionary is fitted to, and how many iterations the fit takes.
ROWS, TURNS = 8192, 10


def fit_atoms(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    size: int = 512,
    seed: int = 0,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit `size` atoms to the keys, and to the values, of each layer, in one pass over the texts.

    Alternates matching pursuit with the least squares solution for the atoms (the method of optimal
    directions), from drawn rows; an atom that no row uses becomes the row of the largest error. Raises
    InputError for a model whose layers are not all plain attention with slots of their own, and for texts of
    fewer rows than atoms.
    """
    only_slots(model, "dictionaries")
    (count,) = {word.count for word in words_of(method) if isinstance(word, Atoms)}
    raw = method.store is not None and method.store.unrotated
    read = read_keys_values(model, batches, progress, raw)
    rng, found = np.random.RandomState(seed), {}
    for of, x in (("key", read.k), ("value", read.v)):
        layers, heads, tokens, width = x.shape
        if not size <= min(heads * tokens, 65536):
            raise InputError(
                f"size is {size}, expected at most {min(heads * tokens, 65536)}, the keys of a layer in the "
                "texts: give a smaller one or more texts"
            )
        drawn = rng.permutation(heads * tokens)[:ROWS]
        rows = x.reshape(layers, heads * tokens, width)[:, drawn].astype(np.float64)
        found[f"{of} atoms"] = np.stack([dictionary(one, size, count) for one in rows]).astype(np.float32)
    return Fitted(found, "Atoms", model.signature)


def dictionary(rows: Float[np.ndarray, "R H"], size: int, count: int) -> Float[np.ndarray, "N H"]:
    """Find unit vectors, `count` of which, weighted, approximately add up to each of these rows."""
    atoms = _unit(rows[:size])
    for _ in range(TURNS):
        index, weight = pursuit(rows, atoms, count)
        sparse = np.zeros((len(rows), len(atoms)))
        np.add.at(sparse, (np.arange(len(rows))[:, None], index), weight)
        used = np.square(sparse).sum(0) > 0
        gram = sparse.T @ sparse + 1e-6 * np.square(sparse).sum() / len(atoms) * np.eye(len(atoms))
        new = np.linalg.solve(gram, sparse.T @ rows)
        worst = np.argsort(-np.square(rows - sparse @ atoms).sum(-1), kind="stable")
        new[~used] = rows[worst[: (~used).sum()]]
        atoms = _unit(new)
    return atoms


def pursuit(
    rows: Float[np.ndarray, "R H"], atoms: Float[np.ndarray, "N H"], count: int
) -> tuple[Int[np.ndarray, "R c"], Float[np.ndarray, "R c"]]:
    """Find indices and weights by matching pursuit.

    >>> pursuit(np.array([[3.0, -1.0]]), np.eye(2), 1)[1].tolist()
    [[3.0]]
    """
    left, index, weight = rows.copy(), [], []
    for _ in range(count):
        met = left @ atoms.T
        best = np.abs(met).argmax(-1)
        w = met[np.arange(len(rows)), best]
        left = left - w[:, None] * atoms[best]
        index, weight = [*index, best], [*weight, w]
    return np.stack(index, -1), np.stack(weight, -1)


def _unit(x: Float[np.ndarray, "N H"]) -> Float[np.ndarray, "N H"]:
    """Rows divided by their lengths; the first unit vector in place of a row of zeros."""
    size = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.where(size > 0, x / np.where(size > 0, size, 1.0), np.eye(1, x.shape[-1]))
