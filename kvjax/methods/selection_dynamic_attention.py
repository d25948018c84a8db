"""Selection after every token, by the attention that tokens received."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.algebra import Pool
from kvjax.keep.budget import Uniform
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.score import (
    AccumulatedAttention,
    DecayedAttention,
    KeyRedundancy,
    ValueNorm,
    WindowAttention,
)
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Kernel, Share, Tokens, Window
from kvjax.when import STEP, Every


@paper(
    "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    arxiv="2306.14048",
    family="selection-dynamic",
    exact="equal",
    kvpress=Press(
        "ObservedAttentionPress",
        same="no: kvpress divides by the number of queries, protects no recent half and acts once",
    ),
)
def h2o(budget: Amount, *, recent: Share = 0.5) -> Method:
    """H2O (Zhang et al., 2023, arXiv:2306.14048), Algorithm 1: heavy hitters and recent tokens.

    F[j] = sum_i p_ij over the prompt and every decoded token; a share `recent` of the budget is the newest
    tokens, the rest the largest F. Each step attends first, then drops the lowest. With grouped queries, F
    sums over the heads of a group.
    """
    keep = Keep(AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), when=STEP)
    return Method(keep)


@paper(
    "Transformers are Multi-State RNNs",
    arxiv="2401.06104",
    family="selection-dynamic",
    exact="equal",
    kvpress=Press(
        "TOVAPress",
        same="yes, at the end of the prompt, except that kvpress always keeps the newest token; "
        "acts in decoding too",
    ),
)
def tova(budget: Amount) -> Method:
    """TOVA (Oren et al., 2024, arXiv:2401.06104), section 3.2: drops what the newest query ignores.

    score[j] = mean over the layer's heads of p_tj for the last query t; one set for all heads, no
    protected window.
    """
    score = WindowAttention(1, reduce="sum", heads="layer", hide_window=False)
    return Method(Keep(score, Budget(budget), Uniform(), when=STEP))


@paper(
    "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: "
    "Value Also Matters",
    arxiv="2406.12335",
    family="selection-dynamic",
    exact="equal",
)
def vatp(budget: Amount, *, recent: Share = 0.5, sinks: Tokens = 20) -> Method:
    """VATP (Guo et al., 2024, arXiv:2406.12335), section 3.3, over H2O: attention times the value's size.

    score[j] = F[j] ||v_j||_1 with H2O's accumulated attention F. The first `sinks` tokens stay, whose values
    are small whatever they attract, and a share `recent` of the budget is the newest tokens.
    """
    score = AccumulatedAttention() * ValueNorm(1)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(recent)), when=STEP))


@paper(
    "A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer Decoder",
    arxiv="2407.20485",
    family="selection-dynamic",
    exact="equal",
)
def a2sf(budget: Amount, *, forgetting: Annotated[float, Range(0.001, 0.999)] = 0.2) -> Method:
    """A2SF (Jo and Shin, 2024, arXiv:2407.20485), section 3: H2O's sums, in which older queries count less.

    F[j] = sum_i forgetting^(t - i) p_ij over the prompt and every decoded token. No newest tokens are set
    apart: what a sum over all queries owes to a token's age is forgotten. Each step attends first, then drops
    the lowest. With grouped queries, F sums over the heads of a group. The default is the factor of the
    authors' scripts.
    """
    return Method(Keep(DecayedAttention(forgetting), Budget(budget), Uniform(), when=STEP))


@paper(
    "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
    arxiv="2505.24133",
    family="selection-dynamic",
    exact="equal",
)
def r_kv(
    budget: Amount,
    *,
    buffer: Window = 128,
    window: Window = 8,
    kernel: Kernel = 7,
    importance: Share = 0.1,
    threshold: Share = 0.5,
) -> Method:
    """R-KV (Cai et al., 2025, arXiv:2505.24133), section 3: after every `buffer` tokens, the redundant leave.

    score = importance * I - (1 - importance) * R. I is what the last `window` queries attend to among older
    tokens, with the largest logit of a group and pooled by the maximum; R is how much a key repeats others.
    The window stays. Where no other key is similar, the authors' code lets the first key's similarity not
    count; the paper does not, and this follows the paper.
    """
    attention = WindowAttention(window, reduce="mean", heads="logits", among_older=True) >> Pool(kernel)
    score = importance * attention + (importance - 1) * KeyRedundancy(threshold)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=Every(buffer)))
