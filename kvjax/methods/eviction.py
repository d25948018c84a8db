"""Methods that keep some tokens and drop the others, each as its sentence."""

from __future__ import annotations

from kvjax.grammar import PREFILL_END, STEP, Budget, Keep, Method
from kvjax.keep.budget import AcrossHeads, AcrossLayers, Pyramid, Uniform
from kvjax.keep.expected import ExpectedAttention
from kvjax.keep.merge import ZipMerge
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.probe import ProbeAttention, RepeatContext
from kvjax.keep.score import AccumulatedAttention, KeyNorm, Pool, Position, Uniformly, WindowAttention
from kvjax.methods.variant import pick

Amount = float | int


def random(budget: Amount, *, seed: int = 0) -> Method:
    """Baseline: a uniformly random set of tokens per head, the same for a row alone and in a batch."""
    return Method(Keep(Uniformly(seed), Budget(budget), Uniform()))


def sink_recent(budget: Amount, *, sinks: int = 4) -> Method:
    """Baseline: the first `sinks` and the newest tokens, at their own positions, also while decoding."""
    return Method(Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP))


def streamingllm(budget: Amount, *, sinks: int = 4) -> Method:
    """StreamingLLM (Xiao et al., 2023, arXiv:2309.17453), section 3.2: sinks and a rolling window.

    Rotation is by slot rank inside the cache, not by position in the text, so any length decodes within
    the trained window. Deviation: a prompt is read in one pass with ordinary attention before it is cut;
    the paper streams it token by token.
    """
    keep = Keep(Position(), Budget(budget), Uniform(), (Sink(sinks),), when=STEP, rank_phase=True)
    return Method(keep)


def l2compress(budget: Amount, *, skip_layers: int = 2) -> Method:
    """L2-norm compression (Devoto et al., 2024, arXiv:2406.11430): keeps the keys of small norm.

    score[j] = -||k_j||_2; the first `skip_layers` layers stay whole (kvpress' Knorm: skip_layers=0).
    """
    return Method(Keep(KeyNorm(), Budget(budget), Uniform(), skip_layers=skip_layers))


def h2o(budget: Amount, *, recent: float = 0.5) -> Method:
    """H2O (Zhang et al., 2023, arXiv:2306.14048), Algorithm 1: heavy hitters and recent tokens.

    F[j] = sum_i p_ij over the prompt and every decoded token; a share `recent` of the budget is the newest
    tokens, the rest the largest F. Each step attends first, then drops the lowest. With grouped queries, F
    sums over the heads of a group.
    """
    keep = Keep(AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), when=STEP)
    return Method(keep)


def tova(budget: Amount) -> Method:
    """TOVA (Oren et al., 2024, arXiv:2401.06104), section 3.2: drops what the newest query ignores.

    score[j] = mean over the layer's heads of p_tj for the last query t; one set for all heads, no
    protected window.
    """
    score = WindowAttention(1, reduce="sum", heads="layer", hide_window=False)
    return Method(Keep(score, Budget(budget), Uniform(), when=STEP))


def _window_score(window: int, kernel: int, variant: str) -> tuple:
    """(score, per query head) of SnapKV's observation window in the two published variants."""
    pool, reduce, per_head = pick(variant, paper=("max", "sum", True), kvpress=("mean", "mean", False))
    return WindowAttention(window, reduce=reduce) >> Pool(kernel, pool), per_head


def snapkv(budget: Amount, *, window: int = 64, kernel: int = 5, variant: str = "paper") -> Method:
    """SnapKV (Li et al., 2024, arXiv:2404.14469), section 4: what the last `window` queries attend to.

    score[j] = pool(sum_{i in window} softmax_j(q_i k_j / sqrt(H))); the window itself stays. "paper", as in
    the authors' code: max pooling, one selection per query head, so the cache holds N heads of slots.
    "kvpress": average pooling, mean over the group of a KV head, K heads of slots.
    """
    score, per_head = _window_score(window, kernel, variant)
    keep = Keep(
        score, Budget(budget), Uniform(), (Recent(window),), when=PREFILL_END, per_query_head=per_head
    )
    return Method(keep)


