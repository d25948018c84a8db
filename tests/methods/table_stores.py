"""Rows of methods that store keys and values in codes; see `table.py`."""

from __future__ import annotations

import numpy as np

from kvjax.grammar.fitted import Fitted
from kvjax.store.rotate import hadamard
from tests.float64.blocks import microscaled, nvfp4, shared, symmetric
from tests.float64.codes import (
    affine,
    balanced,
    behind,
    coded,
    commuting_sums,
    factored,
    faithful,
    grouped,
    in_layers,
    normal_vectors,
    of_lists,
    orthogonal_error,
    outliers,
    over_below,
    qaq,
    razor,
    sketch_apart,
    think,
    vectors,
    zipcache,
    zipvl,
)
from tests.float64.defensive import defensive_kept
from tests.float64.reference import h2o_victim, rope
from tests.methods.expected import each_layer, received, recent_half
from tests.methods.rows import (
    PAGE,
    SNAP,
    THETA,
    WINDOW,
    chained,
    count,
    dense,
    everything,
    half,
    half_and_one,
    kivi_bytes,
    paged,
    plain,
    row,
    split,
)

HALF = dict(budget=0.5)
# In float32, a number between two codes may become the other one.
FLIPS = 2e-3
ZIP = dict(window=WINDOW, high=4, low=2, group=16)
QAQ = dict(window=WINDOW, key_error=300.0, value_error=3.0, high=8, low=2)
VL = dict(share=0.7, high=4, low=2, group=16)
KIVI = dict(granule=16, residual=4)


def codes(bits, groups):
    """Bytes of 16 channels in codes, with a float16 scale and zero per group."""
    return 16 * bits // 8 + 4 * groups


def zip_bytes(s):
    """Half of the tokens, and room, in 4 bits; the others in 2."""
    first, second = half(s) * (2 * codes(4, 1) + 4), (s.tokens - count(s.tokens)) * (2 * codes(2, 1) + 4)
    return s.layers * s.b * s.k * (first + second) + 4 * s.b


def tiers_bytes(high, low, extra):
    """Pages of either tier, which may hold all tokens of a list but one, and a tail of the first tier.

    extra: bytes of a slot beside its position and codes.
    """

    def total(s):
        slot = lambda bits: lambda _: 2 * codes(bits, 1) + 4 + extra  # noqa: E731
        first, second = (
            paged(lambda s, i, n=n: s.k * n, slot=slot(bits))
            for n, bits in ((s.tokens, high), (s.tokens - 1, low))
        )
        return first(s) + second(s._replace(room=0)) - 4 * s.b

    return total


# A slot has the attention that it has received, too.
zipvl_bytes = tiers_bytes(4, 2, 4)
# Of a key and of a value one number is float32, with a byte for its channel.
qaq_bytes = tiers_bytes(8, 2, 2 * (4 + 1))


def intact_bytes(s):
    """Count a row's first two tokens as they are; the others in 4 bits."""
    return s.layers * s.b * s.k * (2 * plain(s) + (everything(s) - 2) * (2 * codes(4, 2) + 4)) + 4 * s.b


def whole_bytes(s):
    """SnapKV of a memory of half the tokens of 16 bits is all of them in 8."""
    return kivi_bytes(8, slots=everything, residual=4)(s)


