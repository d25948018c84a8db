"""Merging: tokens that leave are folded into tokens that stay."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.merge import ZipMerge
from kvjax.keep.merge_cam import ValueMerge
from kvjax.keep.merge_d2o import SimilarMerge
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.score import AccumulatedAttention
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Seed, Share, Tokens, Window
from kvjax.when import STEP

# A cosine of two keys.
Cosine = Annotated[float, Range(-1, 1)]


@paper(
    "KeepKV: Achieving Periodic Lossless KV Cache Compression for Efficient LLM Inference",
    arxiv="2504.09936",
    family="merge-token",
    exact="deviates",
)
def keepkv(budget: Amount, *, recent: Share = 0.5, threshold: Cosine = 0.8) -> Method:
    """KeepKV (Tian et al., 2025, arXiv:2504.09936): evicted tokens join the kept ones they resemble.

    Heavy hitters and recent tokens stay as in H2O; `ZipMerge` merges the others. Deviations: those that
    `ZipMerge` lists.
    """
    score = AccumulatedAttention()
    merge = ZipMerge(threshold)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP, merge=merge))


@paper(
    "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models",
    arxiv="2406.13035",
    family="merge-token",
    exact="deviates",
)
def d2o(budget: Amount, *, recent: Share = 0.5, sinks: Tokens = 4, smoothing: Share = 0.7) -> Method:
    """D2O (Wan et al., 2024, arXiv:2406.13035), token level: what leaves joins what stays, or is dropped.

    Heavy hitters and recent tokens stay as in H2O, and the first `sinks` ones; `SimilarMerge` decides about
    the others, by a threshold that every layer and row carries; `smoothing` is the weight of what leaves now
    in it. Deviations: every layer has the same budget, where the paper gives more to layers of even
    attention. A token is merged if its own similarity reaches the threshold; the authors' code asks for the
    mean of those that the heads evict in the same place, and weighs by the similarity itself and not by its
    exponential.
    """
    keep = Keep(
        AccumulatedAttention(), Budget(budget), Uniform(), (Sink(sinks), Recent(recent)), when=STEP,
        merge=SimilarMerge(smoothing),
    )  # fmt: skip
    return Method(keep)


@paper(
    "CaM: Cache Merging for Memory-efficient LLMs Inference",
    family="merge-token",
    kvpress=Press("CAMPress", same="no: other random numbers, and there decoding alone evicts"),
)
def cam(budget: Amount, *, recent: Share = 0.5, following: Window = 32, seed: Seed = 0) -> Method:
    """CaM (Zhang et al., ICML 2024): the value of an evicted token is shared out among those that follow it.

    Heavy hitters and recent tokens stay as in H2O; `ValueMerge` merges the others at random, the likelier the
    more attention they received. Keys are dropped. The authors' code evicts as StreamingLLM does, one token
    at a time; here the tokens that leave a prompt do so at once, each to those that stay.
    """
    keep = Keep(
        AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), when=STEP,
        merge=ValueMerge(following, seed),
    )  # fmt: skip
    return Method(keep)
