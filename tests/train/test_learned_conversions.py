"""Conversions that learn what they leave open: WGQA, DHA's fusion, MatryoshkaKV, RecurFormer; and LoRC."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.layers import rms_norm
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope
from kvjax.train.conversion import fusion, low_rank
from kvjax.train.conversion.by_predictions import learn
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.convert import Grouping
from kvjax.train.conversion.difference import difference
from kvjax.train.conversion.recur import of_heads, recency

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=4, head_dim=4, d_ff=24)
TEXTS = np.random.default_rng(0).integers(0, 32, (4, 20)).tolist()


def model(seed=0, config=CONFIG):
    return Model(config, init(config, jax.random.key(seed)))


def leaves(made):
    return jax.tree.leaves(made.params)


@pytest.mark.rotating
def test_weights_of_groups_start_as_means():
    m = model()
    for spec, plain in (
        ("wgqa:kv_heads=2,steps=0", "gqa:kv_heads=2"),
        ("dha:heads=8,steps=0", "dha:heads=8"),
    ):
        made, mean = convert(m, spec, TEXTS), convert(m, plain)
        assert made.config == mean.config
        for a, b in zip(leaves(made), leaves(mean), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("spec", ["wgqa:kv_heads=1", "dha:heads=4"])
def test_weights_of_groups_learn_to_come_nearer_to_the_original(spec):
    params = init(CONFIG, jax.random.key(1))
    for p in params["layers"]:
        # Only the first head's output counts, so that its weight should be one and the others' none.
        p["o"] = p["o"].at[:, 4:].multiply(0.02)
    m = Model(CONFIG, params)
    before, after = (
        difference(m, convert(m, f"{spec},steps={steps}", TEXTS), TEXTS).divergence for steps in (0, 300)
    )
    assert after < 0.7 * before


def test_fusion_is_the_original_at_first_and_its_spread_that_of_the_equation():
    m, rng = model(), np.random.default_rng(0)
    eye = jnp.broadcast_to(jnp.eye(4), (2, 4, 4))
    same = fusion._fused(m.params, CONFIG, {"k": eye, "v": eye})
    for a, b in zip(jax.tree.leaves(same), leaves(m), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    groupings = [Grouping((0, 0, 1, 1), (0, 0, 0, 1)), Grouping((0, 1, 1, 0), (0, 0, 0, 0))]
    w = rng.normal(size=(2, 4, 4)).astype(np.float32)
    for leaf in "kv":
        spread = 0.0
        for i, grouping in enumerate(groupings):
            groups = np.asarray(getattr(grouping, leaf))
            for head in range(4):
                inside = groups == groups[head]
                mean = (w[i] * inside)[inside].mean(0)
                spread += np.square(w[i, head] * inside - mean).sum()
        member = fusion._member(groupings, leaf)
        assert float(fusion._spread(jnp.asarray(w), member)) == pytest.approx(spread / 8, rel=1e-5)
    # Rows that are one are the weights of the group, and nothing is apart.
    row = jnp.asarray([0.2, 0.8, 0.5, 0.5])
    joined = jnp.broadcast_to(row, (2, 4, 4))
    member = fusion._member(groupings, "k")
    assert float(fusion._spread(joined, member)) == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(fusion._weights(joined, member), np.broadcast_to(row, (2, 4)), rtol=1e-6)


def test_a_multiplier_rises_by_what_is_missed():
    found = jax.grad(lambda x: fusion._rising(x) * 3.0)(jnp.asarray(2.0))
    assert (float(fusion._rising(jnp.asarray(2.0))), float(found)) == (2.0, -3.0)


@pytest.mark.rotating
def test_what_learns_from_predictions_moves_nothing_where_nothing_is_to_be_learned():
    m = model()
    build = lambda choice, key: {**m.params, "embed": m.params["embed"] * choice}  # noqa: E731
    found = learn(jnp.ones(()), build, CONFIG, (m.params, CONFIG), TEXTS, steps=20)
    assert float(found) == pytest.approx(1, abs=2e-3)
    far = learn(jnp.full((), 0.5), build, CONFIG, (m.params, CONFIG), TEXTS, steps=80)
    assert 0.7 < float(far) < 1.2


@pytest.mark.rotating
def test_bases_stay_orthogonal_and_what_they_leave_out_is_projected_away():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(2, 4, 4, 4)))[0]
    rotated = np.asarray(
        low_rank.rotated(
            jnp.asarray(basis, jnp.float32), jnp.asarray(rng.normal(size=basis.shape), jnp.float32)
        )
    )
    np.testing.assert_allclose(
        np.swapaxes(rotated, -1, -2) @ rotated, np.broadcast_to(np.eye(4), basis.shape), atol=1e-5
    )
    np.testing.assert_allclose(low_rank.rotated(jnp.asarray(basis), jnp.zeros_like(basis)), basis, atol=1e-6)
    m = model()
    cut = low_rank.projected(
        m.params, CONFIG, {name: jnp.asarray(rotated[..., :3]) for name in ("keys", "values")}
    )
    w = np.asarray(m.params["layers"][1]["v"][0], np.float64)[:, 8:12]
    want = w @ rotated[1, 2, :, :3] @ rotated[1, 2, :, :3].T
    np.testing.assert_allclose(cut["layers"][1]["v"][0][:, 8:12], want, atol=1e-5)
    # What is stored is that product.
    word = low_rank.fitted_word(
        3, 1, {n: low_rank._in_order(rotated.astype(np.float64)) for n in ("keys", "values")}
    )
    made = Model(word.config(CONFIG), word.params(m.params, CONFIG))
    assert difference(Model(CONFIG, cut), made, TEXTS).divergence == pytest.approx(0, abs=1e-6)


@pytest.mark.rotating
def test_nested_bases_learn_to_be_cut_short():
    m = model(2)
    before, after = (
        difference(m, convert(m, f"matryoshkakv:rank=1,steps={steps}", TEXTS), TEXTS).divergence
        for steps in (0, 150)
    )
    assert after < 0.95 * before
    assert difference(m, convert(m, "matryoshkakv:rank=4,steps=9", TEXTS), TEXTS).divergence == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.rotating
def test_ranks_fall_from_layer_to_layer_by_condition_numbers():
    config = dataclasses.replace(CONFIG, layers=3)
    params = init(config, jax.random.key(0))
    whole = [
        np.prod([np.linalg.cond(np.asarray(params["layers"][j][n][0], np.float64)) for n in "kv"])
        for j in range(3)
    ]
    logs = np.log([np.prod(whole[i:]) for i in range(3)])
    shares = 0.9 * (1 - (logs.max() - logs) / (logs.max() - logs.min()) * (1 - 0.2 / 0.9))
    made = convert(Model(config, params), "lorc:most=0.9,least=0.2")
    assert [m.key_rank for m in made.config.mixers] == np.rint(shares * 16).astype(int).tolist()
    assert made.config.mixers[0].value_rank > made.config.mixers[2].value_rank == round(0.2 * 16)
    full = convert(Model(config, params), "lorc:most=1.0,least=1.0", TEXTS)
    assert difference(Model(config, params), full, TEXTS).divergence == pytest.approx(0, abs=1e-6)


def test_low_rank_by_texts_is_nearer_than_by_weights():
    params = init(CONFIG, jax.random.key(3))
    # What the texts give layers lies in few directions.
    params["embed"] = params["embed"].at[:, 4:].multiply(0.02)
    m = Model(CONFIG, params)
    by_weights, by_texts = (
        difference(m, convert(m, "low-rank:rank=0.4", texts), TEXTS).divergence for texts in (None, TEXTS)
    )
    assert by_texts < 0.8 * by_weights


def test_recency_is_the_attention_that_the_newest_tokens_receive():
    config = dataclasses.replace(CONFIG, heads=4, kv_heads=2, rope=Rope(kind="none"))
    p = init(config, jax.random.key(0))["layers"][0]
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, 9, 16)))
    lengths = np.asarray([9, 7])
    found = recency(p, jnp.asarray(x), jnp.asarray(lengths), config, 0, 3)
    u = np.asarray(rms_norm(jnp.asarray(x), p["attn_norm"][0], config.norm_eps), np.float64)
    q, k = u @ np.asarray(p["q"][0], np.float64), u @ np.asarray(p["k"][0], np.float64)
    shares = [[], []]
    for b in range(2):
        for t in range(3, lengths[b]):
            for head in range(4):
                ks = k[b, : t + 1, 4 * (head // 2) : 4 * (head // 2) + 4]
                logits = ks @ q[b, t, 4 * head : 4 * head + 4] / 2
                weights = np.exp(logits) / np.exp(logits).sum()
                shares[head // 2].append(weights[-3:].sum())
    np.testing.assert_allclose(found, [np.mean(s) for s in shares], rtol=1e-4)


@pytest.mark.rotating
def test_heads_that_look_nearby_become_recurrent_and_all_else_stays():
    config = dataclasses.replace(CONFIG, heads=4, kv_heads=2, o_bias=True, qkv_bias=True)
    params = init(config, jax.random.key(0))
    for p, head in zip(params["layers"], (0, 1), strict=True):
        # This head asks by position alone, so by what is near; and what it gives is lost in the output map.
        p["q"] = p["q"].at[..., 8 * head : 8 * head + 8].set(0)
        p["q_bias"] = p["q_bias"].at[..., 8 * head : 8 * head + 8].set(6.0)
        p["k"] = p["k"].at[..., 4 * head : 4 * head + 4].set(0)
        p["k_bias"] = p["k_bias"].at[..., 4 * head : 4 * head + 4].set(6.0)
        p["o"] = p["o"].at[:, 8 * head : 8 * head + 8].set(0)
    m = Model(config, params)
    made = convert(m, "recurformer:kv_heads=1,near=4,steps=2", TEXTS)
    few, word = Attention(heads=2, kv_heads=1), Mamba2(2, 4, 4)
    assert made.config.mixers == (few, word) * 2 and made.config.inputs == (None, 0, None, 2)
    # The heads that left gave nothing, and their Mamba-2 gives nothing.
    assert difference(m, made, TEXTS).divergence == pytest.approx(0, abs=1e-6)
    kept = of_heads({n: params["layers"][0][n] for n in ("q", "k", "v", "o")}, [1], config)
    assert np.array_equal(made.params["layers"][0]["q"], kept["q"])
    assert np.array_equal(kept["o"], params["layers"][0]["o"][:, 8:])


@pytest.mark.rotating
def test_recurrent_heads_learn_what_attention_gave():
    other = model(5)
    before, after = (
        difference(other, convert(other, f"recurformer:kv_heads=2,near=4,steps={n}", TEXTS), TEXTS).divergence
        for n in (1, 150)
    )
    assert after < 0.6 * before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wgqa:kv_heads=2", "it learns from texts: give some"),
        ("wgqa:kv_heads=3", "cannot become 3 equal groups"),
        ("qcqa:heads=1", "no option has 1 KV heads or fewer: the least is 2"),
        ("lorc:most=0.2,least=0.5", "most=0.2 and least=0.5 are no shares"),
        ("matryoshkakv:rank=5", "rank is 5, expected 1 to 4, the channels of a head"),
        ("matryoshkakv:rank=2", "it learns from texts"),
        ("recurformer:kv_heads=4", "kv_heads is 4, expected 1 to 3 that stay"),
        ("recurformer:kv_heads=1", "is that of texts: give longer ones"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_said(spec, message):
    with pytest.raises(InputError, match=message):
        convert(model(), spec)
