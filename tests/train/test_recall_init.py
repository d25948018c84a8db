"""The initialisation of recall-tiny, seen through an independent forward pass in float64 numpy."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.eval.tasks.recall_tasks import sample
from kvjax.models.params import shapes
from kvjax.train.recall_init import CONFIG, CONSTANT, circuit_init


def rotate(x, theta):
    """Rotate-half RoPE as complex numbers: channel i and i + H/2 are one number, turned by position."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention_maps(params, tokens, config=CONFIG):
    """Attention probabilities [2, N, T, T] of the first two layers of a plain decoder."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w  # noqa: E731
    h, x, maps = config.head_dim, params["embed"][np.asarray(tokens)], []
    future = np.triu(np.ones((len(tokens),) * 2, bool), 1)
    for layer in (jax.tree.map(lambda w: w[0], group) for group in params["layers"][:2]):
        y, heads, outs = norm(x, layer["attn_norm"]), [], []
        for n in range(config.heads):
            k = n * config.kv_heads // config.heads
            query = rotate(y @ layer["q"][:, n * h : (n + 1) * h], config.rope.theta)
            score = query @ rotate(y @ layer["k"][:, k * h : (k + 1) * h], config.rope.theta).T / np.sqrt(h)
            score = np.where(future, -np.inf, score)
            weight = np.exp(score - score.max(-1, keepdims=True))
            heads.append(weight / weight.sum(-1, keepdims=True))
            outs.append(heads[-1] @ y @ layer["v"][:, k * h : (k + 1) * h])
        x = x + np.concatenate(outs, -1) @ layer["o"]
        y = norm(x, layer["mlp_norm"])
        gate = y @ layer["gate"]
        x = x + gate / (1 + np.exp(-gate)) * (y @ layer["up"]) @ layer["down"]
        maps.append(np.stack(heads))
    return np.stack(maps)


@pytest.fixture(
    scope="module", params=[0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2))]
)
def params(request):
    return circuit_init(jax.random.key(request.param))


@pytest.mark.rotating
def test_layer_0_looks_back(params):
    tokens = sample("get", seed=0, index=0, tokens=256).context
    first = attention_maps(params, tokens)
    for head in range(CONFIG.heads):
        at = np.arange(CONFIG.heads, len(tokens))
        mass = first[0, head, at, at - head - 1]
        assert mass.mean() > 0.5 and mass.min() > 0.3, f"head {head} attends {head + 1} back"


def test_layer_1_finds_the_answer(params):
    mass, chance = [], []
    for index in range(4):
        one = sample("get", seed=0, index=index, tokens=300)
        maps = attention_maps(params, (*one.context, *one.question))
        value = one.spans[0][0] + 3
        mass.append(maps[1, :, -1, value].mean())
        chance.append(1 / maps.shape[-1])
    assert np.mean(mass) > 10 * np.mean(chance)
    assert np.mean(mass) > 0.1, "the calibrated score puts a good part of the attention there"


def test_parts_of_the_residual_stream_are_disjoint(params):
    first, second = (jax.tree.map(lambda w: w[0], group) for group in params["layers"][:2])
    h = CONFIG.head_dim
    before, before2 = np.asarray(first["o"][:h]), np.asarray(first["o"][h : 2 * h])
    embed = np.asarray(params["embed"])
    np.testing.assert_allclose(embed[:, 0], CONSTANT)
    np.testing.assert_allclose(np.linalg.norm(embed[:, 1:], axis=1), 1, rtol=1e-5)
    for empty in (before, before2):
        assert np.abs(embed[:, 1:] @ empty[:, 1:].T).max() < 1e-6
    assert np.abs(before @ before2.T).max() < 1e-6
    assert np.abs(before @ np.asarray(second["v"][:, :h])).max() < 1e-6


def test_parameters_have_their_shapes_and_repeat_with_the_key():
    one, two, other = (circuit_init(jax.random.key(seed)) for seed in (3, 3, 4))
    assert jax.tree.map(np.shape, one) == shapes(CONFIG)
    assert sum(x.size for x in jax.tree.leaves(one)) == 815_744
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(one))
    same, differs = (jax.tree.map(lambda a, b: bool((a == b).all()), one, x) for x in (two, other))
    assert all(jax.tree.leaves(same)) and not differs["embed"]


def test_other_sizes():
    config = dataclasses.replace(CONFIG, d_model=64, layers=2, heads=2, kv_heads=1, head_dim=16, d_ff=32)
    params = circuit_init(jax.random.key(0), config)
    maps = attention_maps(params, sample("get", seed=0, index=0, tokens=64).context, config)
    at = np.arange(4, 64)
    assert maps[0, 1, at, at - 2].mean() > 0.5
    with pytest.raises(ValueError, match="3 \\* head_dim \\+ 2 = 98"):
        circuit_init(jax.random.key(0), dataclasses.replace(CONFIG, d_model=64))
    with pytest.raises(ValueError, match="head_dim 6"):
        circuit_init(jax.random.key(0), dataclasses.replace(CONFIG, head_dim=6))
