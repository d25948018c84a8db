"""Models as modules of flax and back, and an attention of a user's own module whose past is a cache."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.mixers.attention import ATTENTION
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import forward

nnx = pytest.importorskip("flax.nnx")
import kvjax.nnx  # noqa: E402

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=24)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)), jnp.int32)
PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def loss_of(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean()


@pytest.mark.rotating
def test_an_optimizer_of_flax_trains_a_model_as_optax_trains_its_pytree():
    model, rule = Model(CONFIG, init(CONFIG, jax.random.key(0))), optax.adamw(1e-2)
    decoder = kvjax.nnx.Decoder(model)
    np.testing.assert_allclose(decoder(TOKENS), model(TOKENS), atol=1e-5)

    @nnx.jit
    def step(decoder, optimiser):
        loss, gradient = nnx.value_and_grad(lambda d: loss_of(d(TOKENS)))(decoder)
        optimiser.update(decoder, gradient)
        return loss

    @jax.jit
    def by_optax(params, state):
        loss, gradient = jax.value_and_grad(lambda p: loss_of(forward(p, TOKENS, CONFIG)))(params)
        change, state = rule.update(gradient, state, params)
        return loss, optax.apply_updates(params, change), state

    with jax.numpy_dtype_promotion("standard"):
        optimiser = nnx.Optimizer(decoder, rule, wrt=nnx.Param)
        losses = [float(step(decoder, optimiser)) for _ in range(3)]
        params, state = model.params, rule.init(model.params)
        for loss in losses:
            want, params, state = by_optax(params, state)
            assert loss == pytest.approx(float(want), rel=1e-5)
    trained = decoder.model()
    for a, b in zip(jax.tree.leaves(trained.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert trained.config == CONFIG
    assert kvjax.generate(trained, [[1, 2, 3]], max_new_tokens=2).tokens.shape == (1, 2)


@pytest.mark.parametrize(
    "mixer",
    [ATTENTION, pytest.param(KimiDelta(2, 8, 8), marks=pytest.mark.rotating)],
    ids=["attention", "kda"],
)
def test_steps_over_the_cache_give_what_a_call_gives_for_the_whole_text(mixer, rng):
    layer = kvjax.nnx.Attention(16, heads=2, kv_heads=1, head_dim=8, mixer=mixer, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(2, 9, 16)), jnp.float32)
    whole = layer(x)
    np.testing.assert_allclose(layer.prefill(x[:, :6], room=3), whole[:, :6], atol=1e-5)
    step = nnx.jit(lambda layer, x: layer.step(x))
    for at in range(6, 9):
        np.testing.assert_allclose(step(layer, x[:, at : at + 1]), whole[:, at : at + 1], atol=1e-5)
    assert layer.cache.get_value().next.tolist() == [9, 9]
    if mixer is ATTENTION:
        assert jnp.isnan(step(layer, x[:, :1])).all()  # there was room for three
        assert layer.cache.get_value().next.tolist() == [9, 9]


@pytest.mark.rotating
def test_the_cache_of_an_attention_holds_what_its_method_keeps(rng):
    method = kvjax.method("snapkv", budget=4, window=2)
    layer = kvjax.nnx.Attention(16, heads=4, kv_heads=2, head_dim=8, method=method, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(1, 9, 16)), jnp.float32)
    layer.prefill(x[:, :8], room=2)
    (kept,) = kvjax.kept_positions(layer.cache.get_value())
    assert (np.asarray(kept) >= 0).sum(-1).tolist() == [[4, 4]]
    # The same step by hand, over what was kept.
    params = {"layers": (kvjax.nnx.plain(layer.layer),)}
    p, config = jax.tree.map(lambda w: np.asarray(w[0], np.float64), params["layers"][0]), layer.config

    def normed(y):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_eps) * p["attn_norm"]

    def turned(y, pos):
        rates = config.rope.theta ** (-np.arange(4) / 4)
        cos, sin = np.cos(pos * rates), np.sin(pos * rates)
        return np.concatenate([y[:4] * cos - y[4:] * sin, y[4:] * cos + y[:4] * sin])

    u, out = normed(np.asarray(x[0], np.float64)), []
    for head in range(4):
        q = turned((u[8] @ p["q"]).reshape(4, 8)[head], 8)
        seen = [*sorted(set(np.asarray(kept)[0, head // 2].tolist()) - {-1}), 8]
        k = np.stack([turned((u[i] @ p["k"]).reshape(2, 8)[head // 2], i) for i in seen])
        v = np.stack([(u[i] @ p["v"]).reshape(2, 8)[head // 2] for i in seen])
        w = np.exp(k @ q * 8**-0.5)
        out.append(w @ v / w.sum())
    want = np.asarray(x[0, 8], np.float64) + np.concatenate(out) @ p["o"]
    np.testing.assert_allclose(layer.step(x[:, 8:])[0, 0], want, atol=1e-5)


@pytest.mark.rotating
def test_what_one_layer_cannot_follow_is_refused():
    sizes = dict(heads=2, kv_heads=1, head_dim=8, rngs=nnx.Rngs(0))
    for method in ("kvzip", "streamingllm"):
        with pytest.raises(InputError, match=f"{method}.*(one layer cannot|tokenizer)"):
            kvjax.nnx.Attention(16, method=kvjax.method(method, budget=0.5), **sizes)
    with pytest.raises(InputError, match="no cache yet: give it a prompt by prefill"):
        kvjax.nnx.Attention(16, **sizes).step(jnp.ones((1, 1, 16)))
    layer = kvjax.nnx.Attention(16, **sizes)
    layer.prefill(jnp.ones((1, 2, 16)), room=2)
    with pytest.raises(InputError, match=r"\(1, 2, 16\), expected one token of every row, \(1, 1, 16\)"):
        layer.step(jnp.ones((1, 2, 16)))


@pytest.mark.rotating
def test_the_example_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [b for b in blocks if "flax" in b]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, "docs/training.md", "exec"), {})
    assert int(capsys.readouterr().out) > 0
