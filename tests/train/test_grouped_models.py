"""The searches on whole models: what they measure, planted heads they must find, logits that must stay."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks.recall_tasks import training_batch
from kvjax.models import transformer
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.train.conversion.convert import Grouping, group_heads, pool_heads
from kvjax.train.conversion.grouping.asymgqa import asymgqa
from kvjax.train.conversion.grouping.dha import dha, fusion_losses
from kvjax.train.conversion.grouping.key_driven import kdgqa
from kvjax.train.conversion.grouping.nsga2 import Evolution
from kvjax.train.conversion.grouping.products import activation_products, key_norms, weight_products
from kvjax.train.conversion.grouping.qcqa import group_layer, group_layers, within

DOCS = Path(__file__).parents[2] / "docs" / "architectures.md"
forward = jax.jit(transformer.forward, static_argnums=2)
CONFIG = Config(vocab=40, d_model=12, layers=2, heads=6, kv_heads=6, head_dim=4, d_ff=20, qkv_bias=True)
TOKENS = np.random.default_rng(3).integers(0, 40, (3, 7))
SHORT = Evolution(population=60, generations=40)


def products(heads):
    return heads @ heads.T / heads.shape[1]


@pytest.fixture(scope="module")
def params():
    noise = np.random.default_rng(0)
    made = init(CONFIG, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(x + 0.3 * noise.standard_normal(x.shape), jnp.float32), made)


def planted(params, groupings):
    """Make the heads of a group of the model equal to its first."""
    layers = []
    for p, grouping in zip(params["layers"], groupings, strict=True):
        new = dict(p)
        for leaf in "kv":
            groups = getattr(grouping, leaf)
            first = np.array([groups.index(g) for g in groups])
            for name in (leaf, f"{leaf}_bias"):
                heads = p[name].reshape(*p[name].shape[:-1], 6, 4)
                new[name] = heads[..., first, :].reshape(p[name].shape)
        layers.append(new)
    return {**params, "layers": tuple(layers)}


# --- measures --------------------------------------------------------------------------------------------


def test_products_of_weights_are_means_over_matrix_and_bias(params):
    for p, found in zip(params["layers"], weight_products(params, CONFIG), strict=True):
        for name, got in zip("kv", found, strict=True):
            rows = np.concatenate([p[name][0], p[f"{name}_bias"]]).astype(np.float64)
            heads = [rows[:, 4 * i : 4 * i + 4].ravel() for i in range(6)]
            want = [[np.mean(a * b) for b in heads] for a in heads]
            np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.rotating
def test_products_and_norms_of_activations_are_those_of_unrotated_keys(params):
    p = jax.tree.map(lambda x: np.asarray(x[0], np.float64), params["layers"][0])
    x = np.asarray(params["embed"], np.float64)[TOKENS]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * p["attn_norm"]
    found, norms = activation_products(params, CONFIG, TOKENS), key_norms(params, CONFIG, TOKENS)
    for name, got in zip("kv", found[0], strict=True):
        heads = (x @ p[name] + p[f"{name}_bias"]).reshape(3, 7, 6, 4)
        mean = np.moveaxis(heads.mean(0), 1, 0).reshape(6, -1)
        np.testing.assert_allclose(got, products(mean), rtol=1e-4, atol=1e-5)
        if name == "k":
            want = [sum(np.linalg.norm(heads[b, :, i]) for b in range(3)) for i in range(6)]
            np.testing.assert_allclose(norms[0], want, rtol=1e-5)
    cache = kvjax.prefill(Model(CONFIG, params), TOKENS, room=1)[1]
    values = np.asarray(cache.groups[1].tail.v[0, :, :, :7], np.float64).mean(0).reshape(6, -1)
    np.testing.assert_allclose(found[1].v, products(values), rtol=1e-4, atol=1e-5)
    assert norms.shape == (2, 6)


@pytest.mark.rotating
def test_fusion_losses_are_those_of_models_with_one_head_there(params):
    tokens, own = jnp.asarray(TOKENS, jnp.int32), tuple(range(6))
    found = fusion_losses(params, CONFIG, lambda p: float(forward(p, tokens, CONFIG).std()))
    whole = float(forward(params, tokens, CONFIG).std())
    for layer in range(2):
        for j, one in enumerate([Grouping((0,) * 6, own), Grouping(own, (0,) * 6)]):
            groupings = [one if i == layer else None for i in range(2)]
            smaller, config = group_heads(params, CONFIG, groupings)
            want = float(forward(smaller, tokens, config).std()) - whole
            np.testing.assert_allclose(found[layer, j], want, atol=1e-5)
    assert np.abs(found).min() > 1e-4


def test_only_plain_attention_is_compared(params):
    grouped, config = group_heads(params, CONFIG, SHARED)
    with pytest.raises(ValueError, match="layers are all plain attention"):
        weight_products(grouped, config)
    with pytest.raises(ValueError, match="layers are all plain attention"):
        key_norms(grouped, dataclasses.replace(config), TOKENS)


# --- searches on checkpoints -----------------------------------------------------------------------------

SHARED = [Grouping((0, 1, 0, 2, 1, 0), (0, 1, 0, 2, 1, 0)), Grouping((0, 0, 1, 2, 2, 2), (0, 0, 1, 2, 2, 2))]
APART = [Grouping((0, 1, 0, 2, 1, 0), (0, 0, 0, 0, 1, 1)), Grouping((0, 0, 1, 1, 1, 1), (0, 1, 2, 3, 3, 0))]


def close(params, config, smaller, less):
    want = forward(params, jnp.asarray(TOKENS, jnp.int32), config)
    got = forward(smaller, jnp.asarray(TOKENS, jnp.int32), less)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "measure",
    [
        pytest.param(weight_products, marks=pytest.mark.rotating),
        lambda p, c: activation_products(p, c, TOKENS),
    ],
)
@pytest.mark.rotating
def test_asymgqa_finds_planted_heads_and_the_logits_stay(params, measure):
    model = planted(params, SHARED)
    found = [Grouping(*(asymgqa(x, 3) for x in layer)) for layer in measure(model, CONFIG)]
    assert found == SHARED
    close(model, CONFIG, *group_heads(model, CONFIG, found))


@pytest.mark.rotating
def test_qcqa_finds_planted_heads_and_the_logits_stay(params):
    model = planted(params, SHARED)
    fronts = [group_layer(layer, 6, SHORT) for layer in weight_products(model, CONFIG)]
    found = within(group_layers(fronts, SHORT), 6)
    assert list(found.groupings) == SHARED and found.error == 0
    close(model, CONFIG, *group_heads(model, CONFIG, found.groupings))
    assert within(group_layers(fronts, SHORT), 12) == found  # More KV heads are of no use.


@pytest.mark.parametrize("measure", [weight_products, lambda p, c: activation_products(p, c, TOKENS)])
def test_dha_finds_planted_keys_and_values_apart_and_the_logits_stay(params, measure):
    model = planted(params, APART)
    found = dha(measure(model, CONFIG), 3 + 2 + 2 + 4)
    assert found == APART
    close(model, CONFIG, *group_heads(model, CONFIG, found))


def test_any_key_driven_share_of_equal_heads_leaves_the_logits(params):
    model = planted(params, [Grouping((0,) * 6, (0,) * 6)] * 2)
    pooled, config = pool_heads(model, CONFIG, 3)
    # Equal heads have equal norms: the shares come from elsewhere.
    found = [kdgqa(np.array(n, float), 6) for n in ([1, 2, 4], [3, 1, 2])]
    smaller, less = group_heads(pooled, config, found)
    assert [max(m.k_of) + 1 for m in less.mixers] == [2, 2]
    close(model, CONFIG, smaller, less)


def test_key_driven_reads_what_key_norms_measure(params):
    pooled, config = pool_heads(params, CONFIG, 2)
    norms = key_norms(pooled, config, TOKENS)
    for row in norms:
        assert kdgqa(row, 6, least=1).reads.count(int(row.argmax())) == 5


@pytest.mark.rotating
def test_measured_losses_choose_layers_better_than_likeness_does():
    model = kvjax.load("recall-tiny")

    def loss_on(seed):
        tokens, weights, _ = (jnp.asarray(x) for x in training_batch(np.random.default_rng(seed), 4, 128))

        def loss(params, config=model.config):
            logits = jax.nn.log_softmax(forward(params, tokens[:, :-1], config))
            found = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
            return -float((found * weights[:, 1:]).sum() / weights[:, 1:].sum())

        return loss

    layers = weight_products(model.params, model.config)
    losses = fusion_losses(model.params, model.config, loss_on(0))
    by_losses, by_likeness = (
        loss_on(1)(*group_heads(model.params, model.config, found))
        for found in (dha(layers, 12, losses), dha(layers, 12))
    )
    whole = loss_on(1)(model.params)
    assert by_losses - whole < 0.2 * (by_likeness - whole)


def test_the_example_of_the_documentation_runs():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    scope = {}
    exec(next(b for b in blocks if "group_heads" in b), scope)
    mixers = scope["smaller"].mixers
    assert sum(max(x) + 1 for m in mixers for x in (m.k_of, m.v_of)) == 8
