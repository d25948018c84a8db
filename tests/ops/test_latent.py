"""Multi-head latent attention: against its oracle and against ordinary heads, rotated as complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.latent import interleaved, mla
from kvjax.ops.base.rope import Rope
from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.ops.sequences import T, as_arrays
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, H, K, P, R, V, THETA = 2, 3, 6, 4, 7, 5, 100.0
ROPE = Rope(theta=THETA)
UP = np.random.default_rng(1).normal(size=(2, R, H, K)) / R**0.5
UP_K, UP_V = UP[0], UP[1, ..., :V]


def run(x, rope=ROPE, **how):
    up_k, up_v = (jnp.asarray(up, x["q"].dtype) for up in (UP_K, UP_V))
    return mla(x["q"], x["q_rope"], x["latent"], x["k_rope"], up_k, up_v, rope=rope, **how)


@pytest.fixture
def tokens(rng):
    shapes = {"q": (B, T, H, K), "q_rope": (B, T, H, P), "latent": (B, T, R), "k_rope": (B, T, P)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def complex_pairs(x, t):
    """Neighbours as real and imaginary part, turned to position t."""
    return (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * t * THETA ** (-np.arange(P // 2) * 2 / P))


def by_hand(x, turn=complex_pairs):
    out = np.zeros((*x["q"].shape[:3], V))
    for b, t, h in np.ndindex(*out.shape[:3]):
        k, v = (x["latent"][b, : t + 1] @ up[:, h] for up in (UP_K, UP_V))
        key = np.array([turn(x["k_rope"][b, s], s) for s in range(t + 1)])
        s = k @ x["q"][b, t, h] + (key.conj() @ turn(x["q_rope"][b, t, h], t)).real
        p = np.exp((K + P) ** -0.5 * s)
        out[b, t, h] = p / p.sum() @ v
    return out


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["mla"], *oracle("mla"))


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
    state = jax.jit(run)(x, segments=segments)[1].kept["rope"]
    np.testing.assert_array_equal(state[:, :6], state[:, 6:])
    assert rms(jax.jit(run)(x)[1].kept["rope"][:, 6:], state[:, :6]) > 0.1


@pytest.mark.rotating
def test_without_rope_nothing_turns(tokens):
    got, _ = jax.jit(lambda x: run(x, rope=None))(as_arrays(tokens, jnp.float32))
    assert rms(got, by_hand(tokens, turn=lambda x, t: x)) < 1e-6


def test_the_state_is_all_that_is_kept(tokens):
    state = jax.eval_shape(run, as_arrays(tokens, jnp.float32))[1]
    assert {n: x.shape for n, x in state.kept.items()} == {"latent": (B, T, R), "rope": (B, T, P)}


def test_absorbed_decoding_never_expands_the_cache(tokens):
    cached = B * T * (R + P)
    assert sequences.largest_array_of_a_step(run, tokens, recurrent=True) <= cached
    assert sequences.largest_array_of_a_step(run, tokens, recurrent=False) >= B * T * H * (K + P) > cached


@pytest.mark.parametrize("rope", [Rope(kind="dynamic"), Rope(kind="none"), Rope(rotary_dim=2)])
def test_a_rope_that_depends_on_data_or_turns_a_part_is_refused(rope):
    with pytest.raises(ValueError, match="dynamic|rope turns [02] of 4"):
        interleaved(jnp.ones((1, P)), jnp.zeros(1, jnp.int32), rope)
