"""Quantisation that treats tokens differently: by their attention or their position."""

from __future__ import annotations

from typing import Annotated

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Threshold, Uniform
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.code_error import EncodingAccuracy
from kvjax.keep.scores.enough import LayerTopP
from kvjax.keep.scores.needed_bits import NeededBits
from kvjax.keep.scores.score import AccumulatedAttention, WindowAttention
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Amount, Bits, Group, Kernel, Page, Share, Tokens, Window, window_score
from kvjax.store.affine import Affine
from kvjax.store.outliers import Outliers

# A bound of a squared error.
Error = Annotated[float, Range(1e-9, 1e30)]


@paper(
    "No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed Precision Quantization",
    arxiv="2402.18096",
    family="quant-mixed",
    exact="deviates",
)
def mikv(
    budget: Amount, *, recent: Share = 0.5, high: Bits = 8, low: Bits = 2, group: Group | None = 32
) -> Method:
    """MiKV (Yang et al., 2024, arXiv:2402.18096), section 4: tokens that H2O would evict get fewer bits.

    `budget` is the number of tokens with `high` bits, which H2O chooses; all others have `low` bits, in
    groups of `group` channels. In steps the token that H2O would drop moves to the lower tier. Deviation:
    keys of the lower tier are not balanced channel by channel against the queries (section 4.2), and a later
    prompt chooses among all tokens again, as they are stored.
    """
    lower = Store(Affine(low, group=group), Affine(low, group=group))
    keep = Keep(AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),), when=STEP, lower=lower)
    return Method(keep, Store(Affine(high), Affine(high)))


@paper(
    "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
    arxiv="2405.14256",
    family="quant-mixed",
    exact="deviates",
)
def zipcache(
    budget: Amount, *, window: Window = 64, high: Bits = 4, low: Bits = 2, group: Group | None = 32
) -> Method:
    """ZipCache (He et al., 2024, arXiv:2405.14256), section 4: salient tokens have more bits.

    A token's saliency is the attention that it receives from some probe queries, divided by the number of
    probes that see it; here the probes are the last `window` queries, which see all older tokens. `budget` is
    the number of tokens, including the probes, with `high` bits; all others have `low`. Deviation: half of
    the paper's probes are drawn from the whole prompt; tokens are quantised in groups of `group` channels,
    where the paper divides values by the root of each channel's largest number first and quantises keys
    channel by channel; generated tokens have `high` bits until the next prompt, where the paper chooses again
    every 100 tokens.
    """
    lower = Store(Affine(low, group=group), Affine(low, group=group))
    score = WindowAttention(window, reduce="mean")
    keep = Keep(score, Budget(budget), Uniform(), (Recent(window),), lower=lower)
    return Method(keep, Store(Affine(high, group=group), Affine(high, group=group)))


@paper(
    "ZipVL: Efficient Large Vision-Language Models with Dynamic Token Sparsification and KV Cache "
    "Compression",
    arxiv="2410.08584",
    family="quant-mixed",
    exact="deviates",
)
def zipvl(
    *,
    share: Share = 0.975,
    high: Bits = 4,
    low: Bits = 2,
    group: Group | None = 32,
    page: Page | None = None,
) -> Method:
    """ZipVL (He et al., 2024, arXiv:2410.08584), section 3: a layer's attention says how many tokens matter.

    A layer has as many important tokens as hold the share `share` of its attention (`LayerTopP`), and
    they are those with the most attention per query that could see them. Important tokens have `high` bits,
    all others `low`, in groups of `group` channels. How many there are depends on the text. Deviation: all
    queries of a prompt count, where the paper takes 64 recent and 64 random ones; prompts are read in full,
    where the paper's attend to important tokens alone; generated tokens have `high` bits until the next
    prompt. The paper's second version drops what this first one stores in `low` bits.
    """
    lower = Store(Affine(low, group=group), Affine(low, group=group))
    keep = Keep(LayerTopP(share), Budget(1.0), Threshold(0.0), lower=lower, page=page)
    return Method(keep, Store(Affine(high, group=group), Affine(high, group=group)))


@paper(
    "QAQ: Quality Adaptive Quantization for LLM KV Cache",
    arxiv="2403.04643",
    family="quant-mixed",
    exact="deviates",
)
def qaq(
    *,
    key_error: Error = 1e4,
    value_error: Error = 10.0,
    window: Window = 5,
    high: Bits = 8,
    low: Bits = 2,
    outliers: Share = 0.01,
    page: Page | None = None,
) -> Method:
    """QAQ (Dong et al., 2024, arXiv:2403.04643), section 3: as many bits as attention's errors allow.

    `NeededBits` of a token follow from the attention that the last `window` queries give it and from bounds
    of squared errors, of attention for keys and of its outputs for values. A head stores tokens that need
    more than `low` bits, and the newest `window`, in `high` bits, and all others in `low`; the share
    `outliers` of a row's channels, its largest numbers, stays as computed. How many tokens there are of each
    depends on the text. Deviation: there are two numbers of bits, and a token's key and value have the same,
    where the authors' code gives each row its own, from 1 or 2 to 8; the largest query is that of the window,
    where the code has a constant; outliers are the largest magnitudes, where the code has the lowest and the
    highest numbers; generated tokens have `high` bits until the next prompt, and no copy of the numbers is
    held in host memory to choose again.
    """

    def store(bits: int) -> Store:
        codec = Outliers(outliers) >> Affine(bits) if outliers else Affine(bits)
        return Store(codec, codec)

    score = NeededBits(window, key_error, value_error, outliers)
    keep = Keep(score, Budget(1.0), Threshold(low + 0.5), (Recent(window),), lower=store(low), page=page)
    return Method(keep, store(high))


