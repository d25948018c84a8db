"""Attention that becomes native sparse attention: what a layer starts from, and what its selection learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init, plan, regroup
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.difference import difference
from kvjax.train.conversion.linear import seen_by
from kvjax.train.conversion.native_sparse import _masses, divergence, to_native_sparse
from tests.float64.reference import Decoder, rope, softmax

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)
WORD = dict(compress=4, stride=2, block=4, top=4, window=4)
TEXTS = np.random.default_rng(0).integers(0, 32, (6, 40)).tolist()


READ = dict(text=None, tasks=None, length=128, questions=False)


def sharp(key):
    params = init(CONFIG, jax.random.key(key))
    layers = [{n: 2 * w if n in "qk" else w for n, w in layer.items()} for layer in params["layers"]]
    return Model(CONFIG, {**params, "layers": tuple(layers)})


def test_a_layer_reads_what_its_attention_read_where_all_blocks_are_selected():
    model = sharp(0)
    spec = "nsa:compress=4,stride=2,block=4,top={},window=4,steps=0"
    whole, some = (difference(model, convert(model, spec.format(top)), TEXTS).divergence for top in (10, 3))
    assert whole < 0.01 < some
    made = convert(model, spec.format(4))
    for name in "qkvo":
        assert jnp.array_equal(made.params["layers"][0][name], model.params["layers"][0][name])


@pytest.mark.rotating
def test_shares_of_blocks_are_those_of_dense_attention_in_float64():
    model = sharp(1)
    made, config = to_native_sparse(model.params, CONFIG, WORD, (), 0)
    flat, x = {n: w[0] for n, w in made["layers"][0].items()}, model.params["embed"][jnp.asarray(TEXTS[:1])]
    alone = dataclasses.replace(config, layers=1, mixers=config.mixers[:1])
    share, _, free = _masses(flat, x, jnp.asarray([40]), alone, config.mixers[0])
    decoder = Decoder(model)
    q, k, _ = decoder.project(decoder.layers[0], np.asarray(x[0], np.float64))
    q, k = (rope(y, range(40), CONFIG.rope.theta) for y in (q, k))
    for head in range(2):
        p = sum(
            softmax(np.where(np.tril(np.ones((40, 40), bool)), q[n] @ k[head].T / 2, -np.inf))
            for n in (2 * head, 2 * head + 1)
        )
        mass = p.reshape(40, 10, 4).sum(-1)
        for t in range(40):
            at = [j for j in range(10) if 1 <= j <= t // 4 - 2]
            assert np.flatnonzero(np.asarray(free)[0, head, t]).tolist() == at
            if at:
                np.testing.assert_allclose(
                    share[0, head, t, jnp.asarray(at)], mass[t, at] / mass[t, at].sum(), atol=1e-5
                )


@pytest.mark.rotating
def test_the_selection_comes_nearer_to_attention_on_texts_that_it_was_not_fitted_to():
    model = kvjax.load("recall-tiny")
    fitted, others = (
        [t[:128] for t in read_texts(model, rows=n, seed=seed, **READ)] for n, seed in ((8, 1), (4, 0))
    )
    plain = regroup(model.params, plan(model.config, stacked=False))
    lengths = jnp.full((len(others),), 128, jnp.int32)
    inputs = seen_by(plain, jnp.asarray(others, jnp.int32), lengths, model.config).inputs
    apart = []
    for steps in (0, 60):
        made, config = to_native_sparse(model.params, model.config, WORD, fitted, steps)
        layers = regroup(made, plan(config, stacked=False))["layers"]
        alone = dataclasses.replace(config, layers=1, mixers=config.mixers[:1])
        each = [{n: w[0] for n, w in p.items()} for p in layers]
        apart.append([float(divergence(p, x, lengths, alone)) for p, x in zip(each, inputs, strict=True)])
    assert apart[1][0] < 0.8 * apart[0][0] and sum(apart[1]) < sum(apart[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("compress=3,stride=2,steps=0", "compress must be a multiple of stride=2, got 3"),
        ("compress=4,stride=2,block=4,top=2,steps=0", "top=2 blocks hold the initial=1 and local=2"),
        ("compress=4,stride=2,block=4", "fitted to texts: give some, or steps=0"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_fitted(options, message):
    with pytest.raises(InputError, match=message):
        convert(sharp(0), f"nsa:{options}")
