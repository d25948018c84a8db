"""The decoder against a float64 numpy decoder written from its definition, and what holds for any decoder."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.config import Config
from kvjax.models.fingerprint import fingerprint
from kvjax.models.model import Model
from kvjax.models.params import Group, check_groups, init, layer_shapes, plan, shapes
from kvjax.models.transformer import forward, run_layers
from kvjax.ops.base.rope import Rope
from tests.models.architectures import TABLE
from tests.sweep import sweep

SMALL = Config(
    vocab=40, d_model=12, layers=3, heads=6, kv_heads=3, head_dim=8, d_ff=20, rope=Rope(theta=100.0)
)


def small(**options) -> Config:
    return dataclasses.replace(SMALL, **options)


VARIANTS = {
    "plain": SMALL,
    "mqa_tied": small(heads=5, kv_heads=1, tied=True),
    "mha_biases": small(kv_heads=6, qkv_bias=True, o_bias=True, mlp_bias=True),
    "windows_local_rope": small(windows=(5, None, 5), rope_local=Rope(theta=30.0)),
    "post_norms_full_qk": small(norms="post", qk_norm="full"),
    "sandwich_gemma": small(
        norms="both",
        qk_norm="head",
        norm_offset=1.0,
        activation="gelu_tanh",
        embed_scale=12**0.5,
        query_scale=0.3,
        attention_softcap=2.0,
        logit_softcap=3.0,
    ),
    "partial_rotary_gelu": small(rope=Rope(theta=50.0, rotary_dim=4), activation="gelu"),
}


def random_params(config: Config, seed: int = 0):
    """Parameters in which every leaf matters: norms off one, biases off zero."""
    params = init(config, jax.random.key(seed), groups=plan(config, stacked=False))
    noise = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.2 * noise.standard_normal(x.shape), jnp.float32), params)


def tokens(rng, *shape):
    return jnp.asarray(rng.integers(0, SMALL.vocab, shape), jnp.int32)


# --- the definition, one token at a time, in float64 -------------------------------------------------


def numpy_norm(x, weight, config):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * (config.norm_offset + weight)


def numpy_activation(x, name):
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numpy_attention(p, x, config, layer):
    t, h = len(x), config.head_dim

    def heads(name, count):
        y = x @ p[name] + p.get(name + "_bias", 0.0)
        if config.qk_norm == "full" and name != "v":
            y = numpy_norm(y, p[name + "_norm"], config)
        y = y.reshape(t, count, h)
        if config.qk_norm == "head" and name != "v":
            y = numpy_norm(y, p[name + "_norm"], config)
        return y

    def rotate(y):
        rope = config.layer_rope(layer)
        half = (rope.rotary_dim or h) // 2
        angle = np.arange(t)[:, None] * rope.theta ** (-np.arange(half) / half)
        z = (y[..., :half] + 1j * y[..., half : 2 * half]) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag, y[..., 2 * half :]], -1)

    q, k, v = (
        rotate(heads("q", config.heads)),
        rotate(heads("k", config.kv_heads)),
        heads("v", config.kv_heads),
    )
    out = np.zeros((t, config.heads, h))
    window = config.window(layer) or t
    for i in range(t):
        for n in range(config.heads):
            group = n // (config.heads // config.kv_heads)
            seen = slice(max(0, i - window + 1), i + 1)
            s = k[seen, group] @ q[i, n] * config.scale
            if config.attention_softcap:
                s = config.attention_softcap * np.tanh(s / config.attention_softcap)
            w = np.exp(s - s.max())
            out[i, n] = w / w.sum() @ v[seen, group]
    return out.reshape(t, -1) @ p["o"] + p.get("o_bias", 0.0)


def numpy_forward(params, row, config):
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    x = params["embed"][np.asarray(row)] * config.embed_scale

    def norm(p, name, y):
        return numpy_norm(y, p[name], config) if name in p else y

    for layer, stacked in enumerate(params["layers"]):
        p = {name: w[0] for name, w in stacked.items()}
        x = x + norm(p, "attn_post_norm", numpy_attention(p, norm(p, "attn_norm", x), config, layer))
        y = norm(p, "mlp_norm", x)
        gate = numpy_activation(y @ p["gate"] + p.get("gate_bias", 0.0), config.activation)
        y = (gate * (y @ p["up"] + p.get("up_bias", 0.0))) @ p["down"] + p.get("down_bias", 0.0)
        x = x + norm(p, "mlp_post_norm", y)
    out = numpy_norm(x, params["norm"], config) @ (params["embed"].T if config.tied else params["unembed"])
    return config.logit_softcap * np.tanh(out / config.logit_softcap) if config.logit_softcap else out


@pytest.mark.rotating
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_the_definition(name, rng):
    config = VARIANTS[name]
    params, row = random_params(config), tokens(rng, 1, 13)
    expected = numpy_forward(params, row[0], config)
    np.testing.assert_allclose(Model(config, params)(row)[0], expected, atol=2e-5 * np.abs(expected).max())


# --- what holds for any decoder ----------------------------------------------------------------------


IN_TURN = [pytest.param(name, marks=pytest.mark.rotating) for name in ("plain", "sandwich_gemma")]


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["windows_local_rope", *IN_TURN])
def test_stacking_layers_changes_nothing(name, rng):
    config = small(**{f.name: getattr(VARIANTS[name], f.name) for f in dataclasses.fields(Config)})
    config = dataclasses.replace(config, layers=5, windows=(5, None, None, None, 5) if config.windows else ())
    params, row = random_params(config), tokens(rng, 2, 9)
    stacked = [
        jax.tree.map(lambda *w: jnp.asarray(np.concatenate(w)), *params["layers"][g.first : g.first + g.size])
        for g in plan(config, stacked=True)
    ]
    assert len(stacked) < 5
    a, b = (Model(config, {**params, "layers": layers})(row) for layers in (params["layers"], tuple(stacked)))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.rotating
def test_padded_rows_equal_each_row_alone(rng):
    config = small(
        rope=Rope(kind="dynamic", theta=100.0, factor=2.0, original_max=6), windows=(4, None, None)
    )
    params, rows = random_params(config), tokens(rng, 3, 10)
    lengths = jnp.asarray([10, 4, 7], jnp.int32)
    together = jax.jit(forward, static_argnames="config")(params, rows, config, lengths)
    for b, n in enumerate([10, 4, 7]):
        alone = Model(config, params)(rows[b : b + 1, :n])
        np.testing.assert_allclose(together[b, :n], alone[0], atol=1e-5)


@pytest.mark.rotating
def test_the_future_changes_nothing(rng):
    config, row = VARIANTS["windows_local_rope"], tokens(rng, 1, 12)
    params = random_params(config)
    whole = Model(config, params)(row)
    other = Model(config, params)(row.at[0, 7:].set(3))
    np.testing.assert_array_equal(whole[0, :7], other[0, :7])
    assert jnp.abs(whole[0, 7:] - other[0, 7:]).max() > 0.1


def test_a_window_hides_what_is_older(rng):
    config = small(layers=1, windows=(3,))
    params, row = random_params(config), tokens(rng, 1, 8)
    whole, other = (Model(config, params)(r) for r in (row, row.at[0, 2].set((row[0, 2] + 1) % 40)))
    changed = np.abs(np.asarray(whole - other)).max((0, 2)) > 1e-6
    np.testing.assert_array_equal(changed, [0, 0, 1, 1, 1, 0, 0, 0])


@pytest.mark.rotating
def test_eager_equals_jit(rng):
    config = small(layers=1)
    params, row = random_params(config), tokens(rng, 1, 5)
    np.testing.assert_allclose(forward(params, row, config), Model(config, params)(row), atol=1e-5)


@pytest.mark.rotating
def test_low_precision_gives_float32_logits_near_the_exact_ones(rng):
    params, row = random_params(SMALL), tokens(rng, 1, 9)
    low = Model(SMALL, jax.tree.map(lambda w: jnp.asarray(np.asarray(w).astype(jnp.bfloat16)), params))(row)
    exact = Model(SMALL, params)(row)
    assert low.dtype == jnp.float32
    assert jnp.abs(low - exact).max() < 0.05 * jnp.abs(exact).max()


@pytest.mark.rotating
def test_gradients_are_finite_and_reach_every_parameter(rng):
    config = dataclasses.replace(VARIANTS["sandwich_gemma"], layers=1)
    params, row = random_params(config), tokens(rng, 1, 6)
    loss = jax.jit(jax.grad(lambda p: jax.nn.log_softmax(forward(p, row, config))[0, 2, 5]))
    for leaf in jax.tree.leaves(loss(params)):
        assert jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


@pytest.mark.rotating
def test_a_model_takes_lists_and_numpy():
    model = Model(SMALL, random_params(SMALL))
    rows = [[1, 2, 3], [4, 5, 6]]
    np.testing.assert_array_equal(model(rows), model(np.array(rows)))


# --- parameters and plans ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sweep(VARIANTS, "sandwich_gemma", "mha_biases"))
@pytest.mark.parametrize("dtype", sweep([jnp.float32, jnp.bfloat16], jnp.bfloat16))
def test_init_fills_the_tree_of_shapes(name, dtype):
    config = VARIANTS[name]
    tree = shapes(config)
    params = init(config, jax.random.key(0), dtype)
    assert jax.tree.map(jnp.shape, params) == tree
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert ("unembed" in params) == (not config.tied)
    assert set(params["layers"][0]) == set(layer_shapes(config))


@pytest.mark.rotating
def test_init_starts_with_unit_norms_and_fan_in_variance():
    config = small(d_model=128, d_ff=256, qkv_bias=True, norm_offset=1.0)
    params = init(config, jax.random.key(0), groups=(Group(0, 3),))
    layer = params["layers"][0]
    assert jnp.all(layer["attn_norm"] == 0) and jnp.all(params["norm"] == 0) and jnp.all(layer["q_bias"] == 0)
    assert float(layer["up"].var()) == pytest.approx(1 / 128, rel=0.05)
    assert float(layer["down"].var()) == pytest.approx(1 / 256, rel=0.05)
    assert not jnp.array_equal(layer["up"][0], layer["up"][1])


def test_plans_cut_after_two_layers_and_where_windows_change():
    config = small(layers=7, windows=(4, 4, 4, None, 4, 4, 4))
    assert plan(config, stacked=True) == (Group(0, 2), Group(2, 1), Group(3, 1), Group(4, 3))
    assert plan(config, stacked=False) == tuple(Group(i, 1) for i in range(7))
    assert plan(small(layers=6), stacked=True) == (Group(0, 2), Group(2, 4))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((Group(0, 2),), "layers 0 to 2 once each"),
        ((Group(0, 2), Group(1, 2)), "layers 0 to 2 once each"),
        ((Group(0, 3),), "different windows"),
    ],
)
def test_groups_that_no_plan_makes_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        check_groups(small(windows=(4, 4, None)), groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 4}, "cannot share 4 KV heads"),
        ({"windows": (3,)}, "windows names 1 layers, the model has 3"),
        ({"head_dim": 7}, "head_dim is 7, expected an even whole number >= 2"),
        ({"norms": "none"}, "norms is 'none', expected one of 'pre', 'post', 'both'"),
        ({"qk_norm": "all"}, "qk_norm is 'all', expected one of '', 'head', 'full'"),
        ({"activation": "relu"}, "one of .*'silu'.* got 'relu'"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_fingerprints_tell_models_apart():
    a, b = (Model(SMALL, random_params(SMALL, seed)) for seed in (0, 1))
    assert a.fingerprint != b.fingerprint
    assert a.fingerprint == Model(SMALL, random_params(SMALL, 0)).fingerprint
    assert a.fingerprint != Model(small(norm_eps=1e-5), a.params).fingerprint


def test_every_bit_of_every_weight_is_in_the_fingerprint():
    model = Model(SMALL, random_params(SMALL, 0))
    embed = np.asarray(model.params["embed"])
    bit, turned, swapped = embed.copy(), -embed, embed.copy()
    bit.view(np.uint32)[-1, -1] ^= 1
    swapped[[3, 9]] = embed[[9, 3]]
    edited = [dataclasses.replace(model, params={**model.params, "embed": x}) for x in (bit, turned, swapped)]
    renamed = {"norm" if n == "embed" else "embed" if n == "norm" else n: x for n, x in model.params.items()}
    others = [*edited, Model(SMALL, renamed), Model(SMALL, jax.tree.map(jnp.bfloat16, model.params))]
    assert len({m.fingerprint for m in [model, *others]}) == 6
    assert dataclasses.replace(model, name="other").fingerprint == model.fingerprint


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_fingerprints_are_those_of_any_device(dtype, monkeypatch, rng):
    mesh = jax.make_mesh((2,), ("x",))
    x = jnp.asarray(rng.integers(-99, 99, (2, 3, 8)), dtype)
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "x")))
    small = fingerprint("config", {"w": x})
    monkeypatch.setattr("kvjax.models.fingerprint._SMALL", 0)
    assert fingerprint("config", {"w": x}) == fingerprint("config", {"w": spread}) == small


@pytest.mark.rotating
def test_few_passes_stand_for_the_fixed_point_of_layers_that_read_from_above():
    config = TABLE["lckv"].config
    params = init(config, jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab, (2, 9)), jnp.int32)

    @partial(jax.jit, static_argnames="passes")
    def of(params, passes):
        return jax.value_and_grad(lambda p: jnp.square(run_layers(p, tokens, config, passes=passes).x).sum())(
            params
        )

    exact, gradient = of(params, None)
    apart = [abs(float(of(params, (m, 2))[0] - exact)) for m in (0, 2, 4)]
    assert apart[0] > apart[1] > apart[2] > 1e-4
    # Enough passes reach it, and with a gradient in all of them theirs is the fixed point's.
    for passes in ((7, 2), (0, 9)):
        found, slope = of(params, passes)
        assert float(found) == pytest.approx(float(exact), rel=1e-5)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(jnp.abs(b).max())))
    cut = of(params, (7, 2))[1]
    assert not np.allclose(cut["layers"][0]["q"], gradient["layers"][0]["q"], rtol=1e-3)
