"""Tensor product attention: against its oracle and against heads multiplied out and turned in the plane."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.tensor_product import tpa
from kvjax.ops.base.rope import Rope
from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.ops.sequences import T, as_arrays
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, H, K, V, RQ, RK, RV, THETA = 2, 5, 6, 8, 4, 2, 3, 100.0
ROPE = Rope(theta=THETA)
NAMES = ("a_q", "b_q", "a_k", "b_k", "a_v", "b_v")


def run(x, rope=ROPE, **how):
    return tpa(*(x[name] for name in NAMES), rope=rope, **how)


@pytest.fixture
def tokens(rng):
    factors = [((H, r), (r, d)) for r, d in ((RQ, K), (RK, K), (RV, V))]
    shapes = [shape for pair in factors for shape in pair]
    return {name: rng.normal(size=(B, T, *shape)) for name, shape in zip(NAMES, shapes, strict=True)}


def by_hand(x, turns=True):
    """Products first, then the rotation of whole queries and keys, backwards."""
    q, k, v = ((x["a_" + n] @ x["b_" + n]) / x["a_" + n].shape[-1] for n in "qkv")
    t = q.shape[1]
    angle = np.outer(np.arange(t), THETA ** (-np.arange(K // 2) * 2 / K)) * turns
    q, k = ((y[..., : K // 2] + 1j * y[..., K // 2 :]) * np.exp(-1j * angle)[:, None] for y in (q, k))
    s = K**-0.5 * np.einsum("bthi,bshi->bhts", q, k.conj()).real
    p = np.exp(s) * np.tril(np.ones((t, t)))
    return np.einsum("bhts,bshv->bthv", p / p.sum(-1, keepdims=True), v)


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["tpa"], *oracle("tpa"))


def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(run, tokens, by_hand)


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


@pytest.mark.rotating
def test_no_room_is_nan(tokens):
    sequences.no_room_is_nan(run, tokens, by_hand)


def test_gradients_agree(tokens):
    sequences.gradients_agree(run, tokens)


@pytest.mark.rotating
def test_positions_count_from_the_start_of_a_segment(tokens):
    few = sequences.piece(tokens, 0, 6)
    x, segments = as_arrays(sequences.join([few, few]), jnp.float32), jnp.asarray([[0] * 6 + [1] * 6] * B)
    state = jax.jit(run)(x, segments=segments)[1].kept["b_k"]
    np.testing.assert_array_equal(state[:, :6], state[:, 6:])
    assert rms(jax.jit(run)(x)[1].kept["b_k"][:, 6:], state[:, :6]) > 0.1


@pytest.mark.rotating
def test_without_rope_nothing_turns(tokens):
    got, _ = jax.jit(lambda x: run(x, rope=None))(as_arrays(tokens, jnp.float32))
    assert rms(got, by_hand(tokens, turns=False)) < 1e-6


def test_the_state_is_the_factors(tokens):
    state = jax.eval_shape(run, as_arrays(tokens, jnp.float32))[1]
    assert sum(x.size for x in state.kept.values()) == B * T * (RK * (H + K) + RV * (H + V))


def test_factorised_decoding_never_multiplies_the_cache_out(tokens):
    assert sequences.largest_array_of_a_step(run, tokens, recurrent=True) < B * T * H * K
    assert sequences.largest_array_of_a_step(run, tokens, recurrent=False) >= B * T * H * V
