"""Quantisation that treats keys, values and their channels differently."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Bits, Fit, Group, Rank, Ratio, Seed, Share, Tokens, Turns
from kvjax.state.codes import Codec
from kvjax.store.affine import Affine
from kvjax.store.basis import InBasis
from kvjax.store.clustered import Clustered
from kvjax.store.extremes import Extremes
from kvjax.store.factors import Factors
from kvjax.store.levels import ByChannel, ByToken, Levels
from kvjax.store.low_rank import LowRank
from kvjax.store.outliers import Outliers
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate
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
    token; the newest tokens stay unencoded. Deviation: keys and values leave the full-precision residual
    together, `group` tokens at a time, so between `residual` and residual + group - 1 tokens are exact (the
    paper flushes keys `residual` at a time and values one by one).
    """
    keys = Affine(bits, axis="channel", group=group)
    return Method(store=Store(keys, Affine(bits, axis="token", group=group, together=group), residual))


@paper(
    "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache",
    arxiv="2502.10424",
    family="quant-mixed",
    exact="deviates",
)
def quantspec(*, group: Group = 128, residual: Tokens = 128) -> Method:
    """QuantSpec (Tiwari et al., 2025, arXiv:2502.10424), section 4: codes of 4 bits, and 4 of their error.

    Keys are quantised in groups of `group` tokens of a channel, values token by token; the newest tokens,
    from `residual` to residual + group - 1 of them, stay unencoded. Attention reads both codes, 8 bits;
    `kvjax.speculate(..., method="quantspec", draft=kvjax.FirstCodes())` drafts from the first
    codes alone, in the same memory. Deviation: the second codes have scales of their own, where the paper's
    are a sixteenth of the first; weights are not quantised.
    """
    keys, values = Affine(4, axis="channel", group=group), Affine(4, axis="token", together=group)
    return Method(store=Store(Residual(keys, keys), Residual(values, values), residual))


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

    Keys are stored before RoPE, every channel scaled to [-1, 1] by a fitted range, and rotated when they are
    read; values by the range of each token. Both are rounded to the nearest of 2^bits levels, which were
    fitted to each layer by k-means weighted by the squared gradients of the likelihood. The share `outliers`
    of the numbers is stored unencoded: of keys those farthest beyond their channels' ranges, of values a
    token's largest and smallest. The first `sinks` tokens stay unencoded. fitted: ranges and levels, as
    `kvjax fit kvquant` writes them. Deviation: every token of a head has the same number of outliers, at
    least one of its keys and two of its values, where the paper counts over all heads together and stores all
    keys beyond their ranges; outliers of keys are stored by their channel's range; the range of values is
    that of a head's token in float16; weights are of the numbers themselves, where the authors' code takes
    those of numbers scaled to [-1, 1]; no Q-Norm. Windowed layers store keys and values unencoded.
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
    """GEAR (Kang et al., 2024, arXiv:2403.05527), section 3: KIVI's codes, outliers, and a low-rank error.

    X ~ D + L + S for every `group` tokens of a head. S: the share `outliers` of the numbers, half of them the
    largest and half the smallest of a channel (keys) or of a token (values), unencoded; 0 omits them (the
    paper's GEAR-L). D: the others in KIVI's groups. L: rank `rank` of X - D - S, by `turns` steps of a power
    iteration. The newest tokens, from `residual` to residual + group - 1 of them, stay unencoded.
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
    "More for Keys, Less for Values: Adaptive KV Cache Quantization",
    arxiv="2502.15075",
    family="quant-mixed",
    exact="deviates",
)
def kv_adaquant(*, keys: Bits = 4, values: Bits = 2, group: Group | None = 32) -> Method:
    """KV-AdaQuant (Hariri et al., 2025, arXiv:2502.15075), section 4: keys get more bits than values.

    Keys have larger norms, and their errors matter more: they have `keys` bits and values `values` bits,
    token by token, in groups of `group` channels. Deviation: of several quantisers in the paper, this is the
    one for single tokens.
    """
    return Method(store=Store(Affine(keys, group=group), Affine(values, group=group)))


@paper(
    "Atom: Low-bit Quantization for Efficient and Accurate LLM Serving",
    arxiv="2310.19102",
    family="quant-mixed",
    exact="deviates",
)
def atom(*, bits: Bits = 4) -> Method:
    """KV cache of Atom (Zhao et al., 2023, arXiv:2310.19102), section 4.4: asymmetric codes per head.

    A token's keys and values have a scale and a zero per head; attention decodes them where it reads them.
    Deviation: weights and activations are not quantised, so there are no outlier channels, which the paper
    moves to the end and keeps in 8 bits; 3 bits are left out.
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

    The largest numbers of a token are stored unencoded; the others become int8 by the largest of them.
    Deviation: the paper quantises weights and layer inputs, except all columns that hold a number beyond 6;
    here the share `outliers` of each token of a head is excepted, at least one number.
    """
    rest = Symmetric(8)
    codec: Codec = Outliers(outliers) >> rest if outliers else rest
    return Method(store=Store(codec, codec))


@paper(
    "ResQ: Mixed-Precision Quantization of Large Language Models with Low-Rank Residuals",
    arxiv="2412.14363",
    family="quant-mixed",
    exact="deviates",
)
def resq(
    *, rank: Rank = 8, high: Bits = 8, bits: Bits = 4, seed: Seed = 0, fitted: Fit | None = None
) -> Method:
    """KV cache of ResQ (Saxena et al., 2024, arXiv:2412.14363), section 4: main directions in more bits.

    A head's rows are taken to the eigenvectors of their second moments. The `rank` directions of the largest
    moments have `high` bits, the others `bits`; each part is rotated by a Hadamard matrix before it is
    quantised token by token. fitted: the eigenvectors, as `kvjax fit resq` finds them. Deviation: the paper's
    share of directions, an eighth, is a number here; the basis of values is not folded into weights; weights
    and other activations are not quantised.
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
    keys: Annotated[int, Range(1, 8)] = 2,
    values: Annotated[int, Range(1, 8)] = 2,
    group: Group = 32,
    clip: Ratio = 0.95,
    residual: Tokens = 128,
    sinks: Tokens = 5,
    fitted: Fit | None = None,
) -> Method:
    """SKVQ (Duanmu et al., 2024, arXiv:2405.06219), section 3: groups of channels that are alike, clipped.

    The channels of a head are clustered by their minimum and maximum, keys before RoPE, into groups of
    `group` channels on average; a group is quantised between `clip` times its minimum and `clip` times its
    maximum, token by token, with a scale and a zero in float8. The newest `residual` tokens and the first
    `sinks` stay unencoded. fitted: the group of every channel, as `kvjax fit skvq` finds it by k-means.
    Deviation: groups are of one head, where those of the authors' code have channels of all heads of a layer,
    which halves the error of keys (SmolLM2-135M, 2 bits, groups of 32: 0.061 instead of 0.127 relative to
    their squares, and 0.24 for groups of neighbours; values 0.16 in all three); `clip` is the same for all
    groups, as in the authors' code, where the paper finds one for each; scales and zeros beyond float8's
    range become its largest number; there are no 1.5 bits; codes keep the order of channels, so that no
    weights are permuted.
    """
    found = as_fitted(fitted)
    of_keys, of_values = (
        Clustered(keys, "key", group, clip, found),
        Clustered(values, "value", group, clip, found),
    )
    return Method(store=Store(of_keys, of_values, residual, sinks, unrotated=True))


