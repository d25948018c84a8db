"""Models with grouped heads against pooling by hand and against the models they come from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import transformer
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json, config_to_json
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.model import Model
from kvjax.models.params import Group, regroup
from kvjax.ops.base.rope import Rope
from kvjax.train.conversion.convert import Grouping, group_heads, pool_heads
from tests.models.conversation import parameters

forward = jax.jit(transformer.forward, static_argnums=2)
# Eight query heads on four KV heads, with everything that a layer of plain attention may have.
CONFIG = Config(
    40, 12, 3, 8, 4, 4, 20, rope=Rope(theta=100.0), qkv_bias=True, o_bias=True, qk_norm="head",
    windows=(None, 5, None), rope_local=Rope(theta=10.0), attention_softcap=3.0,
)  # fmt: skip
GROUPINGS = [Grouping((0, 1, 0, 1), (0, 0, 0, 1)), Grouping((0, 1, 1, 1), (0, 0, 0, 0)), None]
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 40, (2, 9)), jnp.int32)


@pytest.fixture(scope="module")
def params():
    return parameters(CONFIG)


def heads(x):
    return np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, CONFIG.head_dim)


def repeated(grouped):
    """Plain attention whose KV heads are copies of the grouped ones: one for every query head."""
    layers = []
    for p, grouping in zip(grouped["layers"], GROUPINGS, strict=True):
        new = dict(p)
        for leaf in "kv":
            old = (0, 1, 2, 3) if grouping is None else getattr(grouping, leaf)
            for name in (leaf, f"{leaf}_bias"):
                copies = heads(p[name])[..., np.repeat(old, 2), :]
                new[name] = jnp.asarray(copies.reshape(*p[name].shape[:-1], -1), jnp.float32)
        layers.append(new)
    return {**grouped, "layers": tuple(layers)}, dataclasses.replace(CONFIG, kv_heads=8)


def test_a_grouped_head_is_the_mean_of_its_group(params):
    grouped, config = group_heads(params, CONFIG, GROUPINGS)
    for old, new, grouping in zip(params["layers"], grouped["layers"], GROUPINGS, strict=True):
        for leaf in "kv":
            groups = (0, 1, 2, 3) if grouping is None else getattr(grouping, leaf)
            for name in (leaf, f"{leaf}_bias"):
                members = [np.flatnonzero(np.array(groups) == g) for g in range(max(groups) + 1)]
                want = np.stack([heads(old[name])[..., m, :].mean(-2) for m in members], -2)
                np.testing.assert_allclose(heads(new[name]), want, atol=1e-6)
        assert set(new) == set(old) and new["q"] is old["q"] and new["k_norm"] is old["k_norm"]
    every = tuple(range(8))
    assert config.mixers == (
        HeadMaps(every, (0, 0, 1, 1, 0, 0, 1, 1), (0, 0, 0, 0, 0, 0, 1, 1)),
        HeadMaps(every, (0, 0, 1, 1, 1, 1, 1, 1), (0,) * 8),
        Attention(),
    )


def test_it_computes_what_plain_attention_with_copied_heads_does(params):
    grouped, config = group_heads(params, CONFIG, GROUPINGS)
    want = forward(*repeated(grouped)[:1], TOKENS, repeated(grouped)[1])
    np.testing.assert_allclose(forward(grouped, TOKENS, config), want, atol=1e-5)


@pytest.mark.rotating
def test_single_heads_leave_the_logits(params):
    alone = Grouping((2, 0, 3, 1), (0, 1, 2, 3))
    same, config = group_heads(params, CONFIG, [alone, None, alone])
    np.testing.assert_allclose(forward(same, TOKENS, config), forward(params, TOKENS, CONFIG), atol=1e-5)
    np.testing.assert_array_equal(
        heads(same["layers"][0]["k"])[..., 2, :], heads(params["layers"][0]["k"])[..., 0, :]
    )


@pytest.mark.rotating
def test_equal_neighbours_are_pool_heads(params):
    pooled, smaller = pool_heads(params, CONFIG, 2)
    grouped, config = group_heads(params, CONFIG, [Grouping((0, 0, 1, 1), (0, 0, 1, 1))] * 3)
    np.testing.assert_allclose(forward(grouped, TOKENS, config), forward(pooled, TOKENS, smaller), atol=1e-5)


@pytest.mark.rotating
def test_layers_of_different_head_counts_decode_what_they_compute(params):
    grouped, config = group_heads(params, CONFIG, GROUPINGS)
    model = Model(config, grouped)
    whole = model(TOKENS)
    logits, cache = kvjax.prefill(model, TOKENS[:, :6], room=3)
    np.testing.assert_allclose(logits, whole[:, 5], atol=1e-5)
    for t in range(6, 9):
        logits, cache = kvjax.step(model, cache, TOKENS[:, t])
        np.testing.assert_allclose(logits, whole[:, t], atol=1e-5)
    for group, numbers in zip(cache.groups, ((2 + 2) * 4, (2 + 1) * 4, (4 + 4) * 4), strict=True):
        slots = group.tail
        assert (slots.k.size + slots.v.size) * slots.pos.shape[2] == numbers * slots.pos.size
    assert config_from_json(config_to_json(config)) == config


def test_stacked_layers_are_grouped_like_single_ones(params):
    config = dataclasses.replace(CONFIG, windows=(), rope_local=None)
    stacked = regroup(params, (Group(0, 1), Group(1, 2)))
    one, two = (group_heads(p, config, GROUPINGS)[0] for p in (params, stacked))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_heads_that_nobody_reads_are_left_out(params):
    own = (0, 1, 2, 3)
    reads = Grouping(own, own, (1, 1, 1, 3, 3, 3, 3, 3))
    grouped, config = group_heads(params, CONFIG, [reads, None, None])
    assert config.mixers[0].k_of == config.mixers[0].v_of == (0, 0, 0, 1, 1, 1, 1, 1)
    for name in ("k", "v", "k_bias"):
        np.testing.assert_array_equal(
            heads(grouped["layers"][0][name]), heads(params["layers"][0][name])[..., [1, 3], :]
        )


def test_weights_make_it_a_weighted_sum_and_have_gradients(params):
    weights = jnp.asarray(np.random.default_rng(1).random((3, 4)), jnp.float32)
    grouped, config = group_heads(params, CONFIG, GROUPINGS, v_weights=weights)
    old, new = params["layers"][0]["v"], grouped["layers"][0]["v"]
    want = sum(float(weights[0, i]) * heads(old)[..., i, :] for i in range(3))
    np.testing.assert_allclose(heads(new)[..., 0, :], want, atol=1e-6)

    def loss(w):
        return forward(group_heads(params, CONFIG, GROUPINGS, w, w)[0], TOKENS, config).std()

    gradient = np.asarray(jax.jit(jax.grad(loss))(weights))
    assert np.isfinite(gradient).all() and (gradient[:2] != 0).all() and not gradient[2].any()


def test_half_precision_stays_and_is_pooled_in_float32(params):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    grouped, _ = group_heads(half, CONFIG, [Grouping((0, 0, 0, 1), (0,) * 4)] * 3)
    old, new = half["layers"][1]["k"], grouped["layers"][1]["k"]
    want = jnp.asarray(heads(old)[..., :3, :].mean(-2), jnp.bfloat16)
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(heads(new)[..., 0, :], np.asarray(want, np.float64))


FULL = dataclasses.replace(CONFIG, qk_norm="full")
DYNAMIC = dataclasses.replace(CONFIG, rope=Rope(kind="dynamic"))
OK = Grouping((0,) * 4, (0,) * 4)


@pytest.mark.parametrize(
    ("config", "groupings", "why"),
    [
        (CONFIG, [OK], "groupings names 1 layers, the model has 3"),
        (
            CONFIG,
            [OK, Grouping((0, 0, 1), (0,) * 4), OK],
            "layer 1: k=.0, 0, 1. must name a group for each of the 4",
        ),
        (CONFIG, [OK, OK, Grouping((0,) * 4, (0, 2, 2, 0))], "layer 2: v=.0, 2, 2, 0. must .* none empty"),
        (CONFIG, [Grouping((), ())] * 3, "layer 0: k=.. must name a group"),
        (
            CONFIG,
            [Grouping(*[(0, 1, 2, 3)] * 2, (0, 1))] * 3,
            "reads=.0, 1. must name a new head for each of the 8",
        ),
        (CONFIG, [Grouping(*[(0, 0, 1, 1)] * 2, (2,) * 8)] * 3, "there are 2 and 2"),
        (CONFIG, [Grouping((0,) * 4, (0, 1, 1, 1), (0,) * 8)] * 3, "there are 1 and 2"),
        (FULL, [OK] * 3, 'HeadMaps takes qk_norm="" or "head", got "full"'),
        (DYNAMIC, [OK] * 3, "cannot follow a rope of kind 'dynamic'"),
        (dataclasses.replace(CONFIG, mixers=(Attention(gate=True),) * 3), [OK] * 3, "all plain attention"),
    ],
)
def test_what_cannot_be_grouped_is_refused(params, config, groupings, why):
    with pytest.raises(ValueError, match=why):
        group_heads(params, config, groupings)


def test_weights_that_do_not_fit_are_refused(params):
    with pytest.raises(ValueError, match="k_weights has shape .* expected .3, 4."):
        group_heads(params, CONFIG, [OK] * 3, jnp.ones((3, 2)))
