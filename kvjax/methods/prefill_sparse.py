"""Sparse prompts: the queries of a prompt attend to some blocks of it; the cache keeps every token."""

from __future__ import annotations

from typing import Annotated

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Fit, Layers, Ratio, Share, Tokens
from kvjax.read.antidiagonals import Antidiagonals
from kvjax.read.covering_blocks import CoveringBlocks
from kvjax.read.head_patterns import AShape, BestBlocks, HeadPatterns, VerticalSlash
from kvjax.read.segment_scores import SegmentScores

# How many tokens a segment, a block or a tile has, and how many of something are picked.
Size = Annotated[int, Range(1, 65536)]
Count = Annotated[int, Range(1)]


@paper(
    "CritiPrefill: A Segment-wise Criticality-based Approach for Prefilling Acceleration in LLMs",
    arxiv="2409.12490",
    family="prefill-sparse",
    exact="deviates",
)
def critiprefill(
    budget: Amount, *, segment: Size = 512, block: Size = 32, below: Share = 0.25, skip_layers: Layers = 1
) -> Method:
    """CritiPrefill (Lv et al., 2024, arXiv:2409.12490), section 3: segments of queries choose blocks.

    A segment of queries attends to its own tokens and to the blocks before it that its largest and smallest
    numbers per channel score highest (`SegmentScores`), in which `below` is the weight of the layer below.
    `budget` is the share (or number) of the tokens before a segment that it attends to; the authors' is 2048
    tokens. Steps read the full cache. Deviation: a prompt over a cache is read in full, and one in pieces is
    refused; the authors' code also reads the first 4096 tokens in full.
    """
    if segment % block:
        raise InputError(
            f"critiprefill: segment must be a multiple of block, which is {block}, got {segment}"
        )
    return Method(read_prompt=SegmentScores(Budget(budget), segment, block, below, skip_layers))


@paper(
    "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
    arxiv="2407.02490",
    family="prefill-sparse",
    exact="deviates",
)
def minference(
    *, vertical: Count = 1000, slash: Count = 6096, block: Size = 64, skip_layers: Layers = 0,
    fitted: Fit | None = None,
) -> Method:  # fmt: skip
    """MInference (Jiang et al., 2024, arXiv:2407.02490), section 3: a pattern for every query head.

    Heads attend to the `vertical` columns and `slash` diagonals that the newest 64 queries attend to most.
    `kvjax fit minference` gives each the pattern of the least error on texts: these, other shares of columns
    and diagonals, an A-shape, or the best blocks by means, all of vertical + slash keys per query. Steps read
    the full cache. Deviation: a diagonal is widened to whole blocks of keys; the paper compares patterns at
    equal times of its kernels. A prompt over a cache is read in full, and one in pieces is refused.
    """
    keys = vertical + slash
    patterns = (
        VerticalSlash(vertical, slash),
        VerticalSlash(-(-keys // 64), max(1, keys - -(-keys // 64))),
        VerticalSlash(-(-keys // 2), max(1, keys // 2)),
        AShape(-(-keys // 8), keys - -(-keys // 8)),
        BestBlocks(-(-keys // block)),
    )
    return Method(read_prompt=HeadPatterns(patterns, block, skip_layers, as_fitted(fitted)))


@paper(
    "XAttention: Block Sparse Attention with Antidiagonal Scoring",
    arxiv="2503.16428",
    family="prefill-sparse",
    exact="deviates",
)
def xattention(
    *, covered: Ratio = 0.9, stride: Size = 16, block: Size = 128, skip_layers: Layers = 0
) -> Method:
    """XAttention (Xu et al., 2025, arXiv:2503.16428), section 2: blocks by the antidiagonals of their tiles.

    Every block of queries attends to the fewest blocks with the share `covered` of its attention, as the
    antidiagonals of tiles of `stride` x `stride` logits estimate it (`Antidiagonals`); the first block and
    its own are among them. Steps read the full cache. Deviation: all heads have one threshold, where the
    paper also searches one for every head. A prompt over a cache is read in full, and one in pieces is
    refused.
    """
    if block % stride:
        raise InputError(f"xattention: block must be a multiple of stride, which is {stride}, got {block}")
    return Method(read_prompt=Antidiagonals(covered, stride, block, skip_layers))


@paper(
    "FlexPrefill: A Context-Aware Sparse Attention Mechanism for Efficient Long-Sequence Inference",
    arxiv="2502.20766",
    family="prefill-sparse",
    exact="deviates",
)
def flexprefill(
    *, covered: Ratio = 0.9, divergence: Share = 0.1, least: Tokens = 1024, block: Size = 128,
    skip_layers: Layers = 0,
) -> Method:  # fmt: skip
    """FlexPrefill (Lai et al., 2025, arXiv:2502.20766), section 3: patterns and budgets by the prompt itself.

    A head whose newest block of queries attends as the means of blocks say (a root of the Jensen-Shannon
    divergence below `divergence`) picks blocks by means; any other verticals and slashes. Both pick as few as
    cover the share `covered` of the attention, and at least `least` tokens (`CoveringBlocks`). Steps read the
    full cache. Deviation: verticals and slashes are whole blocks, as in the authors' code, as many as the
    tokens that the paper counts would fill. A prompt over a cache is read in full, and one in pieces is
    refused.
    """
    return Method(read_prompt=CoveringBlocks(covered, divergence, least, block, skip_layers))
