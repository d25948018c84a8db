"""Sums of outer products: what they are, and attention over them without computing them, in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.factored import dot_factors, of_factors, sum_factors
from kvjax.ops.attention.union import Keys, Products, Reduction, logits, weigh

B, N, S, T, R, H = 2, 5, 7, 3, 3, 4
SCALE, SOFTCAP = 0.4, 1.5


@pytest.fixture
def factors(rng):
    return [rng.normal(size=shape) for shape in ((B, S, R, N), (B, S, R, H)) * 2]


def vectors(a, b):
    return np.einsum("bsrn,bsrh->bnsh", a, b) / R


def f32(*xs):
    return [jnp.asarray(x, jnp.float32) for x in xs]


def test_products_and_sums_are_those_with_the_vectors_themselves(rng, factors):
    a, b = factors[:2]
    q, p = rng.normal(size=(B, N, T, H)), rng.random((B, N, T, S))
    made = vectors(a, b)
    np.testing.assert_allclose(of_factors(*f32(a, b)), made, rtol=1e-5, atol=1e-6)
    dots = jax.jit(dot_factors)(*f32(q, a, b))
    np.testing.assert_allclose(dots, np.einsum("bnth,bnsh->bnts", q, made), rtol=1e-5, atol=1e-5)
    sums = jax.jit(sum_factors)(*f32(p, a, b))
    np.testing.assert_allclose(sums, np.einsum("bnts,bnsh->bnth", p, made), rtol=1e-5, atol=1e-5)


@pytest.mark.rotating
def test_halves_are_summed_in_float32(rng, factors):
    a, b = (x.astype(jnp.bfloat16) for x in f32(*factors[:2]))
    q, p = (x.astype(jnp.bfloat16) for x in f32(rng.normal(size=(B, N, T, H)), rng.random((B, N, T, S))))
    assert of_factors(a, b).dtype == jnp.bfloat16
    assert dot_factors(q, a, b).dtype == sum_factors(p.astype(jnp.float32), a, b).dtype == jnp.float32


@pytest.mark.rotating
def test_attention_over_factors_is_that_over_the_vectors(rng, factors):
    """With biases, a soft-cap, empty slots, and what each slot received."""
    a_k, b_k, a_v, b_v = factors
    q, bias = rng.normal(size=(B, N, T, H)), rng.normal(size=(B, 1, S))
    pos = np.asarray([[[0, 1, 2, 3, 4, 5, -1]], [[3, -1, 0, 1, 2, 9, 4]]], np.int32)
    at = np.asarray([[5, 6, 7], [2, 3, 4]], np.int32)
    z = SOFTCAP * np.tanh(SCALE * np.einsum("bnth,bnsh->bnts", q, vectors(a_k, b_k)) / SOFTCAP)
    seen = (pos >= 0)[:, :, None] & (pos[:, :, None] <= at[:, None, :, None])
    p = np.exp(z + bias[:, :, None]) * seen
    p /= p.sum(-1, keepdims=True)
    want = np.einsum("bnts,bnsh->bnth", p, vectors(a_v, b_v))

    def split(stored):
        x = stored[:, 0]
        return x[..., : R * N].reshape(B, S, R, N), x[..., R * N :].reshape(B, S, R, H)

    products = Products(lambda q, k: dot_factors(q, *split(k)), lambda p, v: sum_factors(p, *split(v)))
    stored = [np.concatenate([x.reshape(B, S, -1) for x in pair], -1) for pair in ((a_k, b_k), (a_v, b_v))]
    k, v = f32(*(x[:, None] for x in stored))
    keys = Keys(k, v, jnp.asarray(pos), jnp.asarray(bias, jnp.float32))
    got = logits(*f32(q), keys, jnp.asarray(at), scale=SCALE, softcap=SOFTCAP, products=products)
    assert got.shape == (B, 1, N, T, S), "one list, whose group is all heads"
    kinds = (Reduction("sum"), Reduction("max"))
    out, _, ((total, most),) = weigh([got], [keys], mass=kinds, products=products)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total[:, 0], p.sum((1, 2)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(most[:, 0], p.max((1, 2)), rtol=1e-4, atol=1e-5)
