"""Selection once, at the end of a prompt, that looks at no attention: by keys, values or other statistics."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.expected import ExpectedAttention
from kvjax.keep.patterns import Sink
from kvjax.keep.score import KeyNorm
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Layers, Tokens, Window


@paper(
    "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arxiv="2406.11430",
    family="selection-static",
    exact="equal",
    kvpress=Press("KnormPress", "skip_layers=0"),
    aliases=("knorm",),
)
def l2compress(budget: Amount, *, skip_layers: Layers = 2) -> Method:
    """L2-norm compression (Devoto et al., 2024, arXiv:2406.11430): keeps the keys of small norm.

    score[j] = -||k_j||_2; the first `skip_layers` layers stay whole (kvpress' Knorm: skip_layers=0).
    """
    return Method(Keep(KeyNorm(), Budget(budget), Uniform(), skip_layers=skip_layers))


@paper(
    "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
    arxiv="2510.00636",
    family="selection-static",
    exact="equal",
    kvpress="ExpectedAttentionPress",
)
def expected_attention(
    budget: Amount,
    *,
    future: Window = 512,
    sinks: Tokens = 4,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: Annotated[float, Range(0)] = 0.0,
) -> Method:
    """Expected Attention (Devoto et al., 2025, arXiv:2510.00636): the attention future queries will give.

    See `ExpectedAttention` for the closed form; the first `sinks` tokens stay. Acts at the end of a prefill,
    as in kvpress.
    """
    score = ExpectedAttention(future, sinks, covariance, value_norm, epsilon)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks),)))
