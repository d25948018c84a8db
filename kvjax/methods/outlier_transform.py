"""Quantisation after a change of basis, drawn or fitted, in which channels are more alike."""

from __future__ import annotations

from kvjax.grammar import Method, Store
from kvjax.grammar.fitted import as_fitted
from kvjax.methods.papers import paper
from kvjax.methods.shared import Bits, Fit, Group, Ratio, Seed, Tokens
from kvjax.store.affine import Affine
from kvjax.store.basis import InBasis
from kvjax.store.clipped import Clipped
from kvjax.store.fixed import StaticAffine
from kvjax.store.rotate import Rotate


@paper(
    "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving",
    arxiv="2405.04532",
    family="outlier-transform",
    exact="deviates",
)
def qserve(*, bits: Bits = 4, group: Group | None = None, fitted: Fit | None = None) -> Method:
    """KV cache of QServe (Lin et al., 2024, arXiv:2405.04532), section 4.2: SmoothAttention, then 4 bits.

    Keys are divided by lambda_c = max |k_c|^0.5, with the same lambda for both channels of a RoPE pair, and
    queries are multiplied by it; keys and values are then quantised token by token, each head of a token by
    itself, in groups of `group` channels. fitted: lambda of every KV head, as `kvjax fit qserve` writes it.
    Deviation: queries are multiplied online, where the paper folds lambda into the weights of keys and
    queries, which gives the same codes; weights and other activations are not quantised.
    """
    codec = Affine(bits, group=group)
    return Method(store=Store(InBasis("key", "qserve", as_fitted(fitted)) >> codec, codec))


@paper(
    "FlatQuant: Flatness Matters for LLM Quantization",
    arxiv="2410.09426",
    family="outlier-transform",
    exact="deviates",
)
def flatquant(*, bits: Bits = 4, clip: Ratio = 1.0, fitted: Fit | None = None) -> Method:
    """KV cache of FlatQuant (Sun et al., 2024, arXiv:2410.09426), section 3: a learnt basis.

    The keys of a layer, after RoPE, and its values are multiplied by one matrix for all heads, an orthogonal
    one and scales, which flattens their distribution; then each head of a token is quantised by itself,
    between `clip` times its minimum and `clip` times its maximum. Queries are multiplied by the inverse
    transpose. fitted: the matrices, as `kvjax fit flatquant` learns them, with straight-through gradients.
    Deviation: the fit minimises the error of keys and values, where the paper minimises that of a layer's
    outputs; `clip` is given and not learnt; the matrix of values is not folded into weights; weights and
    other activations are not quantised.
    """
    found, codec = as_fitted(fitted), Affine(bits, clip=clip)
    keys, values = (InBasis(of, "flatquant", found) >> codec for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "SpinQuant: LLM Quantization with Learned Rotations",
    arxiv="2405.16406",
    family="outlier-transform",
    exact="deviates",
)
def spinquant(
    *, bits: Bits = 4, group: Group | None = None, seed: Seed = 0, fitted: Fit | None = None
) -> Method:
    """KV cache of SpinQuant (Liu et al., 2024, arXiv:2405.16406), section 3: a learnt rotation of values.

    Keys are rotated by a Hadamard matrix after RoPE (R3), and values by a rotation that is learnt for every
    layer, one for all its heads (R2); both are quantised token by token in groups of `group` channels.
    fitted: the rotations, as `kvjax fit spinquant` learns them through the codes, by Cayley's map of skew
    matrices, starting from a Hadamard matrix. Deviation: the fit minimises the error of values, where the
    paper minimises the loss of the quantised network; R2 is not folded into weights; the Hadamard matrix has
    random signs; weights and other activations are not quantised.
    """
    codec = Affine(bits, group=group)
    values = InBasis("value", "spinquant", as_fitted(fitted)) >> codec
    return Method(store=Store(Rotate("hadamard", seed) >> codec, values))


@paper(
    "DuQuant: Distributing Outliers via Dual Transformation Makes Stronger Quantized LLMs",
    arxiv="2406.01721",
    family="outlier-transform",
    exact="deviates",
)
def duquant(*, bits: Bits = 4, seed: Seed = 0) -> Method:
    """KV cache of DuQuant (Lin et al., 2024, arXiv:2406.01721): rotated keys, and unrotated values.

    As in the authors' code, keys are rotated by a Hadamard matrix after RoPE, and each head of a token of
    keys and values is quantised by itself. Deviation: the paper's greedy rotations and its permutation apply
    to the inputs of layers, where they change no key and no value, and weights and inputs are not quantised;
    the Hadamard matrix has random signs.
    """
    return Method(store=Store(Rotate("hadamard", seed) >> Affine(bits), Affine(bits)))


