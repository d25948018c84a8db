"""Codes of lengths and directions, and TurboQuant made of them, against their equations in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

from kvjax.methods import turboquant
from kvjax.ops.base.bit_packing import unpack
from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.code_forms import meet, span_of
from kvjax.state.codes import Codes
from kvjax.store.codebooks import sphere_codebook
from kvjax.store.residual import Residual
from kvjax.store.rotate import Rotate, orthogonal
from kvjax.store.sphere import LloydMax, Signs, SignSketch, gaussian
from tests.sweep import sweep

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)
BITS = (1, 2, 3, 4)
# Mean squared error of TurboQuant_mse for unit vectors by bits: arXiv:2504.19874, theorem 1.
PUBLISHED = {0: 1.0, 1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}


def density(width):
    """Of one coordinate of a uniformly random unit vector, up to a constant."""
    return lambda t: (1 - t * t) ** ((width - 3) / 2)


@pytest.mark.parametrize("width", [4, 16, 128])
@pytest.mark.parametrize("bits", BITS)
def test_a_codebook_is_optimal(width, bits):
    """Every centroid is the mean of what is nearest to it, by numerical integration."""
    book, f = sphere_codebook(width, bits), density(width)
    assert len(book.centroids) == 2**bits
    np.testing.assert_allclose(book.bounds, (book.centroids[1:] + book.centroids[:-1]) / 2, rtol=1e-14)
    edges = [-1.0, *book.bounds, 1.0]
    for centroid, low, high in zip(book.centroids, edges, edges[1:], strict=False):
        # Beyond 12 standard deviations nothing is left to integrate.
        low, high = max(low, -12 / np.sqrt(width)), min(high, 12 / np.sqrt(width))
        mass, moment = (quad(g, low, high, epsabs=1e-13)[0] for g in (f, lambda t: t * f(t)))
        assert centroid == pytest.approx(moment / mass, abs=1e-9)


@pytest.mark.parametrize("bits", BITS)
def test_the_error_of_directions_is_the_published_one(rng, bits):
    x = rng.normal(size=(1, 1, 2000, 128))
    x = 5 * x / np.linalg.norm(x, axis=-1, keepdims=True)
    back = np.asarray(decode(encode(jnp.asarray(x, jnp.float32), LloydMax(bits))), np.float64)
    error = np.square(back - x).sum(-1).mean() / 25
    # Two digits are published, and those of 3 and 4 bits are rounded down.
    book, f = sphere_codebook(128, bits), density(128)
    nearest = lambda t: book.centroids[np.searchsorted(book.bounds, t)]  # noqa: E731
    t = np.linspace(-1, 1, 200_001)
    exact = 128 * np.average((t - nearest(t)) ** 2, weights=f(t))
    assert error == pytest.approx(exact, rel=0.02)
    assert exact == pytest.approx(PUBLISHED[bits], rel=0.15)


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_those_of_a_quantiser_by_hand(rng, bits):
    x = rng.normal(size=(2, 3, 8, 16)).astype(np.float32)
    x[0, 0, 0] = 0
    coded = encode(jnp.asarray(x), LloydMax(bits))
    length = np.linalg.norm(x.astype(np.float64), axis=-1).astype(np.float16)
    np.testing.assert_array_equal(coded.data["length"], length)
    by = np.where(length == 0, 1, length).astype(np.float64)[..., None]
    book = sphere_codebook(16, bits)
    codes = np.abs((x / by)[..., None] - book.centroids).argmin(-1)
    live = length > 0
    np.testing.assert_array_equal(np.asarray(unpack(coded.data["words"], bits, 16))[live], codes[live])
    want = length.astype(np.float64)[..., None] * book.centroids[codes]
    np.testing.assert_allclose(decode(coded)[live], want[live], rtol=1e-5)
    np.testing.assert_array_equal(decode(coded)[~live], 0)


@pytest.mark.parametrize("codec", [LloydMax(2), SignSketch()], ids=str)
def test_lengths_beyond_float16_stay_finite_and_so_do_gradients_of_no_length(codec):
    assert np.isfinite(decode(encode(jnp.full((1, 1, 1, 16), 1e6), codec))).all()
    assert np.isfinite(jax.grad(lambda x: decode(encode(x, codec)).sum())(jnp.zeros((1, 1, 1, 16)))).all()


def turboquant_by_hand(x, bits, seed, width):
    """Algorithm 2 of arXiv:2504.19874 for one vector at a time: what stands for x in an inner product."""
    r, s, book = orthogonal(width, seed), gaussian(width, seed), sphere_codebook(width, bits - 1)
    out = np.empty_like(x)
    for at in np.ndindex(x.shape[:-1]):
        y = r @ x[at]
        length = float(np.float16(np.linalg.norm(y)))
        mse = length * book.centroids[np.abs(y[:, None] / length - book.centroids).argmin(-1)]
        rest = y - mse
        signs = np.where(s @ rest >= 0, 1.0, -1.0)
        size = float(np.float16(np.linalg.norm(rest)))
        out[at] = r.T @ (mse + np.sqrt(np.pi / 2) / width * size * s.T @ signs)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_keys_are_those_of_the_paper(rng, bits):
    x = rng.normal(size=(1, 2, 40, 32))
    store = turboquant(bits=bits, seed=9).store
    found = np.asarray(decode(encode(jnp.asarray(x, jnp.float32), store.keys)))
    want = turboquant_by_hand(x, bits, 9, 32)
    # float32 moves a number over a bound now and then, and with it its whole row.
    off = np.abs(found - want).max(-1)
    assert (off > 1e-4).mean() < 0.03
    assert nbytes(encode(jnp.asarray(x, jnp.float32), store.keys)) == x.size * bits // 8 + x.size // 32 * 4
    assert nbytes(encode(jnp.asarray(x, jnp.float32), store.values)) == x.size * bits // 8 + x.size // 32 * 2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_inner_products_are_right_on_average_and_vary_as_published(rng, bits):
    """Over rotations and sketches: E <q, x'> = <q, x>; variance <= pi / (2 H) ||q||^2 D_mse(bits - 1)."""
    width, seeds = 32, 400
    q, x = rng.normal(size=(2, 8, width))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    found = np.stack([(turboquant_by_hand(x, bits, seed, width) * q).sum(-1) for seed in range(seeds)])
    exact = (q * x).sum(-1)
    error = found.std(0) / np.sqrt(seeds)
    assert (np.abs(found.mean(0) - exact) < 4 * error).all()
    bound = np.pi / 2 / width * np.square(q).sum(-1) * PUBLISHED[bits - 1]
    # The published errors are those of wide rows, which are a little larger.
    assert (np.square(found - exact).mean(0) < 1.35 * bound).all()
    assert (np.square(found - exact).mean(0) > 0.4 * bound).all()


