"""Merging: tokens that leave are folded into tokens that stay."""

from __future__ import annotations

from kvjax.grammar import STEP, Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.merge import ZipMerge
from kvjax.keep.patterns import Recent
from kvjax.keep.score import AccumulatedAttention
from kvjax.methods.papers import paper
from kvjax.methods.shared import Amount


@paper(
    "KeepKV: Achieving Periodic Lossless KV Cache Compression for Efficient LLM Inference",
    arxiv="2504.09936",
    family="merge-token",
    exact="deviates",
)
def keepkv(budget: Amount, *, recent: float = 0.5, threshold: float = 0.8) -> Method:
    """KeepKV (Tian et al., 2025, arXiv:2504.09936): evicted tokens join the kept ones they resemble.

    Heavy hitters and recent tokens stay as in H2O; `ZipMerge` merges the others. Deviations: those that
    `ZipMerge` lists.
    """
    score = AccumulatedAttention()
    merge = ZipMerge(threshold)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge))