@paper(
    "WKVQuant: Quantizing Weight and Key/Value Cache for Large Language Models Gains More",
    arxiv="2402.12065",
    family="quant-mixed",
    exact="deviates",
)
def wkvquant(
    *, bits: Bits = 4, group: Group | None = 32, residual: Tokens = 1, fitted: Fit | None = None
) -> Method:
    """KV cache of WKVQuant (Yue et al., 2024, arXiv:2402.12065), section 3: channels first, then tokens.

    A head's channels are shifted and divided by fitted numbers, then each token is quantised by its own range
    in groups of `group` channels. The newest token is quantised only when the next one comes. fitted: shifts
    and scales, as `kvjax fit wkvquant` learns them through the codes, starting from the middle and the half
    of a channel's range. Deviation: the fit minimises the error of keys and values, where the paper minimises
    that of blocks' outputs; weights are not quantised. There was no code of the authors to compare with.
    """
    found, codec = as_fitted(fitted), Affine(bits, group=group)
    keys, values = (InBasis(of, "wkvquant", found) >> codec for of in ("key", "value"))
    return Method(store=Store(keys, values, residual))


@paper(
    "Unlocking Data-free Low-bit Quantization with Matrix Decomposition for KV Cache Compression",
    arxiv="2405.12591",
    family="quant-mixed",
    exact="deviates",
    aliases=("mpo",),
)
def decoquant(*, bits: Bits = 4, tokens: Annotated[int, Range(2)] = 1024, residual: Tokens = 0) -> Method:
    """DecoQuant (Liu et al., 2024, arXiv:2405.12591), section 3: the tall factor of a matrix in few bits.

    Every `tokens` tokens of a head are a product of a tall matrix and a small one, by singular values. The
    tall one is quantised token by token in `bits` bits; the small one, which takes the outliers, stays in
    float16 and costs 16 H / tokens bits per number. Deviation: the roots of the singular values are in each
    factor, since all of them in the tall one leaves larger errors than codes without factors
    (`scripts/studies/left_out.py`); heads are decomposed one by one, every `tokens` tokens anew, and newer
    tokens stay unencoded until there are as many. Where the paper and its code
    differ in which factor is quantised, this follows the paper.
    """
    codec = Factors(tokens) >> Affine(bits)
    return Method(store=Store(codec, codec, residual))
