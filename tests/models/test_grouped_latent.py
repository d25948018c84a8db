"""Latents of groups of heads: a layer against its equation in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.expand import Expand
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.model import Model
from kvjax.models.params import shapes
from kvjax.ops.attention.union import Keys
from tests.float64.reference import rms_norm, rope, softmax
from tests.models.architectures import with_layers

GROUP, RK, RV, T = 2, 5, 7, 12


def is_shape(x):
    return isinstance(x, tuple) and isinstance(x[0], int)


def made(norm):
    bias = norm != "full"
    config = with_layers(GroupedLatent(GROUP, RK, RV), kv_heads=4, heads=8, qkv_bias=bias, qk_norm=norm)
    draw = np.random.default_rng(3)
    drawn = lambda shape: jnp.asarray(0.3 * draw.normal(size=shape), jnp.float32)  # noqa: E731
    return Model(config, jax.tree.map(drawn, shapes(config), is_leaf=is_shape))


def by_hand(model, tokens):
    c, p = model.config, {n: np.asarray(x[0], np.float64) for n, x in model.params["layers"][0].items()}
    top = {n: np.asarray(x, np.float64) for n, x in model.params.items() if n != "layers"}
    h, heads = c.head_dim, lambda y: y.reshape(T, -1, c.head_dim)

    def normed(name, y):
        if c.qk_norm == "full":
            return heads(rms_norm(y, p[f"{name}_norm"], c.norm_eps))
        return rms_norm(heads(y), p[f"{name}_norm"], c.norm_eps)

    x = top["embed"][tokens]
    y = rms_norm(x, p["attn_norm"], c.norm_eps)
    q = normed("q", y @ p["q"] + p.get("q_bias", 0))
    h_k, h_v = (y @ p["k_down"]).reshape(T, -1, RK), (y @ p["v_down"]).reshape(T, -1, RV)
    k = np.concatenate([h_k[:, g] @ p["k_up"][g] for g in range(c.kv_heads // GROUP)], 1) + p.get("k_bias", 0)
    q, k = (rope(z.swapaxes(0, 1), np.arange(T), c.rope.theta) for z in (q, normed("k", k)))
    out = np.zeros((T, 0))
    for n in range(c.heads):
        j = n // (c.heads // c.kv_heads)
        s = np.where(np.tri(T, dtype=bool), q[n] @ k[j].T * h**-0.5, -np.inf)
        out = np.concatenate([out, softmax(s) @ h_v[:, j // GROUP]], 1)
    x = x + out @ p["o"] + p.get("o_bias", 0)
    return rms_norm(x, top["norm"], c.norm_eps) @ top["unembed"]


@pytest.mark.parametrize("norm", ["full", pytest.param("head", marks=pytest.mark.rotating)])
def test_a_layer_is_its_equation(norm):
    model, tokens = made(norm), np.arange(5, 5 + T)
    want = by_hand(model, tokens)
    assert np.abs(model(tokens[None])[0] - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (GroupedLatent(3, 4, 4), "4 KV heads cannot be cut into groups of 3: choose a number that divides"),
        (GroupedLatent(2, 17, 4), "key_rank must be from 1 to 16, the channels of 2 heads, got 17"),
        (GroupedLatent(2, 4, 0), "value_rank is 0, expected a whole number >= 1"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        with_layers(word, kv_heads=4)


def test_heads_that_share_a_list_share_its_positions_and_biases():
    pos = jnp.asarray([[[0, 1, -1], [2, -1, 5]]])
    stored = Keys(jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 3, 4)), pos, pos.astype(jnp.float32))
    twice = lambda k, v: (jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1))  # noqa: E731
    rotate = lambda k, pos: k * pos[..., None].astype(k.dtype)  # noqa: E731
    (found,) = Expand(lambda q: q, twice, None, rotate=rotate).sets([stored])
    want = np.asarray(pos)[:, [0, 0, 1, 1]]
    np.testing.assert_array_equal(found.pos, want)
    np.testing.assert_array_equal(found.bias, want)
    np.testing.assert_array_equal(found.k, np.repeat(want[..., None], 4, -1))
