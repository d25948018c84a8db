"""Quantisation that treats every token and layer alike."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.make.stored_inputs import StoredInputs
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Bits, Fit, Group, Rank, Ratio, Seed, Tokens, Turns
from kvjax.state.codes import Codec
from kvjax.store.additive import CommutingSums
from kvjax.store.affine import Affine
from kvjax.store.atoms import Atoms
from kvjax.store.balanced import Balanced
from kvjax.store.coupled import CoupledCodes
from kvjax.store.first_layers import FirstLayers
from kvjax.store.gaussian_vectors import GaussianVectors, Normalised
from kvjax.store.orthogonal_error import OrthogonalError
from kvjax.store.outlier_channels import OutlierChannels
from kvjax.store.over_below import OverBelow
from kvjax.store.razor import Razor
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate
from kvjax.store.sphere import LloydMax, SignSketch


@paper(
    "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
    arxiv="2504.19874",
    family="quant",
    exact="deviates",
)
def turboquant(*, bits: Literal[2, 3, 4] = 4, sketch: bool = True, seed: Seed = 0) -> Method:
    """TurboQuant (Zandieh et al., 2025, arXiv:2504.19874), section 3: random rotation, then optimal codes.

    After a random rotation every coordinate of k / ||k|| has one known distribution, so one optimal codebook
    serves all. Keys (algorithm 2): bits - 1 bits of it, and the signs of a Gaussian sketch of the rest, so
    that <q, k> is unbiased. Values, and keys without `sketch` (algorithm 1): all bits, with a smaller error
    but a biased <q, k>, which is too small on average. Deviation: every channel has equally many bits; the
    paper's 2.5 and 3.5 bits give more of them to channels with outliers.
    """
    rotate = Rotate("orthogonal", seed)
    values = rotate >> LloydMax(bits)
    keys = rotate >> Residual(LloydMax(bits - 1), SignSketch(seed)) if sketch else values
    return Method(store=Store(keys, values))


@paper(
    "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    arxiv="2404.00456",
    family="quant",
    exact="deviates",
)
def quarot(*, bits: Bits = 4, group: Group | None = None, clip: Ratio = 0.95, seed: Seed = 0) -> Method:
    """KV cache of QuaRot (Ashkboos et al., 2024, arXiv:2404.00456), section 4: rotated, then 4 bits.

    A Hadamard rotation of every head's keys, after RoPE, and values leaves no channel larger than the others;
    then each token is quantised between `clip` times its minimum and `clip` times its maximum, in groups of
    `group` channels (None: a head, the paper's 128). Queries are rotated likewise. Deviation: weights and
    activations are not quantised, and the output of attention is rotated back online, where the paper folds
    that into the weights of values and outputs (`kvjax.train.conversion.convert.rotate_values`); the Hadamard
    matrix has random signs; the minimum is stored in float16, not as a whole number of steps.
    """
    rotated = Rotate("hadamard", seed) >> Affine(bits, group=group, clip=clip)
    return Method(store=Store(rotated, rotated))


@paper(
    "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead",
    arxiv="2406.03482",
    family="quant",
    exact="deviates",
)
def qjl(
    *,
    signs: Annotated[int, Range(1, 64)] = 2,
    first_layers: Annotated[int, Range(0)] = 15,
    first_signs: Annotated[int, Range(1, 64)] = 4,
    outliers: Annotated[int, Range(0)] = 8,
    bits: Bits = 2,
    group: Group = 32,
    buffer: Group = 128,
    seed: Seed = 0,
) -> Method:
    """QJL (Zandieh et al., 2024, arXiv:2406.03482), section 3: keys are the signs of a random projection.

    <q, k> ~ sqrt(pi / 2) / m ||k|| <S q, sign(S k)> for a random S of m = `signs` rows for every channel, in
    orthogonal blocks, which is unbiased; a key is m bits and its length, without scales or zeros
    (`SignSketch`). Of every `group` tokens of a head, the `outliers` channels with the largest norm have a
    sketch and a length of their own (`OutlierChannels`). The first layers, `first_layers` of them, have
    `first_signs` rows for every channel, and one for outliers. Values have `bits` bits, token by token, in
    groups of `group` channels. Tokens are encoded `buffer` at a time, so up to buffer - 1 of the newest are
    unencoded. Numbers are those of the command in the authors' README, for heads of 128 and 32 layers.
    Deviation: the authors state rows of S as numbers, 256 and 512, and 128 for outliers of first layers.
    """
    if buffer % group:
        raise ValueError(f"qjl: buffer must be a multiple of group={group}, got {buffer}: try {group}")

    def keys(signs: int, for_outliers: int) -> Codec:
        sketch = SignSketch(seed, signs, orthogonal=True)
        if outliers == 0:
            return sketch
        return OutlierChannels(outliers, group, SignSketch(seed, for_outliers, orthogonal=True), sketch)

    both = keys(signs, signs), keys(first_signs, 1)
    codec = both[0] if first_layers == 0 else FirstLayers(first_layers, both[1], both[0])
    return Method(store=Store(codec, Affine(bits, group=group, together=buffer)))


@paper(
    "ZeroQuant: Efficient and Affordable Post-Training Quantization for Large-Scale Transformers",
    arxiv="2206.01861",
    family="quant",
    exact="deviates",
)
def zeroquant(*, bits: Bits = 8) -> Method:
    """ZeroQuant's token-wise codes (Yao et al., 2022, arXiv:2206.01861), section 4.1, of keys and values.

    Every token has its own range, found when it is computed; nothing is calibrated. Deviation: a range is
    that of a head of a token, not of all its heads together; weights and other activations are not quantised,
    and so nothing is distilled.
    """
    return Method(store=Store(Affine(bits), Affine(bits)))


@paper(
    "QRazor: Reliable and Effortless 4-bit LLM Quantization by Significant Data Razoring",
    arxiv="2501.13331",
    family="quant",
    exact="deviates",
)
def qrazor(*, bits: Literal[3, 4] = 4, base: Literal[8, 16] = 8, group: Group = 16) -> Method:
    """QRazor (Lee et al., 2025, arXiv:2501.13331), section 4: int8 first, then only the leading bits.

    Keys and values are scaled to integers of `base` bits by their largest one. In every `group` channels, low
    bits are then dropped until a sign and `bits` - 1 bits of the largest number remain (`Razor`). Deviation:
    the integers have a scale per token of a head, where the paper calibrates one; weights and other
    activations are not quantised; codes are decoded before they are multiplied.
    """
    codec = Razor(bits, base, group)
    return Method(store=Store(codec, codec))


@paper(
    "KVarN: Variance-Normalized KV-Cache Quantization Mitigates Error Accumulation in Reasoning Tasks",
    arxiv="2606.03458",
    family="quant",
    exact="deviates",
)
def kvarn(
    *, keys: Bits = 4, values: Bits = 2, tokens: Annotated[int, Range(2)] = 128, turns: Turns = 16,
    seed: Seed = 0,
) -> Method:  # fmt: skip
    """KVarN (Muller et al., 2026, arXiv:2606.03458), section 4: rotated, then normalised on both axes.

    Every `tokens` tokens of a head are rotated by a Hadamard matrix and divided by scales of tokens and of
    channels, found in `turns` iterations, so that all have the same variance (`Balanced`). Keys are then
    quantised channel by channel, values token by token; the normalising scales of that axis are merged into
    theirs. Deviation: the newest tokens stay unencoded until there are `tokens` of them, but sinks do not;
    the Hadamard matrix has random signs.
    """
    rotate = Rotate("hadamard", seed)
    of_keys = rotate >> Balanced("token", tokens, turns) >> Affine(keys, axis="channel", group=tokens)
    of_values = rotate >> Balanced("channel", tokens, turns) >> Affine(values)
    return Method(store=Store(of_keys, of_values))


@paper(
    "NSNQuant: A Double Normalization Approach for Calibration-Free Low-Bit Vector Quantization of KV Cache",
    arxiv="2505.18231",
    family="quant",
    exact="deviates",
)
def nsnquant(*, bits: Literal[1, 2] = 2, tokens: Group = 64, residual: Tokens = 64, seed: Seed = 0) -> Method:
    """NSNQuant (Son et al., 2025, arXiv:2505.18231), section 4: one codebook for normal numbers.

    Tokens are normalised, their mean over `tokens` tokens of a head is taken off every channel, and they are
    normalised again (`Normalised`); after a Hadamard rotation they resemble independent normal numbers.
    Vectors of 8 / `bits` channels are then replaced by the nearest of 256 (`GaussianVectors`). The newest
    `residual` tokens stay unencoded. Deviation: the codebook is that of drawn normal numbers by k-means,
    without the paper's fine-tuning of it; the size of its vectors is the one that 8 bits give; the Hadamard
    matrix has random signs. There was no code of the authors to compare with.
    """
    codec = Normalised(tokens) >> Rotate("hadamard", seed) >> GaussianVectors(8 // bits, seed)
    return Method(store=Store(codec, codec, residual))


@paper(
    "XQuant: Breaking the Memory Wall for LLM Inference with KV Cache Rematerialization",
    arxiv="2508.10395",
    family="quant",
    exact="deviates",
)
def xquant(
    *,
    bits: Bits = 4,
    group: Group | None = None,
    heads: Annotated[int, Range(1)] | None = None,
    variant: Literal["gqa", "mha"] = "gqa",
) -> Method:
    """XQuant (Tomar et al., 2025, arXiv:2508.10395), section 3: the inputs X of layers are stored.

    variant="mha": X is stored once, token by token in groups of `group` channels, and keys X W_k and values X
    W_v are computed from it when they are read (`LayerInputs`). With as many KV heads as query heads that is
    half of what keys and values have. variant="gqa", the default because most models have fewer KV heads than
    query heads: W_k = U_k S V' and W_v likewise; X U_k and X U_v are stored, which together have as many
    channels as keys and values. heads, of "gqa": KV heads whose weights are taken together; None: all of a
    layer.

    Deviation: the channels of X U_k and X U_v are multiplied by the square roots of the singular values; keys
    are encoded like values, token by token. The differences between layers (XQuant-CL) are `xquant_cl`.
    """
    codec = Affine(bits, group=group)
    make = StoredInputs() if variant == "mha" else GroupedLowRank(1.0, heads or 2**16)
    return Method(store=Store(codec, codec), make=make)


@paper(
    "XQuant: Breaking the Memory Wall for LLM Inference with KV Cache Rematerialization",
    arxiv="2508.10395",
    family="quant",
    exact="deviates",
)
def xquant_cl(
    *,
    bits: Bits = 2,
    first: Bits = 4,
    layers: Annotated[int, Range(1)] = 3,
    group: Group | None = None,
    tokens: Group = 32,
    residual: Tokens = 0,
) -> Method:
    """XQuant-CL (Tomar et al., 2025, arXiv:2508.10395), section 3: differences between the inputs of layers.

    The lowest `layers` layers store their inputs X in `first` bits, each layer above the difference between
    its X and the X of the layer below, as decoded, in `bits` bits, token by token in groups of `group`
    channels; X is the sum of what is stored up to its layer. Keys and values are computed from X when they
    are read, as in `xquant(variant="mha")`. A layer is decoded after all layers below it, so `tokens` tokens
    are encoded together, and the newest `residual` stay unencoded.

    Deviation: models with grouped queries store whole inputs, too, where the paper projects differences to
    fewer channels; inputs are those after a layer's norm, as in `xquant`.
    """
    codec = OverBelow(tokens) >> Affine(bits, group=group)
    keys = FirstLayers(layers, Affine(first, group=group), codec)
    return Method(store=Store(keys, None, residual), make=StoredInputs())


@paper(
    "SQuat: Subspace-orthogonal KV Cache Quantization",
    arxiv="2503.24358",
    family="quant",
    exact="deviates",
)
def squat(
    *,
    bits: Bits = 2,
    group: Group = 32,
    residual: Tokens = 32,
    run: Group = 64,
    rank: Rank = 20,
    weight: Annotated[float, Range(0)] = 0.001,
) -> Method:
    """SQuat (Wang et al., 2025, arXiv:2503.24358), section 3: KIVI's codes, errors orthogonal to queries.

    A row's prompt gives the `rank` main directions of the queries of a KV head. Keys are quantised channel by
    channel, `group` tokens at a time, in runs of `run` channels; the error of a run moves later channels, so
    that the error of the whole key is in directions where queries are small (`OrthogonalError`). Values are
    quantised token by token, and the newest `residual` tokens stay unencoded. Deviation: keys are quantised
    after their rotation, as in the authors' post-RoPE variant; values are not rotated by a Hadamard matrix;
    the queries of all prompts count, and for a prompt in chunks those so far; every row stores the sum of q
    q', from which the directions are computed whenever tokens are encoded.
    """
    keys = OrthogonalError(run, rank, weight) >> Affine(bits, axis="channel", group=group)
    return Method(store=Store(keys, Affine(bits, group=group, together=group), residual))


@paper(
    "KV Cache is 1 Bit Per Channel: Efficient Large Language Model Inference with Coupled Quantization",
    arxiv="2405.03917",
    family="quant",
    exact="deviates",
)
def cq(
    *,
    channels: Group = 4,
    bits: Bits = 8,
    fitted: Fit | None = None,
) -> Method:
    """Coupled Quantization (Zhang et al., 2024, arXiv:2405.03917), section 3: channels share a code.

    Every `channels` neighbouring channels of a head are replaced by the nearest of 2^bits vectors, since
    channels are correlated; a number takes bits / channels bits, without scales. Keys are stored before RoPE,
    and rotated when they are read. The vectors are found for each head by k-means, weighted by the squared
    gradients of the likelihood. fitted: as `kvjax fit cq` writes it. Deviation: the defaults are the paper's
    CQ-4c8b (8c8b is one bit); k-means starts from drawn vectors once, with 25 turns. There was no code of the
    authors to compare with.
    """
    keys, values = (CoupledCodes(channels, bits, of, as_fitted(fitted)) for of in ("key", "value"))
    return Method(store=Store(keys, values, unrotated=True))


@paper(
    "CSR: Achieving 1 Bit Key-Value Cache via Sparse Representation",
    arxiv="2412.11741",
    family="quant",
    exact="deviates",
)
def csr(*, atoms: Annotated[int, Range(1, 64)] = 4, fitted: Fit | None = None) -> Method:
    """CSR (Zhang et al., 2024, arXiv:2412.11741), section 3: rows are sums of a few vectors of a dictionary.

    Matching pursuit finds `atoms` vectors of a layer's dictionary and their weights for every key and value
    of a head (`Atoms`); stored are indices of 16 bits and weights of 8. fitted: the dictionaries, as `kvjax
    fit csr --set size=512` fits them. Deviation: a dictionary is fitted by alternating the pursuit with least
    squares, where the paper trains a network (NeuralDict); weights are float8, and keys are encoded after
    RoPE. There was no code of the authors to compare with.
    """
    keys, values = (Atoms(atoms, of, as_fitted(fitted)) for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "CommVQ: Commutative Vector Quantization for KV Cache Compression",
    arxiv="2506.18879",
    family="quant",
    exact="deviates",
)
def commvq(*, channels: Group = 6, bits: Literal[1, 2, 3, 4, 6, 8] = 6, fitted: Fit | None = None) -> Method:
    """CommVQ (Li et al., 2025, arXiv:2506.18879), section 4: sums of vectors that commute with RoPE.

    A key of a head, before RoPE, is a sum of H / `channels` pairs of vectors, each of 2^bits: the columns of
    2x2 blocks that commute with the rotation of their channels (`CommutingSums`). A number takes 2 bits /
    channels bits, 2 by default and 1 with channels=12, without scales. The codebooks are found for each head,
    one pair after the other, by expectation and maximisation. fitted: as `kvjax fit commvq` writes them.

    Deviation: values are encoded as keys are, where the paper trains an encoder of all heads' values; keys
    are decoded and rotated when they are read, where the paper multiplies queries by rotated codebooks and
    looks the products up.
    """
    keys, values = (CommutingSums(channels, bits, of, as_fitted(fitted)) for of in ("key", "value"))
    return Method(store=Store(keys, values, unrotated=True))
