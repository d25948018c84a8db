"""Budgets that differ between layers."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import Pyramid
from kvjax.keep.patterns import Recent
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Kernel, Page, Variant, Window, per_query_head, window_score


@paper(
    "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
    arxiv="2406.02069",
    family="budget-layer",
    exact="equal",
    kvpress=Press("PyramidKVPress", "variant=kvpress"),
)
def pyramidkv(
    budget: Amount,
    *,
    window: Window = 64,
    kernel: Kernel = 5,
    beta: Annotated[float, Range(1)] = 20.0,
    page: Page = 128,
    variant: Variant = "grouped",
) -> Method:
    """PyramidKV (Cai et al., 2024, arXiv:2406.02069), section 4: SnapKV scores, pyramidal layer budgets.

    Layer budgets fall linearly with depth around the mean `budget`; slots lie in one pool, so the bytes
    are those of the sum. See `Pyramid` for the counts, and `snapkv` for what the variants keep and cost.
    """
    counts = "kvpress" if variant == "kvpress" else "paper"
    keep = Keep(
        window_score(window, kernel, variant),
        Budget(budget),
        Pyramid(beta, window, counts, Budget(budget)),
        (Recent(window),),
        per_query_head=per_query_head(variant),
        page=page,
    )
    return Method(keep)
