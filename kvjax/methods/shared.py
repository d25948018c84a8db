"""What several papers share: the type of a budget, the choice of a published variant, SnapKV's score."""

from __future__ import annotations

from typing import TypeVar

from kvjax.grammar import Score
from kvjax.keep.score import Pool, WindowAttention

# A fraction of the tokens kept (float in (0, 1]), or slots per head (int >= 1).
Amount = float | int
T = TypeVar("T")


def pick(variant: str, **known: T) -> T:
    """The entry of `known` named `variant`; ValueError with the known names where there is none.

    >>> pick("paper", paper=1, kvpress=2)
    1
    """
    if variant not in known:
        raise ValueError(f"variant must be one of {', '.join(map(repr, known))}, got {variant!r}")
    return known[variant]


def window_score(window: int, kernel: int, variant: str) -> Score:
    """SnapKV's score: the attention of the last `window` queries, smoothed over `kernel` neighbours.

    "paper": summed over the window and smoothed by the maximum; "kvpress": by the mean, both times.
    """
    pool, reduce = pick(variant, paper=("max", "sum"), kvpress=("mean", "mean"))
    return WindowAttention(window, reduce=reduce) >> Pool(kernel, pool)


def per_query_head(variant: str) -> bool:
    """Whether a variant of SnapKV selects for every query head ("paper") or for every KV head ("kvpress")."""
    return pick(variant, paper=True, kvpress=False)
