"""Quantisation that treats keys, values, tokens or layers differently."""

from __future__ import annotations

from typing import Literal

from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.code_error import Encodable
from kvjax.keep.scores.score import AccumulatedAttention, WindowAttention
from kvjax.methods.papers import paper
from kvjax.methods.shared import (
    Amount,
    Bits,
    Fit,
    Group,
    Kernel,
    Layers,
    Rank,
    Ratio,
    Seed,
    Share,
    Tokens,
    Turns,
    Window,
    window_score,
)
from kvjax.state.codes import Codec
from kvjax.store.affine import Affine
from kvjax.store.basis import InBasis
from kvjax.store.extremes import Extremes
from kvjax.store.first_layers import FirstLayers
from kvjax.store.levels import ByChannel, ByToken, Levels
from kvjax.store.low_rank import LowRank
from kvjax.store.outliers import Outliers
from kvjax.store.predicted import Predicted
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax
from kvjax.store.split import Split
from kvjax.store.symmetric import Symmetric


@paper(
    "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    arxiv="2402.02750",
    family="quant-mixed",
    exact="deviates",
)
def kivi(*, bits: Bits = 2, group: Group = 32, residual: Tokens = 128) -> Method:
    """KIVI (Liu et al., 2024, arXiv:2402.02750), section 3.3: keys per channel, values per token.

    Keys are quantised in groups of `group` tokens of a channel, values in groups of `group` channels of a
    token; the newest tokens stay as computed. Deviation: keys and values leave the full-precision residual
    together, `group` tokens at a time, so between `residual` and residual + group - 1 tokens are exact (the
    paper flushes keys `residual` at a time and values one by one).
    """
    keys = Affine(bits, axis="channel", group=group)
    return Method(store=Store(keys, Affine(bits, axis="token", group=group, together=group), residual))


@paper(
    "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization",
    arxiv="2401.18079",
    family="quant-mixed",
    exact="deviates",
)
def kvquant(
    *, bits: Literal[2, 3, 4] = 3, outliers: Share = 0.01, sinks: Tokens = 1, fitted: Fit | None = None
) -> Method:
    """KVQuant (Hooper et al., 2024, arXiv:2401.18079), section 3: fitted levels, keys before their rotation.

    Keys are stored before RoPE, every channel brought to [-1, 1] by a range that was fitted, and turned when
    they are read; values by the range of each token. Both become the nearest of 2^bits levels, which were
    fitted to each layer by k-means weighted with the squares of the likelihood's gradients. The share
    `outliers` of the numbers stays as it is: of keys those farthest beyond their channels' ranges, of values
    a token's largest and smallest. The first `sinks` tokens stay as computed. fitted: ranges and levels, as
    `kvjax fit kvquant` writes them. Deviation: every token of a head has the same number of outliers, at
    least one of its keys and two of its values, where the paper counts over all heads together and stores
    all keys beyond their ranges; outliers of keys are stored by their channel's range; the range of values is
    that of a head's token in float16; weights are of the numbers themselves, where the authors' code takes
    those of numbers brought to [-1, 1]; no Q-Norm. Windowed layers store keys and values plain.
    """
    inner = ByChannel(outliers, found := as_fitted(fitted))
    keys: Codec = Levels(bits, "key", found)
    values: Codec = ByToken() >> Levels(bits, "value", found)
    if outliers:
        keys, values = Outliers(outliers) >> keys, Extremes(outliers) >> values
    return Method(store=Store(inner >> keys, values, sinks=sinks, unrotated=True))


