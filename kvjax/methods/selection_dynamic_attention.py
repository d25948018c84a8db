"""Selection after every token, by the attention that tokens received."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.when import PREFILL_END, STEP, Every
from kvjax.keep.algebra import Pool, stage
from kvjax.keep.budgets.budget import Uniform, UpTo
from kvjax.keep.budgets.phases import PromptAndGenerated
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.beehive import SampledAttention
from kvjax.keep.scores.deviation import AttentionDeviation
from kvjax.keep.scores.keyformer import NoisyAttention, NoisyMass
from kvjax.keep.scores.recent_queries import FusedAttention, Neglect, Votes
from kvjax.keep.scores.score import (
    AccumulatedAttention,
    DecayedAttention,
    KeyRedundancy,
    ValueNorm,
    WindowAttention,
)
from kvjax.methods.papers import Press, paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Bits, Kernel, Seed, Share, Tokens, Window, pick, window_score
from kvjax.store.affine import Affine


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

    score[j] = F[j] ||v_j||_1 with H2O's accumulated attention F. The first `sinks` tokens stay, because their
    values are small however much attention they get, and a share `recent` of the budget is the newest tokens.
    """
    score = AccumulatedAttention() * ValueNorm(1)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(recent)), when=STEP))


@paper(
    "A2SF: Accumulative Attention Scoring with Forgetting Factor for Token Pruning in Transformer Decoder",
    arxiv="2407.20485",
    family="selection-dynamic",
    exact="equal",
)
def a2sf(
    budget: Amount,
    *,
    forgetting: Annotated[float, Range(0.001, 0.999)] | None = None,
    newest: Tokens | None = None,
    variant: Literal["paper", "prefill"] = "paper",
) -> Method:
    """A2SF (Jo and Shin, 2024, arXiv:2407.20485), section 3: H2O's sums, in which older queries count less.

    F[j] = sum_i forgetting^(t - i) p_ij. With grouped queries, F sums over the heads of a group. "paper", the
    default because it is the paper's: F counts the prompt and every decoded token, no newest tokens are
    protected, each step attends first, then evicts the lowest, and forgetting is 0.2 (the authors' code at
    its first commit, a4360f1). "prefill": the authors' code at 00a617f, which selects once, at the end of a
    prompt, always keeps the 16 newest tokens, and has forgetting 0.95. `forgetting` and `newest` replace
    these numbers.
    """
    rate, stay, when = pick(variant, paper=(0.2, 0, STEP), prefill=(0.95, 16, PREFILL_END))
    score = DecayedAttention(rate if forgetting is None else forgetting)
    stay = stay if newest is None else newest
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(stay),) if stay else (), when=when))


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
    """R-KV (Cai et al., 2025, arXiv:2505.24133), section 3: evicts redundant tokens in steps.

    score = importance * I - (1 - importance) * R. I is the attention of the last `window` queries to older
    tokens, with the largest logit of a group and pooled by the maximum; R is the redundancy of a key. The
    window stays. If no other key is similar, the authors' code ignores the first key's similarity; the paper
    does not, and this follows the paper.
    """
    attention = WindowAttention(window, reduce="mean", heads="logits", among_older=True) >> Pool(kernel)
    score = importance * attention + (importance - 1) * KeyRedundancy(threshold)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=Every(buffer)))


@paper(
    "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
    arxiv="2503.00979",
    family="selection-dynamic",
    exact="equal",
)
def morphkv(budget: Amount, *, window: Window = 32, fusion: Literal["sum", "max"] = "sum") -> Method:
    """MorphKV (Ghadia et al., 2025, arXiv:2503.00979): what the newest tokens attend to.

    score[j] = fuse_i p_ij, fused over the last `window` queries i by their sum or maximum; the window itself
    stays. Older queries do not count, so early tokens have no advantage. As in the authors' code, p is a
    softmax over the tokens before the window, of logits that are summed over the heads of a group. The code
    evicts before a token's attention instead of after the previous one's, which is equivalent.
    """
    score = FusedAttention(window, fusion)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=STEP))


