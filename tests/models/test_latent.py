"""Latent attention: its layer against an oracle, and against ordinary heads rotated as complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import steps
from kvjax.grammar import Method
from kvjax.models.feed_forward import NoMLP
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.params import init
from kvjax.steps import Run
from tests.models.architectures import MLA, TPA, with_layers
from tests.ops import sequences
from tests.ops.oracles import rms
from tests.parity.ops.layers import OPS

GROUPED = GroupedLatent(group=2, key_rank=6, value_rank=8)
B, T, D, H, K, P, R, V, THETA = 2, 13, 11, 3, 6, 4, 7, 5, 10000.0


@pytest.fixture
def tokens(rng):
    shapes = {"x": (B, T, D), "Wq": (D, H, K + P), "Wkv": (D, R), "Wkr": (D, P)}
    shapes |= {"Wuk": (R, H, K), "Wuv": (R, H, V), "kv_norm": (R,)}
    return {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}


def complex_pairs(x, t):
    """Neighbours as real and imaginary part, turned to position t."""
    return (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * t * THETA ** (-np.arange(P // 2) * 2 / P))


def by_hand(x, turn=complex_pairs):
    q, down, k_rope = np.einsum("btd,dhk->bthk", x["x"], x["Wq"]), x["x"] @ x["Wkv"], x["x"] @ x["Wkr"]
    latent = down / np.sqrt((down**2).mean(-1, keepdims=True) + 1e-6) * x["kv_norm"]
    out = np.zeros((B, T, H, V))
    for b, t, h in np.ndindex(*out.shape[:3]):
        k, v = (latent[b, : t + 1] @ x[up][:, h] for up in ("Wuk", "Wuv"))
        key = np.array([turn(k_rope[b, s], s) for s in range(t + 1)])
        s = k @ q[b, t, h, :K] + (key.conj() @ turn(q[b, t, h, K:], t)).real
        p = np.exp((K + P) ** -0.5 * s)
        out[b, t, h] = p / p.sum() @ v
    return out


@pytest.mark.parametrize("recurrent", [False, True])
def test_expanded_and_absorbed_it_is_the_equation(tokens, recurrent):
    got = jax.jit(lambda x: OPS["mla"](x, recurrent=recurrent))(sequences.as_arrays(tokens, jnp.float32))
    assert rms(got["o"], by_hand(tokens)) < 1e-6


@pytest.mark.parametrize("recurrent", [False, True])
def test_float64_is_the_equation_to_the_last_digits(tokens, recurrent):
    with jax.enable_x64(True):
        got = jax.jit(lambda x: OPS["mla"](x, recurrent=recurrent))(sequences.as_arrays(tokens, jnp.float64))
        assert got["o"].dtype == np.float64
        np.testing.assert_allclose(got["o"], by_hand(tokens), rtol=1e-12, atol=1e-12)


def test_without_rotation_nothing_turns(tokens):
    got = jax.jit(lambda x: OPS["mla"](x, turns=False))(sequences.as_arrays(tokens, jnp.float32))
    assert rms(got["o"], by_hand(tokens, turn=lambda x, t: x)) < 1e-6


@pytest.mark.rotating
def test_a_step_never_computes_the_keys_of_a_whole_cache():
    """Grouped latents compute the keys of less than two strips at once: a whole cache would be seen."""
    room = 2000

    def largest(word, room=room):
        config = with_layers(word, kv_heads=4, mlps=(NoMLP(),))
        run, params = Run(config, Method()), init(config, jax.random.key(0))
        ids, one = jnp.zeros((B, 1), jnp.int32), jnp.ones((B,), jnp.int32)
        _, cache = jax.eval_shape(
            lambda: steps.prefill(run, params, ids, one, None, tokens_bound=1, room=room, compress=False)
        )
        step = jax.make_jaxpr(lambda cache: steps.step_fn(run, params, cache, ids[:, 0], one > 0))(cache)
        return sequences.largest_array(step.jaxpr), B * room * config.heads * config.head_dim

    found, keys = largest(MLA)
    assert found <= B * (room + 1) * (MLA.rank + MLA.rope_dim) < keys
    found, keys = largest(TPA)
    assert found <= B * (room + 1) * 2 * (4 + 8) < keys
    found, keys = largest(GROUPED)
    assert found <= B * (room + 1) * 2 * 8 < keys
    found, keys = largest(GROUPED, room=500)
    assert found >= keys