def test_values_without_a_sketch_are_closer_and_shorter(rng):
    """Optimal codes shrink a row, so inner products with it are biased: what the sketch of keys is for."""
    x = jnp.asarray(rng.normal(size=(1, 1, 500, 64)), jnp.float32)
    keys, values = (
        decode(encode(x, c)) for c in (turboquant(bits=2).store.keys, turboquant(bits=2).store.values)
    )
    assert np.square(values - x).mean() < np.square(keys - x).mean() / 2
    along = [(np.asarray(y * x).sum(-1) / np.square(x).sum(-1)).mean() for y in (keys, values)]
    plain = turboquant(bits=2, sketch=False).store
    assert plain.keys == plain.values == turboquant(bits=2).store.values
    assert along[0] == pytest.approx(1, abs=0.02) and along[1] == pytest.approx(1 - PUBLISHED[2], abs=0.02)


CODECS = {
    "sketch": SignSketch(3),
    "rotated sketch": Rotate(seed=2) >> SignSketch(3),
    "residual": Residual(LloydMax(2), SignSketch(1)),
    "turboquant": turboquant(bits=3).store.keys,
}


@pytest.mark.parametrize("name", sweep(CODECS, "turboquant"))
def test_a_query_meets_the_signs_of_a_sketch_as_it_meets_what_they_stand_for(rng, name):
    q, k = (jnp.asarray(rng.normal(size=(1, 2, n, 32)), jnp.float32) for n in (1, 8))
    coded = encode(k, CODECS[name])
    met = meet(q, coded, k)
    codec, matrix = span_of(CODECS[name], 32)
    assert met.turned and met.q.shape[-1] == matrix.shape[0] == (32 if "sketch" in name else 64)
    found = np.einsum("bnth,bnsh->bnts", met.q, decode(met.k))
    np.testing.assert_allclose(found, np.einsum("bnth,bnsh->bnts", q, decode(coded)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(decode(coded), np.asarray(decode(met.k), np.float64) @ matrix, atol=1e-5)
    # What is met could be encoded by itself, to the same codes.
    again = codec.decode(codec.encode(decode(met.k)), matrix.shape[0], jnp.float32)
    if name == "rotated sketch" or name == "sketch":
        np.testing.assert_allclose(again, decode(met.k), rtol=2e-3)


@pytest.mark.parametrize("signs", [1, 3])
def test_orthogonal_sketches_are_right_on_average_and_vary_less(rng, signs):
    """Over sketches: E <q, x'> = <q, x>, with a smaller variance than that of independent rows."""
    q, x = rng.normal(size=(2, 8, 16))
    exact, seeds = (q * x).sum(-1), 1500

    def found(orthogonal):
        def one(seed):
            s = gaussian(16, seed, signs, orthogonal)
            about = np.sqrt(np.pi / 2) / len(s) * np.linalg.norm(x, axis=-1, keepdims=True)
            return (about * np.where(x @ s.T >= 0, 1.0, -1.0) @ s * q).sum(-1)

        return np.stack([one(seed) for seed in range(seeds)])

    apart, together = found(False), found(True)
    assert (np.abs(together.mean(0) - exact) < 4.5 * together.std(0) / np.sqrt(seeds)).all()
    assert (together.var(0) < apart.var(0)).all()


def test_signs_keep_the_root_mean_square(rng):
    x = rng.normal(size=(1, 1, 4, 32)).astype(np.float32)
    back = np.asarray(decode(encode(jnp.asarray(x), Signs())))
    np.testing.assert_array_equal(np.sign(back), np.sign(x))
    np.testing.assert_allclose(np.abs(back), np.sqrt(np.square(x).mean(-1, keepdims=True)) + 0 * x, rtol=1e-3)


def test_widths_and_bits_that_have_no_codebook_are_refused():
    with pytest.raises(ValueError, match="1, 2, 3 or 4, got 5"):
        LloydMax(5)
    with pytest.raises(ValueError, match="a row of 1 channel has no direction"):
        LloydMax(2).encode(jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match="'hadamard' or 'orthogonal', got 'dct'"):
        Rotate("dct")
