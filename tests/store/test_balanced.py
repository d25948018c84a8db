"""What is done to rows before they are encoded: one variance on both axes, normal numbers, razed bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state.cache import nbytes
from kvjax.state.codes import dense, encode
from kvjax.store import coupled
from kvjax.store.affine import Affine
from kvjax.store.balanced import Balanced
from kvjax.store.gaussian_vectors import GaussianVectors, Normalised, gaussian_codebook
from kvjax.store.razor import Razor
from kvjax.store.rotate import Rotate
from tests.float64.codes import affine, balanced, normal_vectors, razor
from tests.sweep import sweep

SHAPE = (2, 3, 32, 64)
TOKENS = 16


@jax.jit(static_argnames="codec")
def back(x, codec):
    return dense(encode(x, codec))


def rows_of(rng):
    """Rows with tokens and channels of very different sizes."""
    sizes = np.exp(rng.normal(size=(*SHAPE[:2], SHAPE[2], 1))) * np.exp(rng.normal(size=SHAPE[3]))
    return (rng.normal(size=SHAPE) * sizes).astype(np.float32)


def by_granules(x, code):
    rows = x.astype(np.float64).reshape(-1, TOKENS, SHAPE[-1])
    return np.stack([code(granule) for granule in rows]).reshape(SHAPE)


def off(got, x):
    return float(np.square(np.asarray(got, np.float64) - x).mean() / np.square(x).mean())


@pytest.mark.parametrize(
    "of, codec, code",
    [
        ("token", Affine(4, axis="channel", group=TOKENS), affine(4, TOKENS, channel=True)),
        ("channel", Affine(4), affine(4, 64)),
    ],
)
def test_scales_of_tokens_and_channels_are_those_of_the_authors_turns(rng, of, codec, code):
    x = rows_of(rng)
    got = np.asarray(back(jnp.asarray(x), Balanced(of, TOKENS) >> codec))
    want = by_granules(x, balanced(of, 16, code))
    # A scale that float16 rounds to the other side moves a code now and then.
    assert (np.abs(got - want) > 1e-3 * np.abs(x).max()).mean() < 1e-3


def test_balanced_rows_have_one_variance_and_their_codes_less_error(rng):
    # As behind a rotation: tokens differ, channels little. No scale is below 0.74, as in the authors' code.
    sizes = 30 * np.exp(rng.normal(size=(*SHAPE[:2], SHAPE[2], 1))) * rng.uniform(0.5, 1.5, SHAPE[3])
    rows = (rng.normal(size=SHAPE) * sizes).astype(np.float32)
    x = jnp.asarray(rows).reshape(2, 3, -1, TOKENS, 64)
    a, b = Balanced("token", TOKENS).scales(x)
    y = np.asarray(x / a / b)
    for axis in (-1, -2):
        spread = y.std(axis, ddof=1)
        assert spread.max() / spread.min() < 2
        assert np.asarray(x).std(axis, ddof=1).max() / np.asarray(x).std(axis, ddof=1).min() > 3
    plain = Affine(2, axis="channel", group=TOKENS)
    errors = [
        off(back(jnp.asarray(rows), codec), rows) for codec in (plain, Balanced("token", TOKENS) >> plain)
    ]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.rotating
@pytest.mark.parametrize("bits", [1, 2])
def test_tokens_made_normal_are_the_nearest_vectors(rng, bits, monkeypatch):
    """Also in pieces of tokens, of which the last one is cut."""
    monkeypatch.setattr(coupled, "PIECE", 12)
    x = rows_of(rng)
    codec = Normalised(TOKENS) >> Rotate("hadamard", 0) >> GaussianVectors(8 // bits)
    got = np.asarray(back(jnp.asarray(x), codec))
    want = by_granules(x, normal_vectors(bits))
    assert (np.abs(got - want) > 1e-2 * np.abs(x).max()).mean() < 2e-3
    # 256 numbers, or vectors, and 64 tokens of them.
    assert (
        nbytes(encode(jnp.asarray(x), codec)) == x.size * bits // 8 + x.size // 64 * 4 + x.size // TOKENS * 2
    )


@pytest.mark.rotating
def test_a_codebook_of_normal_numbers_is_near_their_best_one():
    """A scalar quantiser of 256 levels has an error near Panter and Dite's pi sqrt(3) / 2 / 256^2."""
    rng = np.random.default_rng(1)
    for channels, worst in ((1, 1e-3), (4, 0.16), (8, 0.45)):
        x = rng.standard_normal((4000, channels))
        near = np.square(x[:, None] - gaussian_codebook(channels, 0)).sum(-1).min(1).mean() / channels
        # No code of 8 / channels bits has less than the Gaussian rate-distortion bound.
        assert 4.0 ** (-8 / channels) < near < worst


@pytest.mark.parametrize(
    "bits, base, group", sweep([(4, 8, 16), (3, 8, 32), (4, 16, 16), (8, 8, 64)], (3, 8, 32))
)
def test_the_leading_bits_of_whole_numbers_stay(rng, bits, base, group):
    x = rows_of(rng)
    got = np.asarray(back(jnp.asarray(x), Razor(bits, base, group)))
    want = razor(bits, base, group)(x.astype(np.float64))
    assert (np.abs(got - want) > 1e-4 * np.abs(x).max(-1, keepdims=True)).mean() < 1e-3
    codec, cuts = Razor(bits, base, group), -(-64 // group * 4 // 32)
    assert nbytes(encode(jnp.asarray(x), codec)) * 8 / (x.size // 64) == 64 * bits + 32 * cuts + 32


def test_what_cannot_be_encoded_is_refused_in_one_sentence(rng):
    x = jnp.asarray(rows_of(rng))
    for made, message in (
        (lambda: Balanced("head", 16), "scales are of each 'token' or of each 'channel', got 'head'"),
        (lambda: Balanced("token", 1), "a variance is of 2 tokens and more, got 1"),
        (lambda: Razor(9, 8), "of 8 bits 2 to 8 stay, got 9"),
        (lambda: Razor(4, 17), "base numbers have 3 to 16 bits, got 17"),
        (lambda: GaussianVectors(0), "a vector is a whole number of channels, at least 1, got 0"),
        (lambda: Normalised(0), "a mean is of a whole number of tokens >= 1, got 0"),
        (lambda: encode(x, Razor(group=24)), "group=24 must divide the 64 channels of a head"),
        (lambda: encode(x, GaussianVectors(24)), "channels=24 must divide the 64 channels of a head"),
        (lambda: encode(x, Balanced("token", 24) >> Affine(4)), "32 tokens cannot be encoded 24 at a time"),
        (lambda: encode(x, Normalised(24) >> Affine(4)), "32 tokens cannot be encoded 24 at a time"),
        (lambda: kvjax.method("nsnquant", bits=4), "nsnquant: bits must be"),
        (lambda: kvjax.method("qrazor", bits=8), "qrazor: bits must be"),
    ):
        with pytest.raises(ValueError, match=message):
            made()
