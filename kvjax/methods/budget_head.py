"""Methods that give the heads of a layer different budgets."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import StagedAcross, stage
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, Threshold, Uniform
from kvjax.keep.budgets.profile import ByProfile, CopyProfile, CurveProfile, Profile
from kvjax.keep.merges.compensation import Compensation
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.defensive import Defensive
from kvjax.keep.scores.enough import TopP
from kvjax.keep.scores.expected import ExpectedAttention
from kvjax.keep.scores.retrieval import HeadGates, RepeatingHeads, RetrievalHeads
from kvjax.keep.scores.score import OutputNorm, WindowAttention
from kvjax.keep.scores.tokens import CheapestPolicy, IsTokenType
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Bits,
    Fit,
    Group,
    Kernel,
    Page,
    Share,
    TokenIds,
    Tokens,
    Window,
    pick,
    window_score,
)
from kvjax.store.affine import Affine


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
    page: Page | None = None,
    variant: Literal["paper", "kvpress"] = "paper",
) -> Method:
    """Ada-KV (Feng et al., 2024, arXiv:2407.11550), Algorithm 1 over SnapKV scores: unequal heads.

    A layer's K * budget best slots decide how many each head keeps, with a floor per head; slots are stored
    in pages per (row, head), so unequal heads cost unequal bytes. "paper", the default because it is the
    algorithm: blends the counts with the floor, rounded so that a layer keeps exactly its budget (the
    authors' code rounds each head, and a layer may be off by a slot or two). "kvpress" gives each head its
    floor of best slots first. Both use one score per KV head.
    """
    score = window_score(window, kernel, variant)
    blend = pick(variant, paper=True, kvpress=False)
    keep = Keep(score, Budget(budget), AcrossHeads(floor, blend), (Recent(window),), page=page)
    return Method(keep)


@paper(
    "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective",
    arxiv="2502.03805",
    family="budget-head",
    exact="equal",
    kvpress=Press(
        "CriticalKVPress(SnapKVPress)",
        "variant=kvpress",
        same="yes; but it may evict a part of its window where that is more than half of the budget",
    ),
)
def criticalkv(
    budget: Amount,
    *,
    window: Window = 64,
    kernel: Kernel = 5,
    first: Share = 0.5,
    epsilon: Share = 1e-4,
    across_heads: bool = False,
    page: Page | None = None,
    variant: Literal["grouped", "kvpress"] = "grouped",
) -> Method:
    """CriticalKV (Feng et al., 2025, arXiv:2502.03805), Algorithm 1 over SnapKV scores: two stages.

    A share `first` of the budget goes to the window and to the largest attention of older tokens, the rest to
    the largest (attention + epsilon) ||W_O v_j||_1, which bounds how far the layer's output moves; with
    grouped queries the norm is the mean over the group's heads. As in the authors' code (DefensiveKV), the
    window counts in the first stage: if it fills that stage, the second one chooses all older tokens.
    "grouped", the default because only the second stage then differs from `snapkv`, sums and smooths as that
    does; "kvpress" does so as the authors' code, whose presses are kvpress's. across_heads: heads' budgets
    are Ada-KV's, by attention alone, and both stages choose within them, as in the authors' code.
    """
    attention = window_score(window, kernel, variant)
    score = stage(attention, first, (attention + epsilon) * OutputNorm(), whole=True)
    if not across_heads:
        return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), page=page))
    blend = pick(variant, grouped=True, kvpress=False)
    score, allocate = StagedAcross(score, AcrossHeads(blend=blend)), AcrossHeads(0.0, blend=False)
    return Method(Keep(score, Budget(budget), allocate, (Recent(window),), page=page))


@paper(
    "Taming the Fragility of KV Cache Eviction in LLM Inference",
    arxiv="2510.13334",
    family="budget-head",
    exact="deviates",
)
def defensivekv(
    budget: Amount, *, window: Window = 32, kernel: Kernel = 5, mass: Share = 0.9, page: Page | None = None
) -> Method:
    """DefensiveKV (Feng et al., 2025, arXiv:2510.13334), section 4: tokens by their worst-case importance.

    While CriticalKV takes the mean attention of the window's queries, a token's score is the largest of them,
    but at least the mean over tokens, times the bound of its value's contribution (`Defensive`). The fewest
    tokens that hold the share `mass` of the mean attention are kept first. Then a layer's best slots are
    kept, whichever heads they belong to. Deviation: each row decides by its own window how many tokens hold
    this share, where the authors' code takes the mean over a batch; Layer-DefensiveKV, which shares over
    layers, is left out.
    """
    keep = Keep(
        Defensive(window, kernel, mass), Budget(budget), AcrossHeads(0.0, blend=False), (Recent(window),),
        page=page,
    )  # fmt: skip
    return Method(keep)


@paper(
    "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning",
    arxiv="2410.19258",
    family="budget-head",
    exact="deviates",
)
def headkv(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    window: Window = 32,
    kernel: Kernel = 7,
    beta: Annotated[float, Range(1, 1000)] = 1.2,
    page: Page | None = None,
    variant: Literal["shared", "paper"] = "shared",
) -> Method:
    """HeadKV (Fu et al., 2024, arXiv:2410.19258), section 4: retrieval heads get more, by a profile.

    A head keeps the window, a base, and a share of a pool of the whole stack in proportion to its retrieval
    of the tokens that answers need (see `ByProfile`); 1 / beta of the budget is in the pool. Within a head,
    SnapKV's scores choose. fitted: the profile, as `kvjax fit headkv` writes it. If a head's share exceeds
    the prompt, the excess goes to other heads in "shared", the default because the stack then keeps its whole
    budget; in "paper", as in the authors' code, it is lost, so that a steep profile keeps much less.
    Deviation: budgets are those of KV heads, whose query heads are averaged in profile and score; the
    authors' code selects for every query head.
    """
    lost = pick(variant, shared=False, paper=True)
    keep = Keep(
        window_score(window, kernel, "grouped"),
        Budget(budget),
        ByProfile(Profile(as_fitted(fitted)), window, beta, lost),
        (Recent(window),),
        page=page,
    )
    return Method(keep)


@paper(
    "Retrieval Head Mechanistically Explains Long-Context Factuality",
    arxiv="2404.15574",
    family="budget-head",
    exact="deviates",
)
def retrieval_head(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    window: Window = 32,
    kernel: Kernel = 7,
    beta: Annotated[float, Range(1, 1000)] = 1.2,
    page: Page | None = None,
) -> Method:
    """Retrieval Head (Wu et al., 2024, arXiv:2404.15574), section 2: heads that copy answers get more.

    A head's retrieval score is the share of an answer's tokens for which the token that it attends to most is
    both needed and equal to the predicted token. fitted: these scores, as `kvjax fit retrieval-head` writes
    them. Deviation: the paper finds such heads and compresses nothing; here they share the budget as in
    HeadKV (`headkv`), with each KV head scored by the best of its query heads.
    """  # noqa: D401 (a name)
    profile = CopyProfile(as_fitted(fitted))
    score, allocate = window_score(window, kernel, "grouped"), ByProfile(profile, window, beta)
    return Method(Keep(score, Budget(budget), allocate, (Recent(window),), page=page))


@paper(
    "Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction",
    arxiv="2602.08585",
    family="budget-head",
    exact="deviates",
    kvpress=Press("LUKVPress", same="no: kvpress takes the authors' curves, and rounds in every layer"),
    aliases=("lu-kv",),
)
def lukv(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    future: Window = 512,
    sinks: Tokens = 4,
    epsilon: Share = 0.02,
    page: Page | None = None,
) -> Method:
    """LU-KV (2026, arXiv:2602.08585), section 4: head budgets by the utility of their best tokens.

    A head keeps the first `sinks` tokens and the newest one, and the tokens with the largest scores of
    Expected Attention, in the share that fitted curves give for this budget (`CurveProfile`). The curves are
    fitted to texts: the later utility of a head's best tokens by this score, for every share of them, and the
    shares of all heads with the largest total utility. fitted: the curves, as `kvjax fit lukv` writes them.
    Deviation: shares exclude those protected tokens, and are rounded so that the stack uses the whole budget;
    utility is the attention that tokens of a text's first half get from its second half.
    """
    score = ExpectedAttention(future, sinks, epsilon=epsilon)
    profile = CurveProfile(as_fitted(fitted), Budget(budget))
    protect = (Sink(sinks), Recent(1))
    return Method(Keep(score, Budget(budget), ByProfile(profile, sinks + 1, 1.0), protect, page=page))


@paper(
    "RazorAttention: Efficient KV Cache Compression Through Retrieval Heads",
    arxiv="2407.15891",
    family="budget-head",
    exact="deviates",
)
def razorattention(
    *,
    fitted: Fit | None = None,
    induction: Share = 0.14,
    echo: Share = 0.01,
    sinks: Tokens = 4,
    window: Window = 4000,
    share: Share = 0.2,
    page: Page | None = None,
) -> Method:
    """RazorAttention (Tang et al., 2024, arXiv:2407.15891), section 3: retrieval heads keep all tokens.

    The share `induction` of the stack's query heads that attend most to the successors of earlier occurrences
    of their token, and the share `echo` that attend most to these occurrences, keep every token; all other
    heads keep the first `sinks` tokens, the newest `window` ones and no fewer than `share` of a prompt, and
    one token with the mean key and value of the evicted ones (`Compensation`). fitted: the heads' echo and
    induction scores, as `kvjax fit razorattention` writes them. Deviation: a KV head keeps all tokens if one
    of its query heads does; generated tokens stay until the next prompt.
    """
    score = RetrievalHeads(RepeatingHeads(as_fitted(fitted), echo), induction)
    protect = (Sink(sinks), Recent(window), Recent(share))
    keep = Keep(score, Budget(1.0), Threshold(0.0), protect, merge=Compensation(), page=page)
    return Method(keep)


@paper(
    "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads",
    arxiv="2410.10819",
    family="budget-head",
    exact="deviates",
    kvpress=Press("DuoAttentionPress", same="no: kvpress takes the authors' gates and acts once"),
    aliases=("duo-attention",),
)
def duoattention(
    *,
    fitted: Fit | None = None,
    retrieval: Share = 0.5,
    sinks: Tokens = 64,
    window: Window = 256,
    page: Page | None = None,
) -> Method:
    """DuoAttention (Xiao et al., 2024, arXiv:2410.10819): retrieval heads keep all, streaming heads little.

    The share `retrieval` of the stack's KV heads, those of the largest gates, keeps every token; all others
    keep the first `sinks` and the newest `window` ones, in prompts and while decoding. fitted: the gates, as
    `kvjax fit duoattention` writes them. Deviation: a prompt is read with the whole attention of all heads
    before streaming heads are cut; the paper reads it with the streaming attention.
    """
    score = RetrievalHeads(HeadGates(as_fitted(fitted)), retrieval)
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(1.0), Threshold(0.0), protect, when=STEP, page=page))


@paper(
    "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs",
    arxiv="2310.01801",
    family="budget-head",
    exact="deviates",
)
def fastgen(
    *,
    separators: TokenIds | None = None,
    recover: Share = 0.95,
    frequent: Share = 0.3,
    local: Share = 0.3,
    sinks: Tokens = 4,
    window: Window = 32,
    page: Page | None = None,
) -> Method:
    """FastGen (Ge et al., 2023, arXiv:2310.01801), section 3: every head gets the cheapest sufficient policy.

    Special tokens, then punctuation, then heavy hitters, then the newest tokens, then all: a head keeps as
    many of these sets as have the share `recover` of its attention (`CheapestPolicy`). separators: the ids of
    punctuation, as in SepLLM (`sepllm`). Deviations: special tokens are the first `sinks`; attention is that
    of the last `window` queries of a prompt, where the paper uses all of them; generated tokens stay until
    the next prompt, where the paper applies the head's policy to them, too.
    """
    score = CheapestPolicy(IsTokenType(separators), sinks, frequent, local, recover, window)
    return Method(Keep(score, Budget(1.0), Threshold(0.0), page=page))


@paper(
    "KV-Compress: Paged KV-Cache Compression with Variable Compression Rates per Attention Head",
    arxiv="2410.00161",
    family="budget-head",
    exact="deviates",
)
def kv_compress(budget: Amount, *, window: Window = 32, page: Page | None = None) -> Method:
    """KV-Compress (Rehg, 2024, arXiv:2410.00161), section 3: the stack's best slots by squared attention.

    score[j] = sum_i p_ij^2 over the last `window` queries i, the mean over a group, as the paper's variant
    for long prompts; the L K n best slots of the whole stack stay, with the window, in pages of their heads.
    Deviations: pages are filled with the kept slots, where the paper evicts whole blocks, so that a head may
    fill its last page in part; generated tokens stay until the next prompt.
    """
    score = WindowAttention(window, reduce="squares")
    return Method(Keep(score, Budget(budget), AcrossLayers(), (Recent(window),), page=page))


@paper(
    "Unifying KV Cache Compression for Large Language Models with LeanKV",
    arxiv="2412.03131",
    family="budget-head",
    exact="deviates",
)
def leankv(
    *,
    share: Share = 0.95,
    window: Window = 64,
    high: Bits = 8,
    low: Bits = 4,
    group: Group | None = 32,
    page: Page | None = None,
) -> Method:
    """LeanKV (Zhang et al., 2024, arXiv:2412.03131): tokens with most of a head's attention get more bits.

    The fewest tokens that hold the share `share` of what a head has received (`TopP`), and the `window`
    newest ones, have keys of `high` and values of `low` bits; the others keys of `low` and values of low / 2
    bits, in groups of `group` channels. The number of each kind depends on the text. Deviations: the paper
    drops the tokens of the least attention altogether; generated tokens have the bits of the first kind until
    the next prompt.
    """
    lower = Store(Affine(low, group=group), Affine(max(low // 2, 1), group=group))
    keep = Keep(TopP(share), Budget(1.0), Threshold(0.0), (Recent(window),), lower=lower, page=page)
    return Method(keep, Store(Affine(high), Affine(low, group=group)))
