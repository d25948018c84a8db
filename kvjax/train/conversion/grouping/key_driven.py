"""Key-driven GQA: KV heads with longer keys serve more query heads.

The heads are pooled first (`pool_heads`); `key_norms` of that model gives the shares, `group_heads` applies
them.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from kvjax.train.conversion.convert import Grouping

Norms = Float[np.ndarray, "K"]


def kdgqa(norms: Norms, heads: int, *, least: int = 0) -> Grouping:
    """Query heads in proportion to key norms (KDGQA; Khan et al., 2024, arXiv:2408.08454, as in its code).

    With r = (norms - min) / (max - min), KV head j serves round(heads r_j / sum r) neighbouring query heads;
    if this assigns too many heads, the largest share loses one repeatedly; if too few, the smallest gains
    one.

    The smallest norm has r = 0 and mostly loses its head, which `group_heads` removes; every KV head serves
    at least `least` query heads. Differences: the paper measures norms in every forward pass, here they are
    fixed to those from `key_norms`; where all norms are equal, so are the shares (the paper's are undefined).
    Raises ValueError if the heads do not suffice.

    >>> kdgqa(np.array([1.0, 2.0, 4.0]), 8).reads
    (1, 1, 2, 2, 2, 2, 2, 2)
    """
    _check(norms, heads, least)
    spread = norms - norms.min()
    counts = _rounded(spread, heads, least)
    while counts.sum() > heads:
        counts[np.argmax(counts)] -= 1
    while counts.sum() < heads:
        counts[np.argmin(counts)] += 1
    return _reading(counts)


def dgqa_difference(norms: Norms, earlier: Norms, heads: int, *, least: int = 1, seed: int = 0) -> Grouping:
    """Query heads in proportion to how much key norms changed, |norms - earlier| (DGQA, arXiv:2408.08454).

    Norms are measured again after every interval of training. `least=1` keeps all heads, so that parameters
    keep their shapes between intervals; the paper's code has 0. A surplus or deficit from rounding is taken
    from, or given to, random heads, as in that code. Raises ValueError if the heads do not suffice.

    >>> dgqa_difference(np.array([3.0, 2.0]), np.array([0.0, 1.0]), 4).reads
    (0, 0, 0, 1)
    """
    _check(norms, heads, least)
    return _reading(_settled(_rounded(np.abs(norms - earlier), heads, least), heads, least, seed))


def dgqa_average(
    norms: Norms, earlier: Norms, heads: int, *, beta: float = 0.9, least: int = 1, seed: int = 0
) -> Grouping:
    """Query heads in proportion to beta norms + (1 - beta) earlier (DGQA by moving averages).

    The other arguments are those of `dgqa_difference`.

    >>> dgqa_average(np.array([3.0, 1.0]), np.array([3.0, 1.0]), 4).reads
    (0, 0, 0, 1)
    """
    _check(norms, heads, least)
    return _reading(_settled(_rounded(beta * norms + (1 - beta) * earlier, heads, least), heads, least, seed))


def _check(norms: Norms, heads: int, least: int) -> None:
    if least < 0 or heads < max(1, least * len(norms)):
        raise ValueError(
            f"{heads} query heads cannot give each of {len(norms)} KV heads {least}: "
            "lower least, or pool the heads first"
        )


def _rounded(weights: Norms, heads: int, least: int) -> Int[np.ndarray, "K"]:
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    return np.maximum(np.rint(weights / weights.sum() * heads).astype(int), least)


def _settled(counts: Int[np.ndarray, "K"], heads: int, least: int, seed: int) -> Int[np.ndarray, "K"]:
    rng = np.random.default_rng(seed)
    while counts.sum() > heads:
        counts[rng.choice(np.flatnonzero(counts > least))] -= 1
    while counts.sum() < heads:
        counts[rng.integers(len(counts))] += 1
    return counts


def _reading(counts: Int[np.ndarray, "K"]) -> Grouping:
    own = tuple(range(len(counts)))
    return Grouping(own, own, tuple(np.repeat(own, counts).tolist()))
