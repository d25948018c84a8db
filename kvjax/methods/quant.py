"""Quantisation that treats every token and layer alike."""

from __future__ import annotations

from typing import Annotated, Literal

from kvjax.grammar import Method, Store
from kvjax.methods.papers import paper
from kvjax.methods.parameters import Range
from kvjax.methods.shared import Bits, Group, Ratio, Seed, Tokens
from kvjax.store.affine import Affine
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
    """TurboQuant (Zandieh et al., 2025, arXiv:2504.19874), section 3: rotated at random, then optimal codes.

    Behind a random rotation every coordinate of k / ||k|| has one known distribution, so one optimal codebook
    serves all. Keys (algorithm 2): bits - 1 bits of it, and the signs of a Gaussian sketch of what these
    leave, so that <q, k> is right on average. Values, and keys without `sketch` (algorithm 1): all bits, so
    that they are closer, and <q, k> too small on average. Deviation: every channel has as many bits; the
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
    """The KV cache of QuaRot (Ashkboos et al., 2024, arXiv:2404.00456), section 4: rotated, then 4 bits.

    A Hadamard rotation of every head's keys, after RoPE, and values leaves no channel larger than the others;
    then each token is quantised between `clip` times its minimum and `clip` times its maximum, in groups of
    `group` channels (None: a head, the paper's 128). Queries meet keys in the rotated basis. Deviation:
    weights and activations stay as they are, and what attention makes of values is turned back online, where
    the paper folds that into the weights of values and outputs
    (`kvjax.train.conversion.convert.rotate_values`); the Hadamard matrix has random signs; the minimum is
    stored in float16, not as a whole number of steps.
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
    bits: Bits = 2,
    group: Group | None = 32,
    residual: Tokens = 0,
    seed: Seed = 0,
) -> Method:
    """QJL (Zandieh et al., 2024, arXiv:2406.03482), section 3: keys are the signs of a random projection.

    <q, k> ~ sqrt(pi / 2) / m ||k|| <S q, sign(S k)> for a Gaussian S of m = `signs` rows for every channel,
    which is right on average; a key is m bits and its length, without scales or zeros (`SignSketch`). Values
    have `bits` bits, token by token, in groups of `group` channels, and the newest `residual` tokens stay as
    computed. Deviation: channels of outliers are sketched with all others, where the authors' code gives them
    a sketch of their own; S has no orthogonal rows, which the code also offers.
    """
    return Method(store=Store(SignSketch(seed, signs), Affine(bits, group=group), residual))
