"""Attention that becomes linear, layer by layer: what a layer starts from, learns, and which layers stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import Config
from kvjax.models.feed_forward import NoMLP
from kvjax.models.mixers.attention import ATTENTION
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import GatedDelta, KimiDelta
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import run_layers
from kvjax.train.conversion import linear
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.difference import difference
from kvjax.train.conversion.linear import WORDS, started, to_linear
from tests.sweep import sweep

CONFIG = Config(vocab=32, d_model=16, layers=3, heads=4, kv_heads=2, head_dim=4, d_ff=24)
TEXTS = np.random.default_rng(0).integers(0, 32, (4, 20)).tolist()


@pytest.mark.parametrize("mixer", sweep(WORDS))
def test_a_layer_learns_what_its_attention_gave_and_all_else_stays(mixer):
    model = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    apart = []
    for steps in (0, 60):
        made, hybrid = to_linear(model.params, CONFIG, TEXTS, layers=[1], mixer=mixer, steps=max(steps, 1))
        assert [type(m).__name__ for m in hybrid.mixers] == ["Attention", mixer, "Attention"]

        def added(params, config):
            ran = run_layers(params, jnp.asarray(TEXTS, jnp.int32), config, look=lambda passed: passed.mixed)
            return np.asarray(ran.collected[1][0])

        # Below it nothing has changed, so it is given what the attention was given.
        want = added(model.params, CONFIG)
        apart.append(np.square(added(made, hybrid) - want).sum() / np.square(want).sum())
        for name in ("gate", "up", "down", "mlp_norm"):
            assert np.array_equal(made["layers"][1][name], model.params["layers"][1][name])
        for name, x in model.params["layers"][2].items():
            assert np.array_equal(made["layers"][2][name], x)
    assert apart[1] < 0.7 * apart[0]


def test_a_layer_starts_from_the_projections_of_its_attention():
    p = init(CONFIG, jax.random.key(0))["layers"][0]
    alone = dataclasses.replace(CONFIG, layers=1, mixers=(GatedDelta(4, 4, 4),), mlps=(NoMLP(),))
    new = started(p, alone, 0)
    assert np.array_equal(new["q"], p["q"]) and np.array_equal(new["o"], p["o"])
    heads = np.asarray(p["k"][0]).reshape(16, 2, 4)
    assert np.array_equal(np.asarray(new["k"][0]).reshape(16, 4, 4), heads[:, [0, 0, 1, 1]])
    assert new["conv"][0, -1].tolist() == [1.0] * 48 and not new["conv"][0, :-1].any()
    mamba = started(p, dataclasses.replace(alone, mixers=(Mamba2(4, 4, 4),)), 0)
    assert np.array_equal(mamba["xbc"], jnp.concatenate([new["v"], new["k"], new["q"]], -1))


@pytest.mark.rotating
def test_layers_whose_loss_does_the_most_damage_stay():
    params = init(CONFIG, jax.random.key(0))
    # What layers 0 and 2 put out hardly counts.
    for i in (0, 2):
        params["layers"][i]["o"] = params["layers"][i]["o"] * 1e-3
    model = Model(CONFIG, params)
    hybrid = convert(model, "linear:keep=1,mixer=KimiDelta,steps=2", TEXTS)
    word = KimiDelta(4, 4, 4)
    assert hybrid.config.mixers == (word, ATTENTION, word)
    assert difference(model, hybrid, TEXTS).divergence < 1e-3
    again = convert(hybrid, "linear:layers=[1],steps=1", TEXTS)
    assert again.config.mixers == (word, GatedDelta(4, 4, 4), word)


@pytest.mark.rotating
def test_what_stands_behind_a_text_teaches_nothing():
    params, texts = init(CONFIG, jax.random.key(0)), [TEXTS[0][:9], TEXTS[1][:12]]
    lengths = jnp.asarray([9, 12], jnp.int32)
    learnt = []
    for seed in (0, 1):
        rows = np.random.default_rng(seed).integers(0, 32, (2, 20)).astype(np.int32)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = text
        seen = linear.seen_by(params, jnp.asarray(rows), lengths, CONFIG)
        learnt.append(linear._trained(params["layers"][0], CONFIG, GatedDelta(4, 4, 4), 0, seen, 2))
    for a, b in zip(*map(jax.tree.leaves, learnt), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layers=[1], mixer="GatedDeltaNet"), "expected one of .* did you mean GatedDelta"),
        (dict(), "give either the layers"),
        (dict(layers=[1], keep=1), "give either the layers"),
        (dict(layers=[3]), r"layers \[3\] are none of plain attention: those are \[0, 1, 2\]"),
        (dict(keep=3), "keep is 3, expected 0 to 2"),
    ],
)
def test_what_cannot_become_linear_is_said(options, message):
    params = init(CONFIG, jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        to_linear(params, CONFIG, TEXTS, **options)
    with pytest.raises(ValueError, match="learn from texts"):
        to_linear(params, CONFIG, [], layers=[0])
