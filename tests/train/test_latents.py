"""Conversions by singular values: exact where nothing is lost, and as close as what they leave out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import forward
from kvjax.ops.base.rope import Rope
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.difference import difference
from kvjax.train.conversion.latents import input_moments, pool_by_values, to_latents
from tests.sweep import sweep

CONFIG = Config(
    vocab=32, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, rope=Rope(theta=50.0)
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 14)), jnp.int32)


def logits(params, config):
    return np.asarray(jax.jit(forward, static_argnames="config")(params, TOKENS, config))


@pytest.mark.parametrize(
    ("config", "rank", "rotary"),
    sweep(
        [
            (CONFIG, 16, 2),
            (dataclasses.replace(CONFIG, kv_heads=4, heads=4, d_model=24), 24, 4),
            (dataclasses.replace(CONFIG, kv_heads=1), 8, 1),
            (dataclasses.replace(CONFIG, windows=(5, None), rope_local=Rope(theta=9.0)), 16, 2),
            (dataclasses.replace(CONFIG, rope=Rope(kind="yarn", factor=4.0, original_max=16)), 16, 2),
        ],
        (CONFIG, 16, 2),
    ),
)
def test_latents_of_full_rank_with_all_turning_heads_lose_nothing(config, rank, rotary):
    params = init(config, jax.random.key(0))
    made, smaller = to_latents(params, config, rank, rotary)
    np.testing.assert_allclose(logits(made, smaller), logits(params, config), atol=3e-5)


def test_what_does_not_turn_any_more_is_all_that_a_smaller_rotary_part_loses():
    """Without rotations, keys that no longer turn lose nothing in latents of full rank."""
    still = dataclasses.replace(CONFIG, rope=Rope(kind="none"))
    params = init(still, jax.random.key(0))
    made, smaller = to_latents(params, still, 32, 1)
    np.testing.assert_allclose(logits(made, smaller), logits(params, still), atol=3e-5)
    turning = to_latents(params, CONFIG, 32, 1)
    assert np.abs(logits(*turning) - logits(params, CONFIG)).max() > 1e-2


def test_a_model_of_latents_decodes_what_it_computes_and_keeps_rank_and_rotary_channels():
    model = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    made = convert(model, "mla:rank=6,rotary=2")
    want = made(TOKENS)
    _, cache = kvjax.prefill(made, TOKENS[:, :10], room=4)
    for at in range(10, 14):
        found, cache = kvjax.step(made, cache, TOKENS[:, at])
        np.testing.assert_allclose(found, want[:, at], atol=1e-4)
    per_token = 2 * (6 + 2 * 8) + 2  # of two layers, each with a position
    slots = 16 + 4  # the prompt's bucket, and the room
    assert kvjax.nbytes(cache) == 4 * (2 * slots * per_token + 2)


def related_heads(key):
    """Keys that differ by a complex factor at every frequency, values that span as much as one head."""
    params, rng = init(CONFIG, key), np.random.default_rng(1)
    for layer in params["layers"]:
        k = np.array(layer["k"][0]).reshape(32, 2, 8)
        z = k[:, 0, :4] + 1j * k[:, 0, 4:]
        z = z * rng.normal(size=(1, 4)) * np.exp(1j * rng.normal(size=(1, 4)))
        k[:, 1] = np.concatenate([z.real, z.imag], -1)
        v = np.array(layer["v"][0]).reshape(32, 2, 8)
        v[:, 1] = v[:, 0] @ rng.normal(size=(8, 8))
        layer |= {"k": jnp.asarray(k.reshape(1, 32, 16)), "v": jnp.asarray(v.reshape(1, 32, 16))}
    return params


@pytest.mark.rotating
def test_heads_that_are_related_become_one_without_loss():
    params = related_heads(jax.random.key(0))
    made, smaller = pool_by_values(params, CONFIG, 1)
    assert smaller == dataclasses.replace(CONFIG, kv_heads=1)
    np.testing.assert_allclose(logits(made, smaller), logits(params, CONFIG), atol=3e-5)
    latents = to_latents(params, CONFIG, 8, 1)
    np.testing.assert_allclose(logits(*latents), logits(params, CONFIG), atol=3e-5)


def test_biases_go_with_their_heads():
    config = dataclasses.replace(CONFIG, qkv_bias=True)
    params, rng = related_heads(jax.random.key(0)), np.random.default_rng(2)
    for layer in params["layers"]:
        for name, width in (("q", 32), ("k", 8), ("v", 8)):
            b = rng.normal(size=(1, width)).astype(np.float32)
            layer[f"{name}_bias"] = jnp.asarray(b)
        # Heads whose weights and biases are equal.
        for name in "kv":
            layer[name] = jnp.tile(layer[name][..., :8], 2)
            layer[f"{name}_bias"] = jnp.tile(layer[f"{name}_bias"], 2)
    made = pool_by_values(params, config, 1)
    np.testing.assert_allclose(logits(*made), logits(params, config), atol=3e-5)


@pytest.mark.rotating
def test_moments_are_those_of_what_layers_read_and_make_the_texts_count():
    model = kvjax.load("recall-tiny")
    texts = np.random.default_rng(0).integers(0, 200, (4, 48)).tolist()
    found = input_moments(model, texts)
    embedded = np.asarray(model.params["embed"], np.float64)[np.asarray(texts)]
    normed = embedded / np.sqrt((embedded**2).mean(-1, keepdims=True) + model.config.norm_eps)
    u = (normed * np.asarray(model.params["layers"][0]["attn_norm"][0])).reshape(-1, 128)
    np.testing.assert_allclose(found[0], u.T @ u / len(u), atol=1e-4)
    for spec in ("eckvh:kv_heads=1", "mla:rank=24"):
        blind, aligned = (difference(model, convert(model, spec, t), texts) for t in (None, texts))
        assert aligned.divergence < blind.divergence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(qkv_bias=True), "latents have no biases"),
        (dict(qk_norm="head"), "keys that turn whole"),
        (dict(rope=Rope(kind="dynamic")), "fixed frequencies"),
        (dict(rope=Rope(rotary_dim=4)), "keys that turn whole"),
    ],
)
def test_models_whose_keys_are_otherwise_are_refused(change, message):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        to_latents(init(config, jax.random.key(0)), config, 4)
    with pytest.raises(ValueError, match="expected 1 to 2 and 1 to 32"):
        to_latents(init(CONFIG, jax.random.key(0)), CONFIG, 4, 3)
