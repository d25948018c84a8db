"""Methods that give layers different budgets."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import as_fitted
from kvjax.keep.algebra import Pool
from kvjax.keep.budgets.budget import Threshold
from kvjax.keep.budgets.layer_budgets import ByDecay, ByHits, ByPrefix, ByUncertainty, MeanOverHeads
from kvjax.keep.budgets.lazy import Lookback
from kvjax.keep.budgets.preference import ByAttention
from kvjax.keep.budgets.profile import ByProfile, DriftProfile, SearchedProfile
from kvjax.keep.budgets.pyramid import Pyramid
from kvjax.keep.observations.probe import Episode, ProbeAttention, RepeatContext
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.composite import Composite, PlusLayerMean
from kvjax.keep.scores.enough import NormPreserving
from kvjax.keep.scores.recent_queries import RecencyWeighted
from kvjax.keep.scores.score import AccumulatedAttention, MeanAndVariance
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import (
    Amount,
    Fit,
    Kernel,
    Page,
    Ratio,
    Share,
    TokenIds,
    Tokens,
    Variant,
    Window,
    per_query_head,
    pick,
    window_score,
)


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
    page: Page | None = None,
    variant: Variant = "grouped",
) -> Method:
    """PyramidKV (Cai et al., 2024, arXiv:2406.02069), section 4: SnapKV scores, pyramidal layer budgets.

    Layer budgets fall linearly with depth around the mean `budget`; all slots are in one pool, so the bytes
    are those of the total. For a prompt of fewer than 2 (budget - window) tokens every layer keeps `budget`,
    as in the authors' code. See `Pyramid` for the counts, which are rounded so that the stack keeps exactly
    its budget (the code rounds steps down). "grouped", the default because equal budgets are then equal
    bytes, "paper" and "kvpress" score and select as in `snapkv`; "kvpress" has its budgets of layers, too.
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


@paper(
    "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences",
    arxiv="2503.12491",
    family="budget-layer",
    exact="deviates",
)
def cake(
    budget: Amount,
    *,
    window: Window = 32,
    kernel: Kernel = 5,
    gamma: Annotated[float, Range(0)] = 200.0,
    tau1: Annotated[float, Range(0.01, 100)] = 1.0,
    tau2: Annotated[float, Range(0.01, 100)] = 1.0,
    page: Page | None = None,
) -> Method:
    """CAKE (Qin et al., 2025, arXiv:2503.12491), section 4: layer budgets follow their attention.

    A layer's budget follows from the entropy and the variance of the last window's attention, to the powers 1
    / tau1 and 1 / tau2 (see `ByAttention`); the stack keeps L * budget, in one pool. A token's score is the
    mean of its attention plus gamma times the variance, smoothed. The paper's cascade divides the budget
    again after every layer, which needs less memory during prefill. A layer only ever loses budget to later
    ones, so the cascade ends with the same budgets and tokens as a single allocation after the last layer,
    which is done here. Deviation: decode steps evict nothing.
    """
    keep = Keep(
        MeanAndVariance(window, gamma) >> Pool(kernel, "mean"),
        Budget(budget),
        ByAttention(window, tau1, tau2),
        (Recent(window),),
        page=page,
    )
    return Method(keep)


@paper(
    "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens",
    arxiv="2509.05165",
    family="budget-layer",
    exact="deviates",
    kvpress=Press("KVComposePress", same="no: there, a group's heads are averaged"),
)
def kvcompose(budget: Amount, *, page: Page | None = None) -> Method:
    """KVCompose (Akulov et al., 2025, arXiv:2509.05165): heads rank slots, which set layer budgets.

    The prompt is read a second time over the full cache; a slot's score is the largest attention it receives,
    plus the mean of this over the layer's heads (`PlusLayerMean`). Every head ranks its slots; the r-th
    ones of a layer's heads make a composite token, and the best composite tokens of the stack stay
    (`Composite`), so that all heads of a layer keep equally many. Deviation: the largest attention is
    over all query heads of a group, while the authors' code takes their mean.
    """
    probe = RepeatContext(())
    score = PlusLayerMean(ProbeAttention(probe))
    return Method(Keep(score, Budget(budget), Composite(), probe=probe, page=page))