def pyramidkv(
    budget: Amount,
    *,
    window: int = 64,
    kernel: int = 5,
    beta: float = 20.0,
    page: int = 128,
    variant: str = "paper",
) -> Method:
    """PyramidKV (Cai et al., 2024, arXiv:2406.02069), section 4: SnapKV scores, pyramidal layer budgets.

    Layer budgets fall linearly with depth around the mean `budget`; slots lie in one pool, so the bytes
    are those of the sum. See `Pyramid` for the counts.
    """
    score, per_head = _window_score(window, kernel, variant)
    keep = Keep(
        score,
        Budget(budget),
        Pyramid(beta, window, variant, Budget(budget)),
        (Recent(window),),
        per_query_head=per_head,
        page=page,
    )
    return Method(keep)


def adakv(
    budget: Amount,
    *,
    window: int = 64,
    kernel: int = 5,
    floor: float = 0.2,
    page: int = 128,
    variant: str = "paper",
) -> Method:
    """Ada-KV (Feng et al., 2024, arXiv:2407.11550), Algorithm 1 over SnapKV scores: unequal heads.

    A layer's K * budget best slots decide how many each head keeps, with a floor per head; slots lie in
    pages per (row, head), so unequal heads cost unequal bytes. "paper" blends the counts with the floor;
    "kvpress" gives each head its floor of best slots first. Both use one score per KV head.
    """
    pool, reduce, blend = pick(variant, paper=("max", "sum", True), kvpress=("mean", "mean", False))
    score = WindowAttention(window, reduce=reduce) >> Pool(kernel, pool)
    keep = Keep(score, Budget(budget), AcrossHeads(floor, blend), (Recent(window),), page=page)
    return Method(keep)


def expected_attention(
    budget: Amount,
    *,
    future: int = 512,
    sinks: int = 4,
    covariance: bool = True,
    value_norm: bool = True,
    epsilon: float = 0.0,
) -> Method:
    """Expected Attention (Devoto et al., 2025, arXiv:2510.00636): the attention future queries will give.

    See `ExpectedAttention` for the closed form; the first `sinks` tokens stay. Acts at the end of a prefill,
    as in kvpress.
    """
    score = ExpectedAttention(future, sinks, covariance, value_norm, epsilon)
    return Method(Keep(score, Budget(budget), Uniform(), (Sink(sinks),)))


def kvzip(
    budget: Amount,
    *,
    sinks: int = 4,
    uniform: bool = False,
    page: int = 128,
    prefix: tuple[int, ...] | None = None,
) -> Method:
    """KVzip (Kim et al., 2025, arXiv:2505.23416), section 3: what the model needs to repeat its context.

    The prompt is read a second time over the full cache behind an instruction to repeat it; a slot's score
    is the largest attention it receives. The best slots of the whole stack stay (uniform=True: of every
    head). prefix: token ids of the instruction, by default encoded with the model's tokenizer. Deviation:
    one pass whatever the length, where the paper repeats 2048 tokens at a time; `sinks` stay as in kvpress.
    """
    probe = RepeatContext(prefix)
    allocate = Uniform() if uniform else AcrossLayers()
    return Method(
        Keep(ProbeAttention(probe), Budget(budget), allocate, (Sink(sinks),), probe=probe, page=page)
    )


def keepkv(budget: Amount, *, recent: float = 0.5, threshold: float = 0.8) -> Method:
    """KeepKV (Tian et al., 2025, arXiv:2504.09936): evicted tokens vote on in the slots they resemble.

    Heavy hitters and recent tokens stay as in H2O; what leaves is merged by `ZipMerge`, which lists the
    deviations.
    """
    keep = Keep(
        AccumulatedAttention(),
        Budget(budget),
        Uniform(),
        (Recent(recent),),
        when=STEP,
        merge=ZipMerge(threshold),
    )
    return Method(keep)
