"""PaTH attention: against its oracle and against products of its reflections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.forgetting import forgetting_attention
from kvjax.ops.attention.path_attention import path_attention
from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.ops.sequences import T, as_arrays, piece
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, H, K, V = 2, 2, 6, 5


def run(x, **how):
    return path_attention(x["q"], x["k"], x["v"], x["w"], x["beta"], x["g"], **how)


def draw(rng, strongest=2.0):
    q, k, w = (rng.normal(size=(B, T, H, K)) for _ in range(3))
    w /= np.linalg.norm(w, axis=-1, keepdims=True)
    gates = {"beta": 2 * rng.random((B, T, H)), "g": -strongest * rng.random((B, T, H))}
    return {"q": q, "k": k, "v": rng.normal(size=(B, T, H, V)), "w": w} | gates


@pytest.fixture
def tokens(rng):
    return draw(rng)


def by_hand(x):
    """Multiply reflections to a matrix, one factor longer for every older key."""
    out = np.zeros(x["v"].shape)
    for b, t, h in np.ndindex(*out.shape[:3]):
        w, beta, g = (x[name][b, :, h] for name in ("w", "beta", "g"))
        product, decay, s = np.eye(K), 0.0, np.zeros(t + 1)
        for j in range(t, -1, -1):
            s[j] = K**-0.5 * (x["q"][b, t, h] @ product @ x["k"][b, j, h] + decay)
            product, decay = product @ (np.eye(K) - beta[j] * np.outer(w[j], w[j])), decay + g[j]
        p = np.exp(s - s.max())
        out[b, t, h] = p / p.sum() @ x["v"][b, : t + 1, h]
    return out


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["path_attn"], *oracle("path_attn"))


@pytest.mark.rotating
def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(run, tokens, by_hand)


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


@pytest.mark.rotating
def test_no_room_is_nan(tokens):
    sequences.no_room_is_nan(run, tokens, by_hand)


@pytest.mark.rotating
def test_gradients_are_finite_under_strong_decay_and_agree(rng):
    sequences.gradients_agree(run, draw(rng, strongest=100.0))


@pytest.mark.rotating
def test_without_reflections_it_is_forgetting_attention_with_scaled_gates(tokens):
    x = piece(as_arrays(tokens, jnp.float32), 0, 20)
    q, k, v, w, beta, g = (x[name] for name in ("q", "k", "v", "w", "beta", "g"))
    got, _ = jax.jit(path_attention)(q, k, v, w, 0 * beta, g)
    want, _ = jax.jit(forgetting_attention)(q, k, v, K**-0.5 * g)
    assert rms(got, want) < 1e-6


@pytest.mark.rotating
def test_gates_may_be_left_out(tokens):
    few = piece(tokens, 0, 20)
    x = as_arrays(few, jnp.float32)
    got, _ = jax.jit(path_attention)(*(x[name] for name in ("q", "k", "v", "w", "beta")))
    assert rms(got, by_hand(few | {"g": 0 * few["g"]})) < 1e-6
