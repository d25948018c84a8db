"""Matrices of low rank, against the power iteration and the singular values of float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.state import codes
from kvjax.state.cache import nbytes
from kvjax.state.code_forms import is_steady
from kvjax.state.codes import Codes
from kvjax.store.affine import Affine
from kvjax.store.low_rank import LowRank
from kvjax.store.residual import Residual
from kvjax.store.rotate import orthogonal
from tests.store.test_affine import affine_by_hand, tokens_of
from tests.sweep import sweep

encode = jax.jit(codes.encode, static_argnames="codec")
decode = jax.jit(Codes.decode)


def power_iteration(block, rank, turns):
    """Compute A B' of one block [T, H], in float64; A and B in float16, as they are stored."""
    b = orthogonal(block.shape[1], 0)[:, :rank]
    for _ in range(turns):
        a = np.linalg.qr(block @ b)[0]
        b = block.T @ a
    return a.astype(np.float16).astype(float) @ b.astype(np.float16).astype(float).T


def in_blocks(x, tokens, approximate):
    """`approximate` of every `tokens` tokens of every head of x [B, K, S, H]."""
    blocks = np.asarray(x, np.float64).reshape(-1, tokens, x.shape[-1])
    return np.stack([approximate(block) for block in blocks]).reshape(x.shape)


@pytest.mark.parametrize("rank, tokens, turns", [(1, 16, 1), (2, 16, 3), (4, 32, 2), (3, 8, 5)])
def test_low_rank_is_the_power_iteration_of_every_block(rng, rank, tokens, turns):
    x = rng.normal(size=(2, 3, 32, 24)).astype(np.float32)
    got = decode(encode(jnp.asarray(x), LowRank(rank, tokens, turns)))
    want = in_blocks(x, tokens, lambda block: power_iteration(block, rank, turns))
    # Two float16, the last bit of which float32 may round the other way.
    np.testing.assert_allclose(got, want, atol=4e-3)
    assert np.sqrt(np.square(got - want).mean()) < 2e-4


@pytest.mark.rotating
def test_many_turns_find_the_best_matrix_of_the_rank(rng):
    x = rng.normal(size=(1, 2, 64, 32)) * np.linspace(4, 0.2, 32)
    best = in_blocks(x, 32, lambda block: best_of_rank(block, 3))
    least = np.square(best - x).mean()
    errors = [
        np.square(np.asarray(decode(encode(jnp.asarray(x, jnp.float32), LowRank(3, 32, n)))) - x).mean()
        for n in (1, 3, 30)
    ]
    assert least * 0.999 < errors[2] < least * 1.01 and errors[2] < errors[1] < errors[0]


def best_of_rank(block, rank):
    u, s, v = np.linalg.svd(block, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.rotating
@pytest.mark.parametrize("rank", sweep([2, 5, 100], 100))
def test_a_block_of_lower_rank_comes_back_whole(rng, rank):
    """Columns that nothing is left for are 0; nothing of them is a number that no float holds."""
    x = rng.normal(size=(1, 2, 16, 2)) @ rng.normal(size=(1, 2, 2, 12))
    back = decode(encode(jnp.asarray(x, jnp.float32), LowRank(rank, 8)))
    np.testing.assert_allclose(back, x, atol=6e-3)
    zero = jnp.zeros((1, 2, 16, 12), jnp.float32)
    np.testing.assert_array_equal(decode(encode(zero, LowRank(rank, 8))), zero)


def test_its_gradient_is_finite_where_the_rank_is_lower(rng):
    x = jnp.asarray(np.outer(rng.normal(size=8), rng.normal(size=6)), jnp.float32)[None, None]
    for start in (x, jnp.zeros_like(x)):
        gradient = jax.grad(lambda x: jnp.square(decode(encode(x, LowRank(3, 8)))).sum())(start)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_behind_codes_it_adds_the_rank_of_their_error(rng, axis):
    x = rng.normal(size=(2, 2, 32, 16)).astype(np.float32)
    codec = Residual(Affine(2, axis=axis, group=16), LowRank(2, 16))
    codes, scale, zero = affine_by_hand(x, 2, axis, 16)
    near = tokens_of(codes * scale.astype(float)[..., None] + zero.astype(float)[..., None], axis)
    want = near + in_blocks(x - near, 16, lambda block: power_iteration(block, 2, 3))
    got = decode(encode(jnp.asarray(x), codec))
    np.testing.assert_allclose(got, want, atol=2e-3)
    assert np.square(got - x).mean() < 0.8 * np.square(near - x).mean()


def test_what_it_adds_moves_the_codes_of_the_next_time(rng):
    x = jnp.asarray(rng.normal(size=(1, 2, 32, 16)), jnp.float32)
    codec, y, errors = Residual(Affine(2, group=8), LowRank(2, 16)), x, []
    for _ in range(6):
        y = decode(encode(y, codec))
        errors.append(float(np.square(y - x).mean()))
    assert errors[-1] > 1.1 * errors[0] and not is_steady(codec)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rank, columns", [(3, 3), (40, 16)])
def test_bytes_are_two_per_token_and_per_channel_of_a_column(dtype, rank, columns):
    x = jax.ShapeDtypeStruct((2, 3, 64, 24), dtype)
    coded = jax.eval_shape(lambda x: encode(x, LowRank(rank, 16)), x)
    assert nbytes(coded) == 2 * 3 * 4 * (16 + 24) * columns * 2
    assert jax.eval_shape(decode, coded).dtype == dtype


def test_what_cannot_be_is_refused():
    for name in ("rank", "tokens", "turns"):
        with pytest.raises(ValueError, match=f"{name} of LowRank must be at least 1, got 0"):
            LowRank(**{"rank": 2, "tokens": 8, "turns": 3} | {name: 0})
    with pytest.raises(ValueError, match="12 tokens cannot be encoded 8 at a time"):
        LowRank(2, 8).encode(jnp.zeros((1, 12, 4)))