@paper(
    "On the Efficacy of Eviction Policy for Key-Value Constrained Generative Language Model Inference",
    arxiv="2402.06262",
    family="selection-dynamic",
    exact="deviates",
    aliases=("easykv",),
)
def roco(budget: Amount, *, newest: Tokens = 10, sinks: Tokens = 4, steady: Share = 0.3) -> Method:
    """RoCo (Ren and Zhu, 2024, arXiv:2402.06262): the mean attention since a token came.

    The lowest mean is evicted, but not among the slots whose attention deviates most, which are a share
    `steady` of the budget. These include the `newest` tokens, whose means are over few queries, and the first
    `sinks`, as in the authors' code (EasyKV: its `temp_length`). Deviations: a prompt is cut once, after all
    of it, where EasyKV reads n tokens and then evicts one for each further token; with a budget in slots,
    `prefill(..., chunk=1)` does the same, and counts all attention (its keep_attention). With grouped
    queries, the deviation is that of all heads of a group, where the code averages the heads first; the code
    counts sinks beside its share.
    """
    score = stage(AttentionDeviation(newest), steady, AccumulatedAttention(per_query=True), whole=True)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(newest)), when=STEP))


@paper(
    "CORM: Cache Optimization with Recent Message for Large Language Model Inference",
    arxiv="2404.15949",
    family="selection-dynamic",
    exact="deviates",
)
def corm(
    budget: Amount,
    *,
    window: Window = 256,
    newest: Window = 256,
    threshold: Annotated[float, Range(0, 100)] = 1.0,
) -> Method:
    """CORM (Dai et al., 2024, arXiv:2404.15949): evicts tokens that no recent query finds important.

    A token is important to query t if p_tj >= threshold / t, an even share of all t tokens. It is evicted
    when it is important to none of the last `window` queries, in no head of a group, and is not among the
    `newest` tokens. Deviations: the paper sets no limit; here a head holds at most the budget, the tokens
    with the largest t p_tj, and allocates as many slots. Attention of the window's earlier queries is
    renormalised over the slots still held. A row stores `window` queries per head and layer, however short it
    is: at a budget of half, the cache weighs less than the full one only beyond `window` tokens times the
    query heads per KV head.
    """
    keep = Keep(Votes(window, newest), Budget(budget), UpTo(threshold), (Recent(newest),), when=STEP)
    return Method(keep)


@paper(
    "BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters for Efficient LLM Inference",
    arxiv="2410.23079",
    family="selection-dynamic",
    exact="deviates",
)
def buzz(
    budget: Amount,
    *,
    stride: Annotated[int, Range(2)] = 5,
    sinks: Tokens = 4,
    recent: Share = 0.3,
) -> Method:
    """BUZZ (Zhao et al., 2024, arXiv:2410.23079): samples of older tokens at nearly equal distances.

    The first `sinks` tokens and a share `recent` of the budget, the newest tokens, stay. When the tokens
    between them no longer fit, one of every `stride` tokens that have left the window since the last sampling
    is kept, the one with the most accumulated attention, and every ceil(stride / 2)-th of the older samples
    (`SampleState`). So a head's number of slots drops below its budget and grows again. Deviations: if a long
    prompt has more samples than fit, those with the least attention are evicted, too; sampling starts at two
    tokens beyond the budget instead of one; keys keep the rotation of their positions, where the authors'
    code counts positions in the cache.
    """
    score = SampledAttention(stride, sinks, recent)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks), Recent(recent)), when=Every(2)))


