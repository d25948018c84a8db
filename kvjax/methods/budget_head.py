"""Budgets that differ between the heads of a layer."""

from __future__ import annotations

from typing import Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import AcrossHeads
from kvjax.keep.patterns import Recent
from kvjax.methods.papers import Press, paper
from kvjax.methods.shared import Amount, Kernel, Page, Share, Window, pick, window_score


@paper(
    "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
    arxiv="2407.11550",
    family="budget-head",
    exact="equal",
    kvpress=Press("AdaKVPress(SnapKVPress)", "variant=kvpress", "yes, and ours frees the memory"),
    aliases=("ada-kv",),
)
def adakv(
    budget: Amount,
    *,
    window: Window = 64,
    kernel: Kernel = 5,
    floor: Share = 0.2,
    page: Page = 128,
    variant: Literal["paper", "kvpress"] = "paper",
) -> Method:
    """Ada-KV (Feng et al., 2024, arXiv:2407.11550), Algorithm 1 over SnapKV scores: unequal heads.

    A layer's K * budget best slots decide how many each head keeps, with a floor per head; slots lie in
    pages per (row, head), so unequal heads cost unequal bytes. "paper" blends the counts with the floor;
    "kvpress" gives each head its floor of best slots first. Both use one score per KV head.
    """
    score = window_score(window, kernel, variant)
    blend = pick(variant, paper=True, kvpress=False)
    keep = Keep(score, Budget(budget), AcrossHeads(floor, blend), (Recent(window),), page=page)
    return Method(keep)
