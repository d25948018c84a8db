"""What several papers share: types of hyper-parameters, the choice of a published variant, SnapKV's score."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted
from kvjax.keep.algebra import Pool, Pooled
from kvjax.keep.scores.score import WindowAttention
from kvjax.methods.parameters import CountOrShare, Range

# A fraction of the tokens kept (float in (0, 1]), or slots per head (int >= 1).
Amount = Annotated[float | int, Budget]
# How many of the newest tokens are used as queries.
Window = Annotated[int, Range(1)]
# Over how many neighbours scores are smoothed.
Kernel = Annotated[int, Range(1, odd=True)]
# A share of something, from none to all of it.
Share = Annotated[float, Range(0, 1)]
# The factor by which a range is shortened; 0 is excluded, because nothing would remain.
Ratio = Annotated[float, Range(0.01, 1)]
# A layer by its depth: a layer's number, or a share of the layers.
Depth = Annotated[int | float, CountOrShare(0)]
# A number of tokens or layers, which may be 0.
Tokens = Annotated[int, Range(0)]
Layers = Annotated[int, Range(0)]
# How many slots a page has; None chooses it by the slots of a KV head (`kvjax.compress.pages.page_of`). Every
# head allocates the whole of its last page, so a page of a million tokens is a mistake.
Page = Annotated[int, Range(1, 65536)]
# How many channels or tokens are quantised together.
Group = Annotated[int, Range(1)]
Bits = Literal[1, 2, 4, 8]
# The rank of a low-rank matrix, and how many iterations compute it.
Rank = Annotated[int, Range(1)]
Turns = Annotated[int, Range(1, 100)]
# The file that `kvjax fit` wrote, or the result of kvjax.fit.
Fit = Annotated[str | Fitted, Fitted]
Seed = Annotated[int, Range(0, 2**32 - 1)]
# How many hyperplanes a hash has; its code is a word of 32 bits.
Planes = Annotated[int, Range(1, 32)]
TokenIds = Annotated[tuple[int, ...], Range(0)]
# Which published form of SnapKV's selection: see `window_score`.
Variant = Literal["grouped", "paper", "kvpress"]

T = TypeVar("T")


def pick(variant: str, **known: T) -> T:
    """Pick the entry of `known` named `variant`; ValueError, with the known names, if it is missing.

    >>> pick("paper", paper=1, kvpress=2)
    1
    """
    if variant not in known:
        raise ValueError(f"variant must be one of {', '.join(map(repr, known))}, got {variant!r}")
    return known[variant]


def window_score(window: int, kernel: int, variant: str) -> Pooled:
    """SnapKV's score: the attention of the last `window` queries, smoothed over `kernel` neighbours.

    "grouped" and "paper": summed over the window and smoothed by the maximum; "kvpress": by the mean, both
    times. For a KV head, the query heads of its group are averaged, which ranks slots like their sum.
    """
    pool, reduce = pick(variant, grouped=("max", "sum"), paper=("max", "sum"), kvpress=("mean", "mean"))
    return WindowAttention(window, reduce=reduce) >> Pool(kernel, pool)


def per_query_head(variant: str) -> bool:
    """Whether a variant of SnapKV selects for every query head ("paper") or for every KV head."""
    return pick(variant, grouped=False, paper=True, kvpress=False)
