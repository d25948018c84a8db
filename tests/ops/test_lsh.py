"""Hash codes of hyperplanes, against their definition in numpy and the binomial distribution of scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from kvjax.ops.base import lsh
from kvjax.ops.base.lsh import collisions, hash_codes, hyperplanes, log_chance_of_two
from tests.float64.reads import drawn_by
from tests.sweep import sweep

# Whole words and broken ones, tables of one bit and of a whole word; made at once, and word by word.
SIZES = [(3, 4), (10, 7), (1, 40), (32, 2), (8, 4)]
CASES = [(*size, at_once) for size in SIZES for at_once in (2**24, 0)]


@pytest.mark.rotating
@pytest.mark.parametrize(("bits", "tables", "at_once"), sweep(CASES, (10, 7, 2**24), (10, 7, 0)))
def test_codes_collide_where_all_sides_of_a_table_are_the_same(rng, bits, tables, at_once, monkeypatch):
    monkeypatch.setattr(lsh, "AT_ONCE", at_once)
    normals = rng.normal(size=(6, tables * bits))
    q, k = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 9, 6))
    k[:, :2] = q[:, :2] + 1e-2 * k[:, :2]
    codes = [hash_codes(jnp.asarray(x, jnp.float32), normals, bits) for x in (q, k)]
    assert all(x.shape[-1] == -(-tables // (32 // bits)) and x.dtype == jnp.uint32 for x in codes)
    got = collisions(*codes, bits, tables)
    sides = [(x @ normals > 0).reshape(*x.shape[:2], tables, bits) for x in (q, k)]
    want = (sides[0][:, :, None] == sides[1][:, None]).all(-1).sum(-1)
    np.testing.assert_array_equal(got, want)
    assert want.max() >= 2


def test_hyperplanes_belong_to_their_seed():
    one, two = (hyperplanes(4, 3, 5, seed) for seed in (0, 1))
    assert one.shape == (4, 15) and (one == hyperplanes(4, 3, 5, 0)).all() and (one != two).all()


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("bits", "tables"), sweep([(10, 150), (1, 2), (4, 3), (16, 4096)], (10, 150), (4, 3))
)
def test_two_tables_have_a_vector_with_the_probability_of_a_binomial(bits, tables):
    cosine = np.concatenate([np.linspace(-0.999, 0.999, 97), [0.0]]).astype(np.float32)
    x = (1 - np.arccos(cosine.astype(np.float64)) / np.pi) ** bits
    got = log_chance_of_two(jnp.asarray(cosine), bits, tables)
    np.testing.assert_allclose(got, binom.logsf(1, tables, x), rtol=2e-5, atol=2e-4)


def test_chances_have_gradients_at_every_angle():
    slopes = jax.jit(jax.grad(lambda c: log_chance_of_two(c, 10, 150).sum()))(jnp.linspace(-1.0, 1.0, 33))
    assert np.isfinite(slopes).all() and (slopes[1:-4] > 0).all()


@pytest.mark.rotating
def test_estimates_by_chance_come_out_right_in_the_mean(rng):
    """What is drawn and weighed by 1 / u is, over many hyperplanes, the sum over all: softmax's two sums."""
    draws, bits, tables = 4000, 3, 4
    q, k = (jnp.asarray(rng.normal(size=(n, 8)), jnp.float32) for n in (1, 24))
    normals = jnp.asarray(rng.normal(size=(draws, 8, tables * bits)), jnp.float32)

    @jax.jit
    @jax.vmap
    def drawn_by_each(w):
        return collisions(hash_codes(q, w, bits), hash_codes(k, w, bits), bits, tables)[0] >= 2

    drawn = np.asarray(drawn_by_each(normals))
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    one = np.asarray(normals[0], np.float64).reshape(8, tables, bits)
    np.testing.assert_array_equal(drawn[0], drawn_by(q, k, one)[0])
    cosine = (q @ k.T)[0] / np.linalg.norm(q) / np.linalg.norm(k, axis=-1)
    u = np.exp(np.asarray(log_chance_of_two(jnp.asarray(cosine, jnp.float32), bits, tables), np.float64))
    weights, values = np.exp((q @ k.T)[0]), rng.normal(size=24)
    for each in (weights, weights * values):
        estimates = (drawn * each / u).sum(-1)
        error = estimates.std() / np.sqrt(draws)
        assert abs(estimates.mean() - each.sum()) < 4 * error
        # The same without the weights is another number.
        assert abs((drawn * each).sum(-1).mean() - each.sum()) > 8 * error