@paper(
    "MiniKV: Pushing the Limits of LLM Inference via 2-Bit Layer-Discriminative KV Cache",
    arxiv="2411.18077",
    family="quant-mixed",
    exact="deviates",
)
def minikv(
    budget: Amount, *, recent: Share = 0.5, bits: Bits = 2, group: Group = 16, residual: Tokens = 128
) -> Method:
    """MiniKV (Sharma et al., 2024, arXiv:2411.18077), section 3: a prompt's heavy hitters, in 2 bits.

    A prompt keeps the tokens that received the most attention, and the newest share `recent` of the budget.
    They and later tokens are stored as in KIVI, with `bits` bits in groups of `group`, except for the newest
    `residual` tokens. Deviation: all layers have the same budget, which is the paper's MiniKV; its pyramid
    over layers is left out, because granules need KV heads of equal lengths.
    """
    keep = Keep(AccumulatedAttention(), Budget(budget), Uniform(), (Recent(recent),))
    keys = Affine(bits, axis="channel", group=group)
    values = Affine(bits, axis="token", group=group, together=group)
    return Method(keep, Store(keys, values, residual))


@paper(
    "More Tokens, Lower Precision: Towards the Optimal Token-Precision Trade-off in KV Cache Compression",
    arxiv="2412.12706",
    family="quant-mixed",
    exact="deviates",
    aliases=("qpruningkv",),
)
def more_tokens_lower_precision(
    budget: Amount,
    *,
    bits: Bits = 4,
    window: Window = 32,
    kernel: Kernel = 5,
    group: Group = 32,
    residual: Tokens = 32,
) -> Method:
    """QPruningKV (Zhang et al., 2024, arXiv:2412.12706), section 3: trades bits for tokens at equal memory.

    `budget` is the memory, as tokens of 16 bits: with `bits` bits, 16 / `bits` times as many are kept, at
    most all. SnapKV chooses them, and they are stored as in KIVI in groups of `group`, except for the newest
    `residual` tokens. Deviation: scales and zeros of the codes, and the residual, come on top of the budget.
    """
    more = budget * (16 // bits) if isinstance(budget, int) else min(budget * 16 / bits, 1.0)
    keep = Keep(window_score(window, kernel, "grouped"), Budget(more), Uniform(), (Recent(window),))
    keys = Affine(bits, axis="channel", group=group)
    return Method(keep, Store(keys, Affine(bits, group=group, together=group), residual))


@paper(
    "IntactKV: Improving Large Language Model Quantization by Keeping Pivot Tokens Intact",
    arxiv="2403.01241",
    family="quant-mixed",
    exact="deviates",
)
def intactkv(*, pivots: Tokens = 1, bits: Bits = 4, group: Group | None = 32) -> Method:
    """IntactKV (Liu et al., 2024, arXiv:2403.01241), section 3: pivot tokens are not quantised.

    The first `pivots` tokens, which draw most attention, are stored unencoded; the keys and values of all
    others have `bits` bits, token by token, in groups of `group` channels. Deviation: weights are not
    quantised, and so a pivot's keys and values are those of the model itself, where the paper computes them
    with the unquantised weights; they are not trained.
    """
    return Method(store=Store(Affine(bits, group=group), Affine(bits, group=group), sinks=pivots))


@paper(
    "Q-Hitter: A Better Token Oracle for Efficient LLM Inference via Sparse-Quantized KV Cache",
    family="quant-mixed",
)
def q_hitter(budget: Amount, *, recent: Share = 0.5, bits: Bits = 4, group: Group | None = None) -> Method:
    """Q-Hitter (Zhang et al., MLSys 2024), section 4: heavy hitters with small quantisation errors.

    F[j] (1 - e_j): the attention that a token received, as in H2O, times one minus e_j, the relative error of
    codes of `bits` bits for its key and value. A share `recent` of the budget is the newest tokens; each step
    attends first, then drops the lowest; all are stored in those codes. The product approximates the paper's
    oracle, for which we found no equation and no code: the paper only names the two parts.
    """
    codec = Affine(bits, group=group)
    score = AccumulatedAttention() * EncodingAccuracy(codec)
    keep = Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP)
    return Method(keep, Store(codec, codec))