@paper(
    "SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation",
    arxiv="2412.13649",
    family="selection-dynamic",
    exact="deviates",
)
def scope(budget: Amount, *, written: Share = 0.5, window: Window = 32, kernel: Kernel = 5) -> Method:
    """SCOPE (Wu et al., 2024, arXiv:2412.13649), "slide": generated tokens have a separate budget.

    A prompt keeps its window and the best of its tokens by SnapKV's score, in the share 1 - `written` of the
    budget, and these stay. Generated tokens have the rest: the `window` newest ones, and of the others those
    to which the newest query attends most, as in the authors' code. Deviations: the unused share of a short
    prompt goes to generated tokens; prompts of later turns share one budget with those before.
    """
    last = WindowAttention(1, hide_window=False)
    score = PromptAndGenerated(window_score(window, kernel, "grouped"), last, written, window)
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(window),), when=STEP))


@paper(
    "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference",
    arxiv="2403.09054",
    family="selection-dynamic",
    exact="deviates",
)
def keyformer(
    budget: Amount,
    *,
    recent: Share = 0.3,
    tau: Annotated[float, Range(0.01, 100)] = 1.0,
    tau_end: Annotated[float, Range(0.01, 100)] = 2.0,
    horizon: Window = 2048,
    seed: Seed = 0,
) -> Method:
    """Keyformer (Adnan et al., 2024, arXiv:2403.09054), section 3: key tokens, by noisy attention.

    score[j] = sum_i softmax_j((q_i k_j / sqrt(H) + z_ij) / tau_i) over the prompt and every step, with Gumbel
    noise z; a share `recent` of the budget is the newest tokens. As in the authors' code, every query, key,
    head and layer has its own noise, so that a prompt's queries average it out; it is a function of `seed`
    and their indices, so that equal prompts keep equal tokens. Deviations: tau rises with a query's position
    over `horizon` tokens, where the paper's is constant for a prompt and rises over generated tokens; in a
    later turn, slots held before and new tokens have separate softmaxes (`NoisyMass`). Scores are per KV
    head, summed over a group.
    """
    score = NoisyAttention(NoisyMass(tau, tau_end, horizon, seed))
    return Method(Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP))


@paper(
    "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test "
    "Time",
    arxiv="2305.17118",
    family="selection-dynamic",
    exact="deviates",
)
def scissorhands(budget: Amount, *, history: Window = 400, newest: Tokens = 10, drop: Window = 32) -> Method:
    """Scissorhands (Liu et al., 2023, arXiv:2305.17118), algorithm 2: evicts tokens that were long neglected.

    A token is neglected by a query that gives it less than an even share 1 / t of its attention. Whenever a
    head holds `drop` tokens more than the budget, it evicts those that most of the last `history` queries
    neglect; the `newest` tokens stay. Deviations: with grouped queries, the mean over a group's heads;
    attention of earlier queries is renormalised over the slots still held; the paper gives layers different
    budgets, from offline measurements. A row stores `history` queries per head and layer, however short it
    is: at a budget of half, the cache weighs less than the full one only beyond `history` tokens times the
    query heads per KV head.
    """
    return Method(Keep(Neglect(history), Budget(budget), Uniform(), (Recent(newest),), when=Every(drop)))


@paper(
    "ALISA: Accelerating Large Language Model Inference via Sparsity-Aware KV Caching",
    arxiv="2403.17312",
    family="selection-dynamic",
    exact="deviates",
)
def alisa(budget: Amount, *, recent: Share = 0.5, window: Window = 16, bits: Bits = 8) -> Method:
    """ALISA (Zhao et al., 2024, arXiv:2403.17312), section 4: sparse window attention over quantised slots.

    Half of the budget (`recent`) is the newest tokens, the other half those to which the last `window`
    queries give the most attention, in sum; keys and values have `bits` bits. Deviations: evicted tokens are
    dropped, where the paper moves them to host memory or recomputes them when a later step needs them; a
    token and a head have one scale.
    """
    keep = Keep(
        WindowAttention(window, hide_window=False), Budget(budget), Uniform(), (Recent(recent),), when=STEP
    )
    return Method(keep, Store(Affine(bits), Affine(bits)))
