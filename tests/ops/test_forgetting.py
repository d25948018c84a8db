"""Forgetting attention: against its oracle, its equation, and ordinary attention with a bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.forgetting import forgetting_attention
from kvjax.ops.attention.union import Keys, attend
from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.ops.sequences import T, as_arrays
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, N, H, K, V = 2, 4, 2, 6, 5


def run(x, **how):
    return forgetting_attention(x["q"], x["k"], x["v"], x["g"], **how)


def draw(rng, strongest=2.0):
    """Query heads in groups of two; log gates between -strongest and 0."""
    q, k, v = (rng.normal(size=(B, T, n, d)) for n, d in ((N, K), (H, K), (H, V)))
    return {"q": q, "k": k, "v": v, "g": -strongest * rng.random((B, T, N))}


@pytest.fixture
def tokens(rng):
    return draw(rng)


def by_hand(x):
    """Logits of one query at a time, and gates multiplied as probabilities."""
    out = np.zeros((*x["q"].shape[:3], V))
    for b, t, n in np.ndindex(*out.shape[:3]):
        s = np.array([x["q"][b, t, n] @ x["k"][b, j, n // 2] for j in range(t + 1)]) * K**-0.5
        kept = np.array([np.exp(x["g"][b, j + 1 : t + 1, n]).prod() for j in range(t + 1)])
        p = kept * np.exp(s - s.max())
        out[b, t, n] = p / p.sum() @ x["v"][b, : t + 1, n // 2]
    return out


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["forgetting_attn"], *oracle("forgetting_attn"))


@pytest.mark.rotating
def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(run, tokens, by_hand)


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


def test_no_room_is_nan(tokens):
    sequences.no_room_is_nan(run, tokens, by_hand)


@pytest.mark.rotating
def test_gradients_are_finite_under_strong_decay_and_agree(rng, monkeypatch):
    monkeypatch.setattr("kvjax.ops.attention.forgetting.CHUNK", 8)  # three chunks
    sequences.gradients_agree(run, draw(rng, strongest=100.0))


@pytest.mark.rotating
@pytest.mark.parametrize("recurrent", [False, True], ids=["chunked", "recurrent"])
def test_what_was_forgotten_long_ago_costs_no_precision(tokens, recurrent):
    tokens["g"][:, : T - 10], tokens["g"][:, T - 10 :] = -1000.0, 0.05 * tokens["g"][:, T - 10 :]
    got, _ = jax.jit(lambda x: run(x, recurrent=recurrent))(as_arrays(tokens, jnp.float32))
    # Here -G_s is 32000, where float32 has steps of 0.002.
    assert rms(got[:, T - 10 :], by_hand(tokens)[:, T - 10 :]) < 1e-6


@pytest.mark.rotating
def test_the_state_is_a_bias_of_ordinary_attention(tokens):
    x = as_arrays(tokens, jnp.float32)
    _, state = jax.jit(run)(x)
    k, v, bias = (jnp.moveaxis(state.kept[name], 1, 2) for name in ("k", "v", "since"))
    k, v = (jnp.repeat(y, N // H, axis=1) for y in (k, v))  # every query head has gates of its own
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, 1, T))
    q = jnp.moveaxis(x["q"][:, -1:], 1, 2)
    got, _, _ = attend(q, Keys(k, v, pos, bias), jnp.full((B, 1), T - 1), scale=K**-0.5)
    assert rms(got[:, :, 0], by_hand(tokens)[:, -1]) < 1e-6
