"""Tensor product attention: its layer against an oracle, and against heads multiplied out and then turned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.parity.ops.layers import OPS

B, T, H, K, V, RQ, RK, RV, THETA = 2, 13, 5, 6, 8, 4, 2, 3, 10000.0
NAMES = ("a_q", "b_q", "a_k", "b_k", "a_v", "b_v")


@pytest.fixture
def tokens(rng):
    factors = [((H, r), (r, d)) for r, d in ((RQ, K), (RK, K), (RV, V))]
    shapes = [shape for pair in factors for shape in pair]
    return {name: rng.normal(size=(B, T, *shape)) for name, shape in zip(NAMES, shapes, strict=True)}


def by_hand(x, turns=True):
    """Products first, then the rotation of whole queries and keys, backwards."""
    q, k, v = ((x["a_" + n] @ x["b_" + n]) / x["a_" + n].shape[-1] for n in "qkv")
    angle = np.outer(np.arange(T), THETA ** (-np.arange(K // 2) * 2 / K)) * turns
    q, k = ((y[..., : K // 2] + 1j * y[..., K // 2 :]) * np.exp(-1j * angle)[:, None] for y in (q, k))
    s = K**-0.5 * np.einsum("bthi,bshi->bhts", q, k.conj()).real
    p = np.exp(s) * np.tril(np.ones((T, T)))
    return np.einsum("bhts,bshv->bthv", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_is_the_oracle_also_from_bfloat16(dtype):
    inputs, want = oracle("tpa")
    got = jax.jit(OPS["tpa"])(sequences.as_arrays(inputs, dtype))
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == np.float32 and rms(got[name], x) < 1e-6, name


@pytest.mark.parametrize("turns", [True, False])
def test_it_is_the_equation(tokens, turns):
    got = jax.jit(lambda x: OPS["tpa"](x, turns=turns))(sequences.as_arrays(tokens, jnp.float32))
    assert rms(got["o"], by_hand(tokens, turns)) < 1e-6


@pytest.mark.parametrize("turns", [True, False])
def test_float64_is_the_equation_to_the_last_digits(tokens, turns):
    with jax.enable_x64(True):
        got = jax.jit(lambda x: OPS["tpa"](x, turns=turns))(sequences.as_arrays(tokens, jnp.float64))
        assert got["o"].dtype == np.float64
        np.testing.assert_allclose(got["o"], by_hand(tokens, turns), rtol=1e-12, atol=1e-12)
