"""Sinks, key and value biases, clipped softmax and gates: against dense attention in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.sinks import add_kv_bias, add_slot, clipped_softmax, gated_output, sink_attention
from kvjax.ops.attention.union import Keys, attend
from tests.ops import sequences
from tests.ops.oracles import oracle, rms
from tests.ops.sequences import T, as_arrays
from tests.parity.ops.attention import OPS
from tests.sweep import sweep

B, N, H, K, V, WINDOW = 2, 4, 2, 6, 5, 7
SINK = np.array([-3.0, 0.5, 2.0, 40.0])


def run(x, **how):
    return sink_attention(x["q"], x["k"], x["v"], jnp.asarray(SINK, x["q"].dtype), window=WINDOW, **how)


@pytest.fixture
def tokens(rng):
    q, k, v = (rng.normal(size=(B, T, n, d)) for n, d in ((N, K), (H, K), (H, V)))
    return {"q": q, "k": k, "v": v}


def rows(x, window=WINDOW):
    """(place in the output, logits, values) of every query and head."""
    for b, t, n in np.ndindex(*x["q"].shape[:3]):
        first = max(0, t + 1 - window)
        s = K**-0.5 * x["k"][b, first : t + 1, n // 2] @ x["q"][b, t, n]
        yield (b, t, n), s, x["v"][b, first : t + 1, n // 2]


def by_hand(x):
    out = np.zeros((*x["q"].shape[:3], V))
    for at, s, v in rows(x):
        p = np.exp(s) / (np.exp(s).sum() + np.exp(SINK[at[2]]))
        out[at] = p @ v
    return out


def plain(tokens, dtype):
    """(out, lse) of attention without a sink, without a window."""
    q, k, v = (jnp.moveaxis(x, 1, 2) for x in as_arrays(tokens, dtype).values())
    pos = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    out, lse, _ = jax.jit(lambda q, keys: attend(q, keys, pos, scale=K**-0.5))(q, Keys(k, v, pos[:, None]))
    return jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse, 1, 2)


@pytest.mark.rotating
def test_bfloat16_inputs_give_the_oracle():
    sequences.bfloat16_gives_the_oracle(OPS["attn_gqa_sink_window"], *oracle("attn_gqa_sink_window"))


def test_float64_is_the_equation_from_any_state_in_segments_and_with_masks(tokens):
    sequences.the_equation_in_float64(run, tokens, by_hand)


@pytest.mark.parametrize("size", sweep([1, 14], 1))
def test_pieces_and_steps_are_the_whole(tokens, size):
    sequences.pieces_are_the_whole(run, tokens, by_hand, size)


@pytest.mark.rotating
def test_no_room_is_nan(tokens):
    sequences.no_room_is_nan(run, tokens, by_hand)


@pytest.mark.rotating
def test_gradients_agree_also_where_logits_are_large(tokens):
    sequences.gradients_agree(run, tokens | {"q": 30 * tokens["q"]})


def test_many_queries_go_in_strips(tokens, monkeypatch):
    monkeypatch.setattr("kvjax.ops.attention.sinks.QUERIES", 16)
    out, _ = jax.jit(lambda x: run(x))(as_arrays(tokens, jnp.float32))
    assert rms(out, by_hand(tokens)) < 1e-6


@pytest.mark.rotating
def test_ordinary_attention_takes_a_sink_and_a_bias_afterwards(tokens, rng):
    k, v = rng.normal(size=(N, K)), rng.normal(size=(N, V))
    want = np.zeros((B, T, N, V))
    for at, s, values in rows(tokens, T):
        s = np.append(s, K**-0.5 * k[at[2]] @ tokens["q"][at])
        p = np.exp(s) / (np.exp(s).sum() + np.exp(SINK[at[2]]))
        want[at] = p @ np.vstack([values, v[at[2]]])
    out, lse = plain(tokens, jnp.float32)
    k, v, q, sink = (jnp.asarray(x, jnp.float32) for x in (k, v, tokens["q"], SINK))
    # In either order: a merge does not ask what was merged before.
    one = add_slot(*add_kv_bias(out, lse, q, k, v), sink[None, None])
    other = add_kv_bias(*add_slot(out, lse, sink[None, None]), q, k, v)
    assert rms(one[0], want) < 1e-6 and rms(other[0], want) < 1e-6
    assert rms(one[1], other[1]) < 1e-6


@pytest.mark.rotating
def test_float64_slots_are_exact_also_where_nothing_is_seen(rng):
    out, lse, score, value = (rng.normal(size=s) for s in ((3, V), 3, 3, (3, V)))
    out[0], lse[0] = 0, -np.inf
    a, b = np.exp(lse), np.exp(score)
    with jax.enable_x64(True):
        x = [jnp.asarray(y) for y in (out, lse, score, value)]
        got, total = add_slot(*x)
        kept, _ = add_slot(*x[:3])
        grad = jax.grad(lambda out, lse: add_slot(out, lse, *x[2:])[0].sum(), (0, 1))(*x[:2])
    assert rms(got, (a[:, None] * out + b[:, None] * value) / (a + b)[:, None]) < 1e-10
    assert rms(total, np.log(a + b)) < 1e-10 and rms(kept, (a / (a + b))[:, None] * out) < 1e-10
    assert all(np.isfinite(y).all() for y in grad)


def test_sinks_beyond_the_range_of_exp_are_exact():
    out, lse = jnp.ones((2, 1)), jnp.asarray([1000.0, -1000.0])
    got, total = add_slot(out, lse, jnp.zeros(2))
    assert got.ravel().tolist() == [1, 0] and total.tolist() == [1000, 0]


def test_clipped_softmax_gives_exact_zeros_and_ones(rng):
    gamma, zeta = -0.05, 1.02
    s = 8 * rng.normal(size=(1, 2, 3, 8))
    s[..., 5:] = -np.inf
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    want = np.clip((zeta - gamma) * p + gamma, 0, 1)
    assert ((want == 0) & (p > 0)).any() and (want == 1).any()
    with jax.enable_x64(True):
        got = clipped_softmax(jnp.asarray(s), gamma=gamma, zeta=zeta)
    assert rms(got, want) < 1e-10 and ((np.asarray(got) == 0) == (want == 0)).all()
    with pytest.raises(ValueError, match="gamma <= 0"):
        clipped_softmax(jnp.asarray(s, jnp.float32), gamma=0.1)


def test_a_gate_scales_a_head_of_a_token(rng):
    out, gate = rng.normal(size=(B, T, N, V)), rng.normal(size=(B, T, N))
    with jax.enable_x64(True):
        got = gated_output(jnp.asarray(out), jnp.asarray(gate))
    assert rms(got, out / (1 + np.exp(-gate))[..., None]) < 1e-10