@paper(
    "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models",
    arxiv="2308.13137",
    family="outlier-transform",
    exact="deviates",
)
def omniquant(*, bits: Bits = 4, fitted: Fit | None = None) -> Method:
    """KV cache of OmniQuant (Shao et al., 2023, arXiv:2308.13137), section 3.3: learnt scales and shifts.

    Channels of keys are divided by scales, and those of queries multiplied; channels of values are shifted
    and divided; then each head of a token is quantised by itself. fitted: both, as `kvjax fit omniquant`
    learns them through the codes. Deviation: the fit minimises the error of keys and values, where the paper
    minimises that of a block's outputs; scales of keys are equal for both channels of a RoPE pair, where the
    authors' code folds one for every channel into weights before RoPE; nothing is folded into weights, which
    are not quantised, and their clipping is not learned.
    """
    found, codec = as_fitted(fitted), Affine(bits)
    keys, values = (InBasis(of, "omniquant", found) >> codec for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "AffineQuant: Affine Transformation Quantization for Large Language Models",
    arxiv="2403.12544",
    family="outlier-transform",
    exact="deviates",
)
def affinequant(*, bits: Bits = 4, fitted: Fit | None = None) -> Method:
    """KV cache of AffineQuant (Ma et al., 2024, arXiv:2403.12544), section 3: a learnt invertible matrix.

    The keys of each head, after RoPE, and its values are multiplied by a matrix, values after a shift; then
    each head of a token is quantised by itself. Queries are multiplied by the inverse transpose. The matrix
    starts as a diagonal, and a gradual mask lets it learn from the diagonal outwards; in each row, the
    diagonal is larger than all else together, so that it stays invertible. fitted: the matrices, as `kvjax
    fit affinequant` learns them, with straight-through gradients. Deviation: dominance holds by shrinking
    rows, where the paper multiplies what the mask lets through by a small factor; the fit minimises the error
    of keys and values, where the paper minimises that of a block's outputs; the paper's matrix of keys is a
    diagonal in models with RoPE, into whose weights it is folded; nothing is folded into weights, which are
    not quantised.
    """
    found, codec = as_fitted(fitted), Affine(bits)
    keys, values = (InBasis(of, "affinequant", found) >> codec for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization",
    arxiv="2605.17757",
    family="outlier-transform",
    exact="equal",
)
def oscar(
    *,
    bits: Bits = 2,
    group: Group | None = None,
    keys: Ratio = 0.96,
    values: Ratio = 0.92,
    residual: Tokens = 256,
    sinks: Tokens = 64,
    fitted: Fit | None = None,
) -> Method:
    """OSCAR (Zhou et al., 2026, arXiv:2605.17757), section 3: rotations by attention's sensitivity.

    Keys are rotated to the eigenvectors of their queries' second moments, and values to those of values
    weighted by their keys' logits, one rotation for all heads of a layer; a Hadamard matrix then makes all
    directions equally important, and a permutation spreads them over all groups of channels. In each head of
    a token, numbers beyond the quantiles `keys` and `values` of their magnitudes are clipped, and groups of
    `group` channels quantised. The newest `residual` tokens and the first `sinks` stay unencoded. fitted:
    the rotations, as `kvjax fit oscar` finds them.
    """
    found, codec = as_fitted(fitted), Affine(bits, group=group)
    of_keys = InBasis("key", "oscar", found) >> Clipped(keys) >> codec
    of_values = InBasis("value", "oscar", found) >> Clipped(values) >> codec
    return Method(store=Store(of_keys, of_values, residual, sinks))


@paper(
    "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    arxiv="2211.10438",
    family="outlier-transform",
    exact="deviates",
)
def smoothquant(*, bits: Bits = 8, fitted: Fit | None = None) -> Method:
    """KV cache of SmoothQuant (Xiao et al., 2022, arXiv:2211.10438), section 4: int8 of static ranges.

    Keys and values are the operands of quantised products: integers with one scale for all heads of a layer,
    so that a token stores no scale. fitted: the scales, the largest magnitudes in a few texts divided by 127,
    as `kvjax fit smoothquant` writes them. Deviation: the paper smooths the inputs of layers, which changes
    no key and no value, and here weights and inputs are not quantised; keys are quantised after RoPE, which
    the paper's models do not have; products are computed after decoding.
    """
    found = as_fitted(fitted)
    keys, values = (StaticAffine(bits, of, "smoothquant", found) for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "Training Transformers with 4-bit Integers",
    arxiv="2306.11987",
    family="outlier-transform",
    exact="deviates",
)
def q_int4(*, bits: Bits = 4, block: Group = 16, seed: Seed = 0, fitted: Fit | None = None) -> Method:
    """Quantiser of 4-bit training (Xi et al., 2023, arXiv:2306.11987), section 3, for keys and values.

    Every `block` channels are rotated by a Hadamard matrix, then quantised to integers with one step for all
    heads of a layer, so that a token stores no scale. fitted: the steps of least error for the rotated
    numbers of a few texts, as `kvjax fit q-int4` finds them. Deviation: the paper trains networks whose
    products are in 4 bits, and learns steps meanwhile; it quantises inputs and weights, but not keys and
    values; the Hadamard matrix has random signs.
    """
    rotate, found = Rotate("hadamard", seed, block), as_fitted(fitted)
    keys, values = (rotate >> StaticAffine(bits, of, "q-int4", found) for of in ("key", "value"))
    return Method(store=Store(keys, values))


@paper(
    "PrefixQuant: Eliminating Outliers by Prefixed Tokens for Large Language Models Quantization",
    arxiv="2410.05265",
    family="outlier-transform",
    exact="deviates",
)
def prefixquant(*, bits: Bits = 4, sinks: Tokens = 1, seed: Seed = 0, fitted: Fit | None = None) -> Method:
    """KV cache of PrefixQuant (Chen et al., 2024, arXiv:2410.05265), section 5: static codes, a prefix.

    Tokens that draw outliers stand at the start of every text, where they stay unencoded, so that later
    tokens draw none and one scale for each head is enough: a token stores no scale. Keys and values are
    rotated by a Hadamard matrix, keys after RoPE. sinks: how many tokens these are. fitted: the scales of
    least error for the tokens after them, as `kvjax fit prefixquant` finds them. Deviation: the prefix
    is what the caller's texts begin with, such as the tokenizer's token for the start of a text, where the
    authors search for its ids and prepend them; scales of keys are those of least error of keys, and not of
    attention; nothing is fine-tuned; weights and other activations are not quantised; the Hadamard matrix has
    random signs.
    """
    rotate, found = Rotate("hadamard", seed), as_fitted(fitted)
    keys, values = (rotate >> StaticAffine(bits, of, "prefixquant", found) for of in ("key", "value"))
    return Method(store=Store(keys, values, sinks=sinks))