@paper(
    "ZigZagKV: Dynamic KV Cache Compression for Long-context Modeling based on Layer Uncertainty",
    arxiv="2412.09036",
    family="budget-layer",
    exact="deviates",
)
def zigzagkv(
    budget: Amount,
    *,
    window: Window = 32,
    kernel: Kernel = 5,
    mass: Share = 0.9,
    least: Share = 0.5,
    page: Page | None = None,
) -> Method:
    """ZigZagKV (Zhong et al., 2024, arXiv:2412.09036): layers get what their attention needs.

    B_l = B_min + (B - B_min) L u_l / sum u, where u_l is the fewest tokens that hold the share `mass` of the
    last window's attention, in the mean over heads (see `ByUncertainty`), B the budget and B_min its share
    `least`. Within a layer, SnapKV's scores choose. Deviations: the window is always kept and not counted in
    B or B_min; decode steps evict nothing; the defaults of `mass` and `least` are ours.
    """
    score = window_score(window, kernel, "grouped")
    allocate = ByUncertainty(window, mass, least)
    return Method(Keep(score, Budget(budget), allocate, (Recent(window),), page=page))


@paper(
    "DynamicKV: Task-Aware Adaptive KV Cache Compression for Long Context LLMs",
    arxiv="2412.14838",
    family="budget-layer",
    exact="deviates",
)
def dynamickv(
    budget: Amount,
    *,
    window: Window = 8,
    kernel: Kernel = 5,
    most: Annotated[float, Range(1, 1000)] = 10.0,
    page: Page | None = None,
) -> Method:
    """DynamicKV (Zhou et al., 2024, arXiv:2412.14838): layer budgets follow the stack's best tokens.

    The best SnapKV scores of the whole stack, smoothed by the mean, are counted per layer, and the slots
    beside the window are divided between the layers in proportion to the counts, none more than `most` times
    the mean (see `ByHits`). Deviations: the paper updates these budgets every few layers while it reads a
    prompt, which needs less memory during prefill, and this does it once, after the last layer; one selection
    per KV head instead of one per query head.
    """
    score = window_score(window, kernel, "kvpress")
    return Method(Keep(score, Budget(budget), ByHits(most), (Recent(window),), page=page))


@paper(
    "PrefixKV: Adaptive Prefix KV Cache is What Vision Instruction-Following Models Need for Efficient "
    "Generation",
    arxiv="2412.03409",
    family="budget-layer",
    exact="deviates",
)
def prefixkv(budget: Amount, *, sinks: Tokens = 4, newest: Window = 1, page: Page | None = None) -> Method:
    """PrefixKV (Wang et al., 2024, arXiv:2412.03409): every layer keeps the same share of its attention.

    A token's importance is the attention it receives from the whole prompt, the mean over a layer's heads,
    which keep the same tokens. A layer keeps its most important tokens up to the share p of the total
    importance; p follows from the budget of the stack by bisection (see `ByPrefix`). The first `sinks` and
    the `newest` tokens stay, too. Deviations: p is found for every prompt, where the paper can find the
    layers' shares offline, from a few samples; importance of sinks and newest tokens is not counted in p;
    decode steps evict nothing.
    """
    protect = (Sink(sinks), Recent(newest))
    score = MeanOverHeads(AccumulatedAttention())
    return Method(Keep(score, Budget(budget), ByPrefix(), protect, page=page))