@paper(
    "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM",
    arxiv="2403.05527",
    family="quant-mixed",
    exact="deviates",
)
def gear(
    *,
    bits: Bits = 2,
    group: Group = 64,
    rank: Rank = 2,
    outliers: Share = 0.02,
    turns: Turns = 3,
    residual: Tokens = 0,
) -> Method:
    """GEAR (Kang et al., 2024, arXiv:2403.05527), section 3: KIVI's codes, outliers, and what codes miss.

    X ~ D + L + S for every `group` tokens of a head. S: the share `outliers` of the numbers, half of them the
    largest and half the smallest of a channel (keys) or of a token (values), as they are; 0 leaves them out
    (the paper's GEAR-L). D: the others in KIVI's groups. L: rank `rank` of X - D - S, by `turns` turns of a
    power iteration. The newest tokens, from `residual` to residual + group - 1 of them, stay as computed.
    Deviation: a prompt is approximated `group` tokens at a time, too, with the rank of generated tokens,
    where the paper takes all of it at once, with rank 4; the outliers' places get the mean of the others
    before D (in the paper 0, in the authors' code the mean of all); outliers of a token are those of a head,
    not of all heads together; the power iteration starts from a fixed matrix, not a random one.
    """
    keys: Codec = Affine(bits, axis="channel", group=group)
    values: Codec = Affine(bits, axis="token", group=group, together=group)
    if outliers:
        keys = Extremes(outliers, axis="channel", group=group) >> keys
        values = Extremes(outliers) >> values
    missed = LowRank(rank, group, turns)
    return Method(store=Store(Residual(keys, missed), Residual(values, missed), residual))


