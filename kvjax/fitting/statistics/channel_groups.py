"""Groups of a head's channels that are alike, by k-means (SKVQ)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.levels import only_slots, words_of
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.models.model import Model
from kvjax.store.clustered import Clustered

# Initial centres that are tried, and the steps of each, after which clusters of so few points stay.
STARTS, TURNS = 10, 50


def fit_groups(
    model: Model,
    batches: list[list[list[int]]],
    *,
    method: Method,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = iter,
) -> Fitted:
    """Fit the group of every channel, in one pass over the texts (arXiv:2405.06219, section 3).

    A channel is the point (min, max) of its numbers in all texts, and the channels of a head are clustered by
    k-means of `STARTS` starts. Raises InputError for a model whose layers are not all plain attention with
    slots of their own, and for a group that does not divide a head.
    """
    only_slots(model, "groups of channels")
    own = [word for word in words_of(method) if isinstance(word, Clustered)]
    counts = [word.groups(model.config.head_dim) for word in own]
    assert method.store is not None
    read = read_keys_values(model, batches, progress, method.store.unrotated)
    found: dict[str, np.ndarray] = {}
    for word, count in zip(own, counts, strict=True):
        x = read.k if word.of == "key" else read.v
        points = np.stack([x.min(2), x.max(2)], -1).astype(np.float64)
        found[word.name] = np.stack([[clustered(head, count) for head in layer] for layer in points])
    return Fitted(found, "Clustered", model.signature)


def clustered(points: Float[np.ndarray, "H 2"], count: int) -> Int[np.ndarray, "H"]:
    """Divide points among `count` groups, none empty, with a small sum of squared distances to their means.

    Where points are too few to differ `count` times, a group without any takes one of the largest.

    >>> clustered(np.array([[0.0, 1.0], [5.0, 9.0], [0.1, 1.0], [5.0, 9.1]]), 2).tolist()
    [0, 1, 0, 1]
    """
    different, label = np.unique(points, axis=0, return_inverse=True)
    label = label.ravel()
    if len(different) > count:
        starts = [
            kmeans2(points, count, TURNS, minit="++", missing="warn", rng=np.random.default_rng(seed))
            for seed in range(STARTS)
        ]
        label = min(starts, key=lambda found: np.square(points - found[0][found[1]]).sum())[1]
    for empty in np.setdiff1d(np.arange(count), label):
        label[np.flatnonzero(label == np.bincount(label).argmax())[-1]] = empty
    # Groups are numbered by their first channels.
    first = np.unique(label, return_index=True)[1]
    return np.argsort(np.argsort(first))[label].astype(np.int32)
