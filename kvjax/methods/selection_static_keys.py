"""Selection once, at the end of a prompt, without attention: by keys, values or other statistics."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import PREFILL_END, STEP, Every
from kvjax.keep.algebra import Pool, standardised
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.expected import ExpectedAttention, QueryStatistics
from kvjax.keep.scores.filters import FilterProjection, QueryFilters
from kvjax.keep.scores.geometry import KeyDistinctness, Leverage, LocalNorms, ValueLeverage
from kvjax.keep.scores.lag import LagRelative
from kvjax.keep.scores.non_causal import NonCausalAttention
from kvjax.keep.scores.score import KeyNorm
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Fit, Layers, Rank, Seed, Tokens, Window, pick


@paper(
    "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arxiv="2406.11430",
    family="selection-static",
    exact="deviates",
    kvpress=Press("KnormPress", "skip_layers=0"),
    aliases=("knorm",),
)
def l2compress(
    budget: Amount, *, skip_layers: Layers = 2, variant: Literal["prompt", "steps"] = "prompt"
) -> Method:
    """L2-norm compression (Devoto et al., 2024, arXiv:2406.11430): keeps the keys of small norm.

    score[j] = -||k_j||_2; the first `skip_layers` layers stay whole (kvpress' Knorm: skip_layers=0).
    "prompt", the default because the authors' README and kvpress do so: slots are evicted once, at the end of
    a prompt. "steps": every further token also evicts the largest key, as when the authors compress after
    every forward pass (eval_lm_quick.py). Deviation: a budget is rounded down, as everywhere here; the
    authors' code rounds it up, and compresses only what is longer than `prune_after` tokens.
    """
    when = pick(variant, prompt=PREFILL_END, steps=STEP)
    return Method(Keep(KeyNorm(), Budget(budget), Uniform(), skip_layers=skip_layers, when=when))


@paper(
    "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in "
    "Resource-Constrained Environments",
    arxiv="2504.15364",
    family="selection-static",
    exact="equal",
    kvpress="KeyDiffPress",
)
def keydiff(budget: Amount) -> Method:
    """KeyDiff (Park et al., 2025, arXiv:2504.15364): keeps the keys that are least like the mean key.

    It does not use attention. The paper compresses block by block, which is `prefill(..., chunk=block)`;
    without `chunk` a prompt is compressed once, at its end.
    """
    return Method(Keep(KeyDistinctness(), Budget(budget), Uniform()))


@paper(
    "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition",
    arxiv="2509.15038",
    family="selection-static",
    exact="deviates",
    kvpress="CURPress",
    aliases=("cur",),
)
def curdkv(budget: Amount, *, sinks: Tokens = 4, window: Window = 16) -> Method:
    """CurDKV (Sengupta et al., 2025, arXiv:2509.15038): row norms approximate leverage scores.

    score[j] = a_j b_j of the squared lengths of key and value, each divided by their sum over a window of
    `window` slots (`LocalNorms`); the first `sinks` tokens stay. These are the defaults of the authors' code,
    without its random projection. Deviation: windows begin at the first token, as in kvpress; the authors'
    end at the last.
    """
    return Method(Keep(LocalNorms(window), Budget(budget), Uniform(), (Sink(sinks),)))


@paper(
    "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
    arxiv="2507.08143",
    family="selection-static",
    exact="deviates",
    kvpress=Press(
        "CompactorPress",
        "chunk=256",
        "no: there, blend is 1 - budget, padding takes attention, and sketches have no seed",
    ),
)
def compactor(
    budget: Amount,
    *,
    blend: Annotated[float, Range(0, 100)] = 0.5,
    chunk: Annotated[int, Range(2)] = 128,
    rank: Rank = 48,
    sinks: Tokens = 8,
    newest: Tokens = 4,
    seed: Seed = 0,
) -> Method:
    """Compactor (Chari and Van Durme, 2025, arXiv:2507.08143): outlying keys, and attention within chunks.

    score = blend * z(leverage) + z(pool(non-causal attention * ||v||)): `Leverage` of keys in a sketch of
    `rank` dimensions, and the attention between the tokens of a chunk (`NonCausalAttention`), smoothed over
    three neighbours by the mean; z gives both mean 0 and variance 1 in every layer. The first `sinks` and the
    `newest` last tokens stay. Deviation: leverage is computed among all tokens, with a ridge of 0.01, as in
    kvpress; the authors' code computes it among 512 at a time. The budget is given; the paper's second part,
    which chooses it automatically, is left out.

    On the shipped model its attention term makes it worse than random selection (64 contexts of "get", half
    kept: leverage alone finds 86 %, both 28 %, attention alone 5 %, random 31 %): most of a text is filler,
    and filler attends to filler in its own chunk.
    """
    attention = NonCausalAttention(chunk) >> Pool(3, "mean")
    score = blend * standardised(Leverage(rank, seed=seed)) + standardised(attention)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(newest))))


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
    fitted: Fit | None = None,
) -> Method:
    """Expected Attention (Devoto et al., 2025, arXiv:2510.00636): the attention future queries will give.

    See `ExpectedAttention` for the closed form; the first `sinks` tokens stay. Acts at the end of a prefill,
    as in kvpress. The statistics are those of the prompt's queries, or of texts: fitted, as `kvjax fit
    expected-attention` writes them.
    """  # noqa: D401 (a name)
    statistics = QueryStatistics(as_fitted(fitted))
    score = ExpectedAttention(future, sinks, covariance, value_norm, epsilon, statistics)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks),)))


@paper(
    "Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective",
    arxiv="2604.25975",
    family="selection-static",
    exact="deviates",
    kvpress="CapPress",
    aliases=("cap",),
)
def capkv(
    budget: Amount,
    *,
    tau: Annotated[float, Range(0, 100)] = 5.0,
    future: Window = 512,
    sinks: Tokens = 4,
) -> Method:
    """CapKV (Yang et al., 2026, arXiv:2604.25975): keeps the values that add most capacity.

    score[j] = w_j v_j' A^-1 v_j with A = I + sum_i w_i v_i v_i' and w_j = exp(tau <k_j, q>) for a mean query
    q (`ValueLeverage`); the first `sinks` tokens stay. Deviation: as in kvpress, k and q are of unit
    length, q is rotated by the average rotation of the next `future` positions, and v_j approximates its
    contribution to the output.

    On the shipped model it keeps fewer of the needed tokens than random selection does, the more so the
    larger `tau` is ("get", half kept: tau=0 finds 59 %, tau=1 14 %, tau=5 none, random 31 %): the mean query
    of a text is one of its filler, and keys that an answer needs are in other directions.
    """
    score = ValueLeverage(tau, future, sinks)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks),)))


@paper(
    "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression",
    arxiv="2503.02812",
    family="selection-static",
    exact="deviates",
    kvpress=Press("QFilterPress", "newest=0", "yes, with the same filters: kvpress takes the authors' ones"),
    aliases=("qfilter",),
)
def q_filters(budget: Amount, *, fitted: Fit | None = None, newest: Tokens = 64) -> Method:
    """Q-Filters (Godey et al., 2025, arXiv:2503.02812): keys along the main direction of queries.

    score[j] = <k_j, f>, where a head's filter f is the main direction of its queries
    (`FilterProjection`); the `newest` tokens stay, as in the authors' code. fitted: the filters, as
    `kvjax fit q-filters` writes them. Deviation: decoding evicts nothing, as in kvpress; the authors'
    cache evicts whenever it is full.
    """
    score = FilterProjection(QueryFilters(as_fitted(fitted)))
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(newest),)))


@paper(
    "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
    arxiv="2504.04704",
    family="selection-static",
    exact="deviates",
    kvpress=Press("LagKVPress", same="yes, except among equal ranks; acts in decoding too"),
)
def lagkv(budget: Amount, *, lag: Annotated[int, Range(2)] = 128, sinks: Tokens = 4) -> Method:
    """LagKV (Liang et al., 2025, arXiv:2504.04704): tokens are normalised by those after them.

    After the first `sinks` tokens, which stay, partitions of `lag` tokens are ranked one by one, each by the
    keys and values of the next one (`LagRank`), in the prompt and after every `lag` new tokens. A slot's
    first rank is final; the last whole partition and the tokens after it are unranked and stay. Deviation:
    the paper keeps the same share of every partition; here, as in kvpress, the budget counts all slots, and
    the lowest ranks of all partitions are evicted, of equal ones the newer. If the budget is smaller than the
    tokens that must stay, only the newest of them do.
    """
    score = LagRelative(lag, sinks)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks),), when=Every(lag)))