def mini_bytes(s):
    """KIVI's codes of 2 bits for half of the tokens, all slots with their masses."""
    masses = s.layers * s.b * s.k * 4 * ((half(s) - 4) // 16 * 16 + 4 + 16)
    return kivi_bytes(2, slots=half, residual=4)(s) + masses


NORMS = Fitted(
    {"norms": np.random.default_rng(12).uniform(0.2, 3, (2, 2, 16)).astype(np.float32)},
    "QueryDrivenChannels",
    "",
)


DRAWN = np.random.default_rng(13)
BOOKS = Fitted(
    {f"{of} centroids": DRAWN.normal(size=(2, 2, 4, 16, 4)).astype(np.float32) for of in ("key", "value")},
    "CoupledCodes", "",
)  # fmt: skip
STAGES = np.random.default_rng(15).normal(size=(2, 2, 2, 3, 8, 16)) / np.arange(1, 4)[:, None, None]
SUMS = Fitted(
    {f"{of} codebooks": x.astype(np.float32) for of, x in zip(("key", "value"), STAGES, strict=True)},
    "CommutingSums", "",
)  # fmt: skip


def summed(of):
    """Make sums of 3 pairs of vectors of a head."""
    return lambda layer, head: commuting_sums(SUMS.arrays[f"{of} codebooks"][layer, head].astype(float))


SCALES = np.exp(DRAWN.normal(size=(2, 2, 16)))
SMOOTH = Fitted(
    {
        "key matrix": (SCALES[..., None] * np.eye(16)).astype(np.float32),
        "key inverse": (np.eye(16) / SCALES[..., None]).astype(np.float32),
    },
    "InBasis", "",
)  # fmt: skip


def book(of):
    return lambda layer, head: vectors(BOOKS.arrays[f"{of} centroids"][layer, head].astype(float))


def smooth(layer, head):
    by = SCALES[layer, head]
    return lambda x: affine(4, 16)(x / by) * by


MAPS = Fitted(
    {
        name: (DRAWN.normal(size=(2, *shape)) / 4).astype(np.float32)
        for name, shape in {
            "key weights": (32, 32), "value weights": (64, 32), "key bias": (32,), "value bias": (32,)
        }.items()
    },
    "Predicted", "",
)  # fmt: skip


# Bases that stretch by 8 at most: fits for the shipped model do by 4. Float32 errs in proportion to it.
LEFT, _, RIGHT = np.linalg.svd(DRAWN.normal(size=(2, 2, 2, 16, 16)) + 3 * np.eye(16))
MATRICES = LEFT * np.geomspace(8**0.5, 8**-0.5, 16) @ RIGHT
TURNS = Fitted(
    {
        f"{of} {name}": x.astype(np.float32)
        for of, m in zip(("key", "value"), MATRICES, strict=True)
        for name, x in (("matrix", m), ("inverse", np.linalg.inv(m)))
    },
    "InBasis", "",
)  # fmt: skip


def based(of, code):
    """Codes of rows in the basis of their head."""

    def each(layer, head):
        m, inverse = (TURNS.arrays[f"{of} {n}"][layer, head].astype(float) for n in ("matrix", "inverse"))
        return lambda x: code(x @ inverse) @ m

    return each


GROUPS = Fitted(
    {
        # 5 channels of the first group, and 11 of the other one.
        f"{of} group": (DRAWN.permuted(np.tile(np.arange(16), (2, 2, 1)), axis=-1) >= 5).astype(np.int32)
        for of in ("key", "value")
    },
    "Clustered", "",
)  # fmt: skip


def alike_channels(of):
    return lambda layer, head: grouped(2, GROUPS.arrays[f"{of} group"][layer, head], 0.9)


def parts(x):
    """ResQ's: the first 4 channels in 8 bits, the others in 4, both behind a rotation."""
    first, rest = behind(hadamard(4, 0), affine(8, 4)), behind(hadamard(12, 0), affine(4, 12))
    return np.concatenate([first(x[..., :4]), rest(x[..., 4:])], -1)


def skvq_bytes(s):
    """Count a word of codes and 2 scales and zeros; of a list 2 first tokens, 4 last and one more as is."""
    coded = split(everything, 1, 4, lambda s: 0, lambda s: 2 * (4 + 2 * 2) + 4)
    return coded(s) + s.layers * s.b * s.k * 2 * plain(s)


def think_bytes(s):
    """Behind 4 whole tokens and 4 more: 8 of a key's 16 numbers, which 8 these are for every 4 tokens."""
    return split(everything, 4, 4, lambda s: s.h // 2, lambda s: s.h // 2 * 4 + s.h * 4 + 4)(s)


def kvarn_bytes(s):
    """8 tokens: keys in 4 bits with two numbers for each channel, and a scale for each token."""
    words = lambda bits: s.h * 8 * bits // 8  # noqa: E731
    keys, values = words(4) + 4 * s.h + 2 * 8, words(2) + 4 * 8 + 2 * s.h
    return split(everything, 8, 0, lambda s: keys + values, lambda s: 4)(s)


def nsn_bytes(s):
    """Count a byte for 4 channels and two scales for each token, a mean of each channel for 8 tokens."""
    return split(everything, 8, 4, lambda s: 2 * 2 * s.h, lambda s: 2 * (s.h // 4 + 4) + 4)(s)


def squat_bytes(s):
    """KIVI's, and for each head the sum of q q'."""
    return kivi_bytes(4, group=8, residual=4)(s) + s.layers * s.b * s.k * 4 * s.h * s.h


def inputs_bytes(s):
    """One list of inputs of 32 channels: granules of 4 in 8 bits with a range each, and 4 tokens whole."""
    body = everything(s) // 4 * 4 * (32 + 4 + 4)
    return s.layers * s.b * (body + 4 * (32 * 4 + 4)) + 4 * s.b


def asym_bytes(s):
    """16 tokens of a channel: keys of the first layer in 4 bits; all others have a word for them."""
    granule = s.h * ((8 + 4) + (4 + 4)) // 2 + s.h * 4
    return split(everything, 16, 4, lambda s: granule, lambda s: 4 * (s.h // 16) + 4)(s)


def qjl_bytes(s):
    """16 tokens: two channels of every 8; signs and a length of outliers and of others; values of 2 bits."""
    first, others = (2 * s.h // 8 + 2) * 2, (4 * s.h // 8 + 2) + (4 + 2)
    return split(everything, 16, 0, lambda s: 2 * 2, lambda s: (first + others) // 2 + codes(2, 2) + 4)(s)


def hitter_score(prompt, layer):
    return received(prompt, layer) * faithful(affine(8, 16), prompt.k[layer], prompt.v[layer])


def hitter_slot(slot):
    key = rope(slot["k"][None], [slot["pos"]], THETA)[0]
    return slot["mass"] * faithful(affine(8, 16), key, slot["v"])


def alike(label, half, code, **hyper):
    """Make a row of a method that stores keys and values alike, token by token; half: bytes of either."""
    slot = dense(everything, slot=lambda s: 2 * half(s) + 4)
    return row(label, slot, hyper=hyper, error=FLIPS, attends=coded(code, code))


STORES = [
    row(
        "think", think_bytes, hyper=dict(keys=0.5, group=4, residual=4, fitted=NORMS), moves=False,
        attends=think(NORMS.arrays["norms"], 0.5, 4, 4), whole=(("think", dict(keys=1.0)),),
    ),
    row(
        "qjl", qjl_bytes, hyper=dict(first_layers=1, outliers=2, group=8, buffer=16), moves=False,
        error=FLIPS, stacks=False,
        attends=in_layers(*(
            coded(sketch_apart(signs, own, count=2, group=8), affine(2, 8), granule=16)
            for signs, own in ((4, 1), (2, 2))
        )),
    ),
    row(
        "intactkv", intact_bytes, hyper=dict(pivots=2, group=8), error=FLIPS,
        attends=coded(affine(4, 8), affine(4, 8), sinks=2),
    ),
    row(
        "qaq", qaq_bytes, hyper=QAQ | dict(outliers=0.05, page=PAGE), error=FLIPS, counted=True,
        **qaq(THETA, 1, **QAQ),
    ),
    row(
        "zipvl", zipvl_bytes, hyper=VL | dict(page=PAGE), error=FLIPS, counted=True, **zipvl(THETA, **VL)
    ),
    chained("zipcache", zip_bytes, ("zipcache", ZIP | HALF), error=FLIPS, **zipcache(count, THETA, **ZIP)),
    chained(
        "minikv", mini_bytes, ("minikv", HALF | dict(group=16, residual=4)),
        kept=each_layer(received, recent_half), moves=False, error=FLIPS,
        attends=coded(affine(2, 16, channel=True), affine(2, 16), **KIVI),
    ),
    chained(
        "more-tokens-lower-precision", whole_bytes,
        ("more-tokens-lower-precision", HALF | SNAP | dict(bits=8, group=16, residual=4)),
        moves=False, error=FLIPS, attends=coded(affine(8, 16, channel=True), affine(8, 16), **KIVI),
    ),
    row(
        "kv-adaquant", dense(everything, slot=lambda s: codes(4, 1) + codes(2, 1) + 4), hyper=dict(group=16),
        error=FLIPS, attends=coded(affine(4, 16), affine(2, 16)),
    ),
    alike("per-token-head", lambda s: s.h + 4, symmetric(8)),
    alike("mxfp8", lambda s: s.h + s.h // 8, microscaled("e4m3", 8), block=8),
    alike("mxfp6", lambda s: s.h * 6 // 8 + s.h // 8, microscaled("e2m3", 8), block=8),
    alike("mxfp4", lambda s: s.h // 2 + s.h // 8, microscaled("e2m1", 8), block=8),
    row(
        "ultraquant", dense(everything, slot=lambda s: 2 * (s.h // 2 + s.h // 8) + 4), hyper=dict(block=8),
        error=FLIPS,
        attends=coded(behind(hadamard(16, 0), microscaled("e2m1", 8, 0.156)), microscaled("e2m1", 8, 0.156)),
    ),
    alike("mxint8", lambda s: s.h + s.h // 8, microscaled("int8", 8), block=8),
    # Bits of pairs fill a word of 32.
    alike("mx", lambda s: s.h * 4 // 8 + 4 + 4 + s.h // 8, shared(4, 8), block=8),
    alike("nvfp4", lambda s: s.h // 2 + s.h // 8 + 4, nvfp4(8), block=8),
    alike("zeroquant", lambda s: codes(8, 1), affine(8, 16)),
    alike("atom", lambda s: codes(4, 1), affine(4, 16)),
    alike("llm-int8", lambda s: 4 + 1 + s.h + 4, outliers(1, symmetric(8)), outliers=0.05),
    # A word for the cuts of two groups.
    alike("qrazor", lambda s: s.h // 2 + 4 + 4, razor(4, 8, 8), group=8),
    row(
        "kvarn", kvarn_bytes, hyper=dict(tokens=8, turns=4), moves=False, error=FLIPS,
        attends=coded(
            behind(hadamard(16, 0), balanced("token", 4, affine(4, 8, channel=True))),
            behind(hadamard(16, 0), balanced("channel", 4, affine(2, 16))), granule=8,
        ),
    ),
    row(
        "nsnquant", nsn_bytes, hyper=dict(bits=2, tokens=8, residual=4), moves=False, error=FLIPS,
        attends=coded(normal_vectors(2), normal_vectors(2), granule=8, residual=4),
    ),
    row(
        "xquant", dense(everything, slot=lambda s: 2 * codes(8, 1) + 4), hyper=dict(bits=8, heads=1),
        error=0.03,
    ),
    row(
        "xquant-cl", inputs_bytes, hyper=dict(bits=8, first=8, layers=1, tokens=4), error=0.03, moves=False,
        stacks=False,
    ),
    row(
        "defensivekv", paged(lambda s, i: s.k * count(s.tokens)), hyper=SNAP | dict(page=PAGE),
        kept=lambda prompt: defensive_kept(prompt, count, **SNAP),
    ),
    row(
        "squat", squat_bytes, moves=False, error=FLIPS,
        hyper=dict(bits=4, group=8, residual=4, run=6, rank=3, weight=0.5),
        attends=orthogonal_error(
            6, 3, 0.5, affine(4, 8, channel=True), affine(4, 8), granule=8, residual=4
        ),
    ),
    row(
        "asymkv", asym_bytes, hyper=dict(key_layers=1, high=4, group=16, residual=4), moves=False,
        error=FLIPS, stacks=False,
        attends=in_layers(*(
            coded(affine(bits, 16, channel=True), affine(1, 16), **KIVI) for bits in (4, 1)
        )),
    ),
    row(
        "cachegen", dense(everything, slot=lambda s: 2 * (s.h + 4) + 4),
        hyper=dict(key_layers=1, value_layers=0), error=FLIPS, stacks=False,
        attends=in_layers(coded(symmetric(5), symmetric(4)), coded(symmetric(4), symmetric(4))),
    ),
    chained(
        # Codes stay codes where the budget covers the prompt.
        "q-hitter", dense(half_and_one, slot=lambda s: 2 * codes(8, 1) + 4, extra=8),
        ("q-hitter", HALF | dict(bits=8)),
        kept=each_layer(hitter_score, recent_half), error=0.02, victim=h2o_victim(count, key=hitter_slot),
    ),
    row(
        # 4 codes of 4 bits lie in a word.
        "cq", dense(everything, slot=lambda s: 2 * 4 + 4), hyper=dict(channels=4, bits=4, fitted=BOOKS),
        error=FLIPS, attends=of_lists(book("key"), book("value"), THETA),
    ),
    row(
        # 6 codes of 3 bits: a word of their lower 2 bits, and one of the upper.
        "commvq", dense(everything, slot=lambda s: 2 * 8 + 4), hyper=dict(channels=5, bits=3, fitted=SUMS),
        error=FLIPS, attends=of_lists(summed("key"), summed("value"), THETA),
    ),
    row(
        # Of 20 tokens a float16 matrix, of each 16 numbers in 4 bits with a range.
        "decoquant", split(everything, 20, 0, lambda s: 2 * 16 * 16 * 2, lambda s: 2 * codes(4, 1) + 4),
        hyper=dict(tokens=20), moves=False, error=FLIPS,
        attends=coded(factored(affine(4, 16)), factored(affine(4, 16)), granule=20),
    ),
    row(
        "qserve", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), hyper=dict(fitted=SMOOTH),
        error=FLIPS, attends=of_lists(smooth, lambda layer, head: affine(4, 16)),
    ),
    row(
        # 4 channels of 8 bits and 12 of 4: a byte each, and two words.
        "resq", dense(everything, slot=lambda s: 2 * (4 + 4 + 8 + 4) + 4), hyper=dict(rank=4, fitted=TURNS),
        error=FLIPS, attends=of_lists(based("key", parts), based("value", parts)),
    ),
    row(
        "skvq", skvq_bytes, moves=False, error=FLIPS,
        hyper=dict(group=8, clip=0.9, residual=4, sinks=2, fitted=GROUPS),
        attends=of_lists(*map(alike_channels, ("key", "value")), THETA, residual=4, sinks=2),
    ),
    row(
        "flatquant", dense(everything, slot=lambda s: 2 * codes(4, 1) + 4), hyper=dict(fitted=TURNS),
        error=FLIPS, attends=of_lists(*(based(of, affine(4, 16)) for of in ("key", "value"))),
    ),
    row(
        # A row's length, and its 16 numbers in 4 bits, or above the first layer in 2. The form encodes
        # prompts alone, and no tail is full after three steps: test_predicted.py has steps that encode.
        "aqua-kv", split(everything, 8, 8, lambda s: 0, lambda s: 2 * (2 + (8 + 4) // 2) + 4), moves=False,
        hyper=dict(tokens=8, residual=8, fitted=MAPS), error=FLIPS, stacks=False,
        stored=over_below({n: x.astype(float) for n, x in MAPS.arrays.items()}, 8, 8),
    ),
    alike("four-over-six", lambda s: s.h // 2 + s.h // 8 + 4, nvfp4(8, two=True), block=8),
]  # fmt: skip
