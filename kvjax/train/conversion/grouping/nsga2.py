"""NSGA-II over integer genes: the front of two or more objectives, all to be small."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Genes = Int[np.ndarray, "P G"]
Objectives = Float[np.ndarray, "P M"]


class Evolution(NamedTuple):
    """The search's length and rates: the defaults of QCQA's reproduction; mutation None is 1 / genes."""

    population: int = 100
    generations: int = 100
    crossover: float = 0.9
    mutation: float | None = None
    seed: int = 0


class Front(NamedTuple):
    """Solutions that no other found one dominates, by their first objective."""

    genes: Genes
    objectives: Objectives


def nsga2(
    evaluate: Callable[[Genes], Objectives],
    choices: Int[np.ndarray, "G"],
    start: Genes,
    evolution: Evolution,
    normal: Callable[[Genes], Genes] = lambda genes: genes,
) -> Front:
    """NSGA-II (Deb et al., 2002, IEEE TEC 6(2)): ranks by fronts, crowding within them, elitism.

    Gene g takes the values 0 .. choices[g] - 1. The first population is `start` and random genes; `normal`
    maps equivalent solutions to one form, so that duplicates are dropped. Parents win binary tournaments,
    cross at two points and mutate genes to random values; the paper's operators are for real numbers, and
    genes here are categories.

    >>> def evaluate(genes):
    ...     x = genes[:, 0].astype(float)
    ...     return np.stack([x, (x - 2) ** 2], 1)
    >>> front = nsga2(evaluate, np.array([9]), np.array([[8]]), Evolution(20, 10))
    >>> front.genes[:, 0].tolist()
    [0, 1, 2]
    """
    rng = np.random.default_rng(evolution.seed)
    drawn = rng.integers(choices, size=(evolution.population, len(choices)))
    genes = np.unique(normal(np.concatenate([start, drawn])), axis=0)
    values = evaluate(genes)
    for _ in range(evolution.generations):
        rank, crowd = _fitness(values)
        children = normal(_mutated(rng, crossed(rng, genes, rank, crowd, evolution), choices, evolution))
        fresh = _unseen(children, genes)
        if len(fresh):
            genes, values = np.concatenate([genes, fresh]), np.concatenate([values, evaluate(fresh)])
        rank, crowd = _fitness(values)
        keep = np.lexsort((-crowd, rank))[: evolution.population]
        genes, values = genes[keep], values[keep]
    best = np.flatnonzero(fronts(values) == 0)
    best = best[np.unique(values[best], axis=0, return_index=True)[1]]
    return Front(genes[best], values[best])


def fronts(values: Objectives) -> Int[np.ndarray, "P"]:
    """Return the front of every solution: 0 if none dominates it, 1 if only those of front 0 do, ...

    A solution dominates another if no objective of it is larger and at least one is smaller.

    >>> fronts(np.array([[0.0, 2.0], [1.0, 1.0], [1.0, 2.0]])).tolist()
    [0, 0, 1]
    """
    below = np.all(values[:, None] <= values, axis=-1) & np.any(values[:, None] < values, axis=-1)
    front, level = np.full(len(values), -1), 0
    while (front < 0).any():
        left = front < 0
        front[left & ~below[left].any(0)] = level
        level += 1
    return front


def crowding(values: Objectives) -> Float[np.ndarray, "P"]:
    """Sum the distance of the two neighbours in every objective, per its range; infinite at the ends.

    >>> crowding(np.array([[0.0, 4.0], [1.0, 1.0], [4.0, 0.0]])).tolist()
    [inf, 2.0, inf]
    """
    out = np.zeros(len(values))
    for x in values.T:
        order = np.argsort(x, kind="stable")
        span = x[order[-1]] - x[order[0]] or 1.0
        out[order[1:-1]] += (x[order[2:]] - x[order[:-2]]) / span
        out[order[[0, -1]]] = np.inf
    return out


def crossed(
    rng: np.random.Generator, genes: Genes, rank: np.ndarray, crowd: np.ndarray, evolution: Evolution
) -> Int[np.ndarray, "C G"]:
    """Children of tournament winners: the first parent, with a stretch of genes from the second.

    Of two drawn at random, the one of lower rank wins, or of larger crowding distance where ranks are equal.
    """
    place = np.empty(len(genes), int)
    place[np.lexsort((-crowd, rank))] = np.arange(len(genes))
    drawn = rng.integers(len(genes), size=(2, evolution.population, 2))
    first, second = np.take_along_axis(drawn, place[drawn].argmin(-1)[..., None], -1)[..., 0]
    ends = np.sort(rng.integers(genes.shape[1] + 1, size=(evolution.population, 2)), axis=1)
    at = np.arange(genes.shape[1])
    inside = (at >= ends[:, :1]) & (at < ends[:, 1:])
    inside &= rng.random((evolution.population, 1)) < evolution.crossover
    return np.where(inside, genes[second], genes[first])


def _fitness(values: Objectives) -> tuple[np.ndarray, np.ndarray]:
    rank, crowd = fronts(values), np.zeros(len(values))
    for level in range(rank.max() + 1):
        crowd[rank == level] = crowding(values[rank == level])
    return rank, crowd


def _mutated(rng: np.random.Generator, genes: Genes, choices: np.ndarray, evolution: Evolution) -> Genes:
    share = 1 / genes.shape[1] if evolution.mutation is None else evolution.mutation
    return np.where(rng.random(genes.shape) < share, rng.integers(choices, size=genes.shape), genes)


def _unseen(children: Int[np.ndarray, "C G"], genes: Genes) -> Int[np.ndarray, "F G"]:
    """Find the children that are not there yet, each once."""
    known = {row.tobytes() for row in genes}
    children = np.unique(children, axis=0)
    return children[[row.tobytes() not in known for row in children]]
