"""Conversions against their definitions, head by head and layer by layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from kvjax.models import transformer
from kvjax.models.config import Config
from kvjax.models.encoder import encode
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.model import Model
from kvjax.store.affine import Affine
from kvjax.store.rotate import Rotate, hadamard
from kvjax.train.conversion.convert import (
    drop_attention,
    insert_cross_attention,
    pool_heads,
    rotate_values,
    share_layers,
)
from tests.models.conversation import parameters

forward = jax.jit(transformer.forward, static_argnums=2)
CONFIG = Config(40, 12, 3, 6, 6, 4, 20, qkv_bias=True)
CROSS = CrossAttention(width=12, turns=True)


@pytest.fixture(scope="module")
def params():
    return parameters(CONFIG)


def heads(x):
    return np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, CONFIG.head_dim)


def test_a_pooled_head_is_the_mean_of_its_group(params):
    pooled, config = pool_heads(params, CONFIG, 2)
    for old, new in zip(params["layers"], pooled["layers"], strict=True):
        for name in ("k", "v", "k_bias", "v_bias"):
            want = np.stack([heads(old[name])[..., 3 * g : 3 * g + 3, :].mean(-2) for g in range(2)], -2)
            np.testing.assert_allclose(heads(new[name]), want, atol=1e-6)
    assert config == dataclasses.replace(CONFIG, kv_heads=2)


@pytest.mark.rotating
def test_weights_make_it_a_weighted_sum_and_have_gradients(params):
    weights = jnp.asarray(np.random.default_rng(1).random((3, 6)), jnp.float32)
    pooled, config = pool_heads(params, CONFIG, 3, v_weights=weights)
    old, new = params["layers"][1]["v"], pooled["layers"][1]["v"]
    want = sum(np.asarray(weights)[1, 2 + i] * heads(old)[..., 2 + i, :] for i in range(2))
    np.testing.assert_allclose(heads(new)[..., 1, :], want, atol=1e-6)

    def loss(w):
        made, _ = pool_heads(params, CONFIG, 3, w, w)
        return forward(made, jnp.arange(5, dtype=jnp.int32)[None], config).std()

    gradient = jax.jit(jax.grad(loss))(weights)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@pytest.mark.rotating
def test_pooling_equal_heads_changes_nothing(params):
    def alike(w):
        return jnp.repeat(w.reshape(*w.shape[:-1], 6, 4)[..., ::3, :], 3, -2).reshape(w.shape)

    same = tuple(
        {n: alike(w) if n in ("k", "v", "k_bias", "v_bias") else w for n, w in p.items()}
        for p in params["layers"]
    )
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 9)), jnp.int32)
    whole = {**params, "layers": same}
    pooled, config = pool_heads(whole, CONFIG, 2)
    np.testing.assert_allclose(forward(pooled, tokens, config), forward(whole, tokens, CONFIG), atol=1e-4)


def test_a_source_projects_with_the_mean_of_its_readers(params):
    shared, config = share_layers(params, CONFIG, [0, 0, 2])
    old = params["layers"]
    np.testing.assert_allclose(shared["layers"][0]["k"], (old[0]["k"] + old[1]["k"]) / 2, atol=1e-6)
    np.testing.assert_array_equal(shared["layers"][2]["v"], old[2]["v"])
    assert "k" not in shared["layers"][1] and "v_bias" not in shared["layers"][1]
    assert np.isfinite(forward(shared, jnp.zeros((1, 4), jnp.int32), config)).all()


def test_a_dropped_layer_adds_what_its_feed_forward_adds(params):
    smaller, config = drop_attention(params, CONFIG, [1])
    silent = tuple(
        {n: jnp.zeros_like(w) if n == "o" and i == 1 else w for n, w in p.items()}
        for i, p in enumerate(params["layers"])
    )
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    want = forward({**params, "layers": silent}, tokens, CONFIG)
    np.testing.assert_allclose(forward(smaller, tokens, config), want, atol=1e-5)
    assert not {"q", "k", "v", "o", "attn_norm"} & set(smaller["layers"][1])


@pytest.mark.rotating
def test_inserted_layers_add_nothing_until_they_are_trained(params):
    config = dataclasses.replace(CONFIG, windows=(None, 3, None))
    new, wider = insert_cross_attention(params, config, [0, 2], CROSS, jax.random.key(1))
    assert [m.source for m in wider.mixers if isinstance(m, CrossAttention)] == [None, 0]
    assert wider.windows == (None, None, 3, None, None)
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 9)), jnp.int32)
    held = encode(params, tokens[:, 3:], config)
    want = forward(params, tokens, config)
    np.testing.assert_allclose(forward(new, tokens, wider, context=held), want, atol=1e-5)
    # Each new layer reads the context once its output map is not zero.
    for at in (0, 3):
        one = new["layers"][at] | {"o": jnp.ones_like(new["layers"][at]["o"])}
        layers = tuple(one if i == at else p for i, p in enumerate(new["layers"]))
        moved = forward({**new, "layers": layers}, tokens, wider, context=held)
        assert np.abs(moved - want).max() > 1e-2


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda p: pool_heads(p, CONFIG, 4), "6 KV heads cannot become 4 equal groups"),
        (lambda p: pool_heads(p, CONFIG, 2, jnp.ones((3, 2))), "k_weights has shape .* expected .3, 6."),
        (lambda p: share_layers(p, CONFIG, [0, 0]), "sources names 2 layers, the model has 3"),
        (
            lambda p: share_layers(p, CONFIG, [0, 0, 1]),
            "layer 2 reads layer 1, which has no slots of its own",
        ),
        (lambda p: share_layers(p, CONFIG, [0, 0, 7]), "source=7 names no layer"),
        (lambda p: drop_attention(p, CONFIG, [3]), "layers .3. are not of 0 to 2"),
        (
            lambda p: insert_cross_attention(p, CONFIG, [1, 3], CROSS, jax.random.key(0)),
            "before=.1, 3. must name layers of 0 to 2, each once",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused(params, call, why):
    with pytest.raises(ValueError, match=why):
        call(params)


def test_rotated_values_are_folded_into_the_weights_and_change_no_logit(params):
    folded = rotate_values(params, CONFIG, Rotate(seed=2))
    r = hadamard(CONFIG.head_dim, 2)
    for old, new in zip(params["layers"], folded["layers"], strict=True):
        for name in ("v", "v_bias"):
            np.testing.assert_allclose(heads(new[name]), heads(old[name]) @ r.T, atol=1e-6)
    tokens = jnp.arange(20, dtype=jnp.int32)[None]
    np.testing.assert_allclose(forward(folded, tokens, CONFIG), forward(params, tokens, CONFIG), atol=2e-5)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.rotating
def test_plain_codes_of_folded_values_are_codes_of_turned_values(params, bits):
    """QuaRot's two forms: the rotation of values folded into weights, and turned back in every step."""
    keys, codec = Rotate() >> Affine(bits), Affine(bits, clip=0.95)
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocab, (2, 24)).tolist()
    found = []
    for weights, values in ((params, Rotate() >> codec), (rotate_values(params, CONFIG, Rotate()), codec)):
        model = Model(CONFIG, weights)
        _, cache = kvjax.prefill(model, tokens, method=Method(store=Store(keys, values)), room=4)
        found.append(kvjax.step(model, cache, [3, 5])[0])
    _, plain = kvjax.prefill(Model(CONFIG, params), tokens, room=4)
    exact = kvjax.step(Model(CONFIG, params), plain, [3, 5])[0]
    size = np.abs(exact).max()
    assert np.abs(found[0] - found[1]).max() < 1e-5 * size
    assert np.abs(found[0] - exact).max() > 1e-3 * size


def test_values_that_are_more_than_heads_are_not_rotated():
    gated = dataclasses.replace(CONFIG, mixers=(Attention(gate=True),) * 3)
    with pytest.raises(ValueError, match="rotating values is defined for models whose layers are all plain"):
        rotate_values(parameters(gated), gated, Rotate())