@paper(
    "No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed Precision Quantization",
    arxiv="2402.18096",
    family="quant-mixed",
    exact="deviates",
)
def mikv(
    budget: Amount, *, recent: Share = 0.5, high: Bits = 8, low: Bits = 2, group: Group | None = 32
) -> Method:
    """MiKV (Yang et al., 2024, arXiv:2402.18096), section 4: what H2O would evict is stored with fewer bits.

    `budget` says how many tokens have `high` bits, H2O's choice of them; all others have `low` bits, in
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

    A token's saliency is the attention that it receives, divided by the number of queries that see it, of
    some probes alone, which here are the last `window` queries: those see all older tokens. `budget` says how
    many tokens, the probes among them, have `high` bits; all others have `low`. Deviation: half of the
    paper's probes are drawn from the whole prompt; tokens are quantised in groups of `group` channels, where
    the paper divides values by the root of each channel's largest number first and quantises keys channel by
    channel; tokens that are written have `high` bits until the next prompt, where the paper chooses anew
    every 100 tokens.
    """
    lower = Store(Affine(low, group=group), Affine(low, group=group))
    score = WindowAttention(window, reduce="mean")
    keep = Keep(score, Budget(budget), Uniform(), (Recent(window),), lower=lower)
    return Method(keep, Store(Affine(high, group=group), Affine(high, group=group)))


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

    Of a prompt stay the tokens that received the most attention, and the newest share `recent` of the budget.
    They and what is written later are stored as in KIVI, with `bits` bits in groups of `group`, behind the
    newest `residual` tokens. Deviation: all layers have the same budget, which is the paper's MiniKV; its
    pyramid over layers is left out, because granules lie in lists of equal lengths.
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
    """QPruningKV (Zhang et al., 2024, arXiv:2412.12706), section 3: of a memory, bits are traded for tokens.

    `budget` is the memory, as tokens of 16 bits: with `bits` bits, 16 / `bits` as many stay, at most all.
    They are SnapKV's choice, stored as in KIVI in groups of `group`, behind the newest `residual` tokens.
    Deviation: scales and zeros of the codes, and the residual, come on top of the budget.
    """
    more = budget * (16 // bits) if isinstance(budget, int) else min(budget * 16 / bits, 1.0)
    keep = Keep(window_score(window, kernel, "grouped"), Budget(more), Uniform(), (Recent(window),))
    keys = Affine(bits, axis="channel", group=group)
    return Method(keep, Store(keys, Affine(bits, group=group, together=group), residual))


@paper(
    "More for Keys, Less for Values: Adaptive KV Cache Quantization",
    arxiv="2502.15075",
    family="quant-mixed",
    exact="deviates",
)
def kv_adaquant(*, keys: Bits = 4, values: Bits = 2, group: Group | None = 32) -> Method:
    """KV-AdaQuant (Hariri et al., 2025, arXiv:2502.15075), section 4: keys have more bits than values.

    Keys have larger norms, and what they lose weighs more: they have `keys` bits and values `values` bits,
    token by token, in groups of `group` channels. Deviation: the paper studies several quantisers, this is
    the one of single tokens.
    """
    return Method(store=Store(Affine(keys, group=group), Affine(values, group=group)))


@paper(
    "IntactKV: Improving Large Language Model Quantization by Keeping Pivot Tokens Intact",
    arxiv="2403.01241",
    family="quant-mixed",
    exact="deviates",
)
def intactkv(*, pivots: Tokens = 1, bits: Bits = 4, group: Group | None = 32) -> Method:
    """IntactKV (Liu et al., 2024, arXiv:2403.01241), section 3: pivot tokens are not quantised.

    The first `pivots` tokens, which draw most attention, have keys and values as computed; those of all
    others have `bits` bits, token by token, in groups of `group` channels. Deviation: weights stay as they
    are, and so a pivot's keys and values are those of the model itself, where the paper makes them by the
    model before its weights are quantised; they are not trained.
    """
    return Method(store=Store(Affine(bits, group=group), Affine(bits, group=group), sinks=pivots))


@paper(
    "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving",
    arxiv="2310.19102",
    family="quant-mixed",
    exact="deviates",
)
def atom(*, bits: Bits = 4) -> Method:
    """The KV cache of Atom (Zhao et al., 2023, arXiv:2310.19102), section 4.4: asymmetric codes per head.

    A token's keys and values have a scale and a zero per head; attention decodes them where it reads them.
    Deviation: weights and activations stay as they are, so that no outlier channels, which the paper moves
    last and codes in 8 bits there, are to be kept; 3 bits are left out.
    """
    return Method(store=Store(Affine(bits), Affine(bits)))


@paper(
    "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale",
    arxiv="2208.07339",
    family="quant-mixed",
    exact="deviates",
)
def llm_int8(*, outliers: Share = 0.02) -> Method:
    """LLM.int8()'s decomposition (Dettmers et al., 2022, arXiv:2208.07339), section 3.2, of keys and values.

    The largest numbers of a token stay as they are, the others become int8 by the largest of them. Deviation:
    the paper codes weights and layer inputs, with all columns that hold a number beyond 6 left out; here the
    share `outliers` of each token of a head is, at least one number.
    """
    rest = Symmetric(8)
    codec: Codec = Outliers(outliers) >> rest if outliers else rest
    return Method(store=Store(codec, codec))


@paper(
    "AsymKV: Enabling 1-Bit Quantization of KV Cache with Layer-Wise Asymmetric Quantization Configurations",
    arxiv="2410.13212",
    family="quant-mixed",
    exact="deviates",
)
def asymkv(
    *, key_layers: Layers = 16, value_layers: Layers = 0, high: Bits = 2, low: Bits = 1, group: Group = 32,
    residual: Tokens = 128,
) -> Method:  # fmt: skip
    """AsymKV (Tao et al., 2024, arXiv:2410.13212), section 4: more bits for keys, and in the first layers.

    The first `key_layers` layers store keys, and the first `value_layers` layers values, in `high` bits; all
    others in `low`. An error of a key goes through the softmax, and one of a lower layer through the layers
    above. The codes are KIVI's, keys channel by channel and values token by token; the newest `residual`
    tokens stay as computed. Deviation: keys and values leave the residual `group` tokens at a time, as in
    `kivi`.
    """
    of_keys = [Affine(bits, axis="channel", group=group) for bits in (high, low)]
    of_values = [Affine(bits, group=group, together=group) for bits in (high, low)]
    keys, values = FirstLayers(key_layers, *of_keys), FirstLayers(value_layers, *of_values)
    return Method(store=Store(keys, values, residual))


@paper(
    "Q-Hitter: A Better Token Oracle for Efficient LLM Inference via Sparse-Quantized KV Cache",
    family="quant-mixed",
)
def q_hitter(budget: Amount, *, recent: Share = 0.5, bits: Bits = 4, group: Group | None = None) -> Method:
    """Q-Hitter (Zhang et al., MLSys 2024), section 4: heavy hitters that codes do not harm, in codes.

    F[j] (1 - e_j): the attention that a token received, as in H2O, times what is left of it in codes of
    `bits` bits, where e_j is their relative error in its key and value when it was computed. A share
    `recent` of the budget is the newest tokens; each step attends first, then drops the lowest; all are
    stored in those codes. The product stands for the paper's oracle, of which we found no equation and no
    code: it names the two parts.
    """
    codec = Affine(bits, group=group)
    score = AccumulatedAttention() * Encodable(codec)
    keep = Keep(score, Budget(budget), Uniform(), (Recent(recent),), when=STEP)
    return Method(keep, Store(codec, codec))


@paper(
    "Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models",
    arxiv="2501.19392",
    family="quant-mixed",
    exact="deviates",
)
def aqua_kv(
    *,
    bits: Literal[1, 2, 3, 4] = 2,
    first: Literal[1, 2, 3, 4] = 4,
    tokens: Group = 32,
    residual: Tokens = 128,
    seed: Seed = 0,
    fitted: Fit | None = None,
) -> Method:
    """AQUA-KV (Shutova et al., 2025, arXiv:2501.19392), section 3: what the layer below does not say.

    Keys are predicted by a linear map from the keys of the layer below, and values from the keys of their own
    layer and the values of the layer below, all heads together and as they come back of their codes; what is
    left is rotated by a Hadamard matrix and stored in `bits` bits, the whole first layer in `first` bits.
    Keys are stored before RoPE. Every `tokens` tokens are encoded together, and the newest `residual` stay as
    computed. fitted: the maps, as `kvjax fit aqua-kv` writes them. Deviation: rows are coded number by number
    by levels for random directions, where the paper's HIGGS codes pairs of numbers; first tokens are stored
    as others are; a step decodes all layers, one over the other.
    """
    rotate, found = Rotate("hadamard", seed), as_fitted(fitted)
    rest = (Predicted("key", tokens, found), Predicted("value", tokens, found))
    keys, values = (
        FirstLayers(1, rotate >> LloydMax(first), one >> rotate >> LloydMax(bits)) for one in rest
    )
    return Method(store=Store(keys, values, residual, unrotated=True))


@paper(
    "ResQ: Mixed-Precision Quantization of Large Language Models with Low-Rank Residuals",
    arxiv="2412.14363",
    family="quant-mixed",
    exact="deviates",
)
def resq(
    *, rank: Rank = 8, high: Bits = 8, bits: Bits = 4, seed: Seed = 0, fitted: Fit | None = None
) -> Method:
    """The KV cache of ResQ (Saxena et al., 2024, arXiv:2412.14363), section 4: main directions in more bits.

    A head's rows are taken to the eigenvectors of their second moments. The `rank` directions of the largest
    moments have `high` bits, the others `bits`; each part is rotated by a Hadamard matrix before it is
    quantised token by token. fitted: the eigenvectors, as `kvjax fit resq` finds them. Deviation: the paper's
    share of directions, an eighth, is a number here; the basis of values is not folded into weights; weights
    and other activations stay as they are.
    """
    rotate, found = Rotate("hadamard", seed), as_fitted(fitted)
    parts = Split(((rotate >> Affine(high), rank), (rotate >> Affine(bits), None)))
    keys, values = (InBasis(of, "resq", found) >> parts for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models",
    arxiv="2405.06219",
    family="quant-mixed",
    exact="deviates",
)
def skvq(
    *,
    keys: Bits = 2,
    values: Bits = 2,
    group: Group = 32,
    clip: Ratio = 0.95,
    residual: Tokens = 128,
    sinks: Tokens = 5,
    fitted: Fit | None = None,
) -> Method:
    """SKVQ (Duanmu et al., 2024, arXiv:2405.06219), section 3: channels by their ranges, clipped.

    A head's channels are put in order, so that the `group` channels that share a range are alike; a group is
    quantised between `clip` times its minimum and `clip` times its maximum, token by token. The newest
    `residual` tokens and the first `sinks` stay as computed. fitted: the orders, as `kvjax fit skvq` finds
    them. Deviation: channels are put in order by their ranges within a head, and in groups of one size, where
    the authors' code clusters those of all heads; `clip` is one for all groups, where the paper finds one for
    each; scales are in float16, not in float8; there are no 1.5 bits; orders are not folded into weights.
    """
    found = as_fitted(fitted)
    of_keys = InBasis("key", "skvq", found) >> Affine(keys, group=group, clip=clip)
    of_values = InBasis("value", "skvq", found) >> Affine(values, group=group, clip=clip)
    return Method(store=Store(of_keys, of_values, residual, sinks))