@paper(
    "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction",
    arxiv="2410.13846",
    family="budget-layer",
    exact="deviates",
    kvpress=Press("SimLayerKVPress", same="no: there, what the last token gives to itself is not counted"),
)
def simlayerkv(
    *,
    threshold: Ratio = 0.9,
    last: Window | None = None,
    sinks: Tokens = 4,
    window: Window = 1024,
    page: Page | None = None,
    variant: Literal["last", "prefill"] = "last",
) -> Method:
    """SimLayerKV (Zhang et al., 2024, arXiv:2410.13846): lazy layers keep only sinks and recent tokens.

    A layer is lazy if the last `last` queries give more than `threshold` of their attention, on average over
    heads, to the first `sinks` and the newest `window` tokens; it then keeps only these. The number of slots
    depends on the text. "last", the default because it is nearest to the authors' code, tests the prompt's
    last token, as kvpress does; their code tests the first generated token (Deviation). "prefill", the
    authors' form for prompts, tests the attention of the last 32 tokens to the first `sinks` and the window
    // 2 tokens before each of them, itself excluded. `last` replaces these numbers.
    """
    # Attention that is not on sinks and recent tokens is on the tokens between them.
    asked, near, each = pick(variant, last=(1, window, False), prefill=(32, max(window // 2, 1), True))
    score = Lookback(asked if last is None else last, sinks, near, each)
    protect = (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(1.0), Threshold(1 - threshold), protect, page=page))


@paper(
    "DBudgetKV: Dynamic Budget in KV Cache Compression for Ensuring Optimal Performance",
    arxiv="2502.16886",
    family="budget-layer",
    exact="deviates",
)
def dbudgetkv(*, loss: Share = 0.01, sinks: Tokens = 4, page: Page | None = None) -> Method:
    """DBudgetKV (Ni et al., 2025, arXiv:2502.16886): a layer evicts while its attention's norm holds.

    Tokens are ranked by position: the first `sinks`, then from the newest to the oldest. From the end of this
    order a layer evicts tokens until the norm of its attention matrix would lose more than the share `loss`
    (`NormPreserving`), so there is no budget. Deviation: the norm is that of the attention of all queries
    in all heads of a layer before any eviction; the paper only mentions the matrix of a layer.
    """
    protect = (Sink(sinks), Recent(1))
    return Method(Keep(NormPreserving(sinks, loss), Budget(1.0), Threshold(0.0), protect, page=page))


@paper(
    "EvolKV: Evolutionary KV Cache Compression for LLM Inference",
    arxiv="2509.08315",
    family="budget-layer",
    exact="deviates",
)
def evolkv(
    budget: Amount,
    *,
    fitted: Fit | None = None,
    window: Window = 32,
    kernel: Kernel = 5,
    page: Page | None = None,
) -> Method:
    """EvolKV (Yu and Chai, 2025, arXiv:2509.08315), section 3: layer budgets are searched for on tasks.

    A layer keeps the window and a share of the remaining budget of the stack, in proportion to an importance
    found by evolutionary search: for one group of layers after the other, CMA-ES maximises the number of
    correct answers. Within a layer, SnapKV's scores choose. fitted: the importances, as `kvjax fit evolkv`
    writes them. Deviation: correctness is counted per answer token, each given the right ones before it; the
    whole budget is always used, so the paper's factor for budgets near the target is 1, and its completion of
    a smaller total is not needed.
    """
    allocate = ByProfile(SearchedProfile(as_fitted(fitted)), window, 1.0)
    score = window_score(window, kernel, "grouped")
    return Method(Keep(score, Budget(budget), allocate, (Recent(window),), page=page))


@paper(
    "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference",
    arxiv="2405.12532",
    family="budget-layer",
    exact="deviates",
)
def pyramidinfer(
    budget: Amount,
    *,
    window: Window = 64,
    decay: Ratio = 0.9,
    recency: Annotated[float, Range(1, 100)] = 1.2,
    sinks: Tokens = 4,
    page: Page | None = None,
) -> Method:
    """PyramidInfer (Yang et al., 2024, arXiv:2405.12532), section 3: the higher the layer, the fewer tokens.

    All heads of a layer keep what the last `window` queries attend to most, newer queries weighing up to
    `recency` times as much (`RecencyWeighted`), the first `sinks` tokens, and the window. Higher layers keep
    fewer and fewer tokens, by the factor `decay` from layer to layer (`ByDecay`). Deviation: a layer chooses
    among all tokens, and the layers above still process those that it evicts, where the paper no longer
    computes them, so that this saves memory and no time; shares are such that the stack keeps L * budget; the
    window is a number of tokens, where the paper's is a fifth of the prompt; decode steps evict nothing.
    """
    score, protect = RecencyWeighted(window, recency), (Sink(sinks), Recent(window))
    return Method(Keep(score, Budget(budget), ByDecay(window + sinks, decay), protect, page=page))


@paper(
    "EpiCache: Episodic KV Cache Management for Long Conversational Question Answering",
    arxiv="2509.17396",
    family="budget-layer",
    exact="deviates",
)
def epicache(
    budget: Amount,
    *,
    episode: TokenIds | None = None,
    fitted: Fit | None = None,
    sinks: Tokens = 4,
    page: Page | None = None,
) -> Method:
    """EpiCache (Kim et al., 2025, arXiv:2509.17396), section 3: what one episode of a chat attends to.

    A piece of the conversation that represents an episode, `episode`, is read after every prompt and chunk;
    the tokens that its queries attend to most are kept (`Episode`), with the first `sinks` tokens. So each
    episode has its own cache: `prefill(..., chunk=block)` for each of them, and the one nearest to a question
    answers it. fitted: how far layers' keys drift under reading by blocks, as `kvjax fit epicache` writes it;
    a layer then keeps a quarter of the budget, and shares the rest in proportion. Without it, all layers keep
    equally many. Deviation: the caller cuts the conversation, clusters its pieces and chooses the one that
    represents each cluster; the heads of a layer keep equally many, where the authors' code also lets them
    differ; by default, an instruction represents the episode.
    """
    probe = Episode(episode)
    allocate = ByProfile(DriftProfile(as_fitted(fitted)), 0, 4 / 3)
    score = ProbeAttention(probe)
    return Method(Keep(score, Budget(budget), allocate, (Sink(sinks),), probe=probe, page=page))
