"""AsymGQA's search: heads move to groups of heads that are like them, and the best groups are kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvjax.train.conversion.grouping.products import Products, canonical, check_count, cosine, pooling_error


def asymgqa(
    products: Products,
    groups: int,
    *,
    loss: Callable[[tuple[int, ...]], float] | None = None,
    iterations: int = 2000,
    nearest: int = 3,
    accept: float = 0.01,
    restart: float = 0.01,
    swap: float = 0.2,
    seed: int = 0,
) -> tuple[int, ...]:
    """Find groups of unequal size by a guided random search (Chen et al., 2024, arXiv:2406.14963).

    From random groups of equal size, a random head a is drawn, and b among the `nearest` heads outside its
    group by cosine similarity of activations. Head a moves into b's group or, with probability `swap`,
    changes places with another head of it. New groups are accepted if they improve on the previous ones, and
    with probability `accept` if not; with probability `restart` all are drawn again. swap=1 is the symmetric
    form, in which group sizes never change. Keys and values are grouped each on their own, or together by the
    sum of their products.

    Differences: the paper scores groups by the accuracy of the converted model, which `loss` may do; without
    it, the loss is the pooling error of the heads at one length. The paper's algorithm was out of reach, and
    the moves follow public code of the search. There, a changes places with b itself, which separates the two
    again; the probability of keeping sizes in the unequal form, `swap` here, is named but not used; and only
    what beats the best so far is taken, accept and restart are 0.1, in ten iterations per layer.

    Raises ValueError if the heads cannot form that many groups.

    >>> heads = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [1.0, 0.1]])
    >>> asymgqa(heads @ heads.T, 2)
    (0, 0, 1, 0)
    """
    n = len(products)
    check_count(groups, n)
    similar = cosine(products)
    cost = loss or (lambda g: pooling_error(similar, g))
    rng = np.random.default_rng(seed)
    now = _random(rng, n, groups)
    reached = cost(canonical(now))
    best, least = canonical(now), reached
    if groups in (1, n):
        return best
    for _ in range(iterations):
        if rng.random() < restart:
            now = _random(rng, n, groups)
            reached = cost(canonical(now))
        new = _moved(rng, now, similar, nearest, swap)
        found = cost(canonical(new))
        if found < reached or rng.random() < accept:
            now, reached = new, found
        if found < least:
            best, least = canonical(new), found
    return best


def _random(rng: np.random.Generator, n: int, groups: int) -> np.ndarray:
    """Draw groups whose sizes differ by one at most."""
    return rng.permutation(np.arange(n) % groups)


def _moved(
    rng: np.random.Generator, now: np.ndarray, similar: Products, nearest: int, swap: float
) -> np.ndarray:
    a = rng.integers(len(now))
    others = np.flatnonzero(now != now[a])
    b = rng.choice(others[np.argsort(-similar[a, others], kind="stable")][:nearest])
    new = now.copy()
    new[a] = now[b]
    # The last head of a group may only swap, or there would be a group less than was asked for.
    if rng.random() < swap or (now == now[a]).sum() == 1:
        members = np.flatnonzero(now == now[b])
        new[rng.choice(members[members != b] if len(members) > 1 else members)] = now[a]
    return new
