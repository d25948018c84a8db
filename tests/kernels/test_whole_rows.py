"""Attention of whole rows by a library's kernel: the call without cuDNN, and which layers make it.

That cuDNN itself gives the same numbers can only be seen on a GPU: `scripts/bench.py --accelerator` says so.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.mesh.on_mesh import on_mesh
from kvjax.models import attending
from kvjax.models.config import Config
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import forward
from kvjax.ops.attention import whole_rows
from kvjax.ops.attention.whole_rows import attend_whole_rows, can_run
from tests.ops.oracles import rms

T, HEADS, KV_HEADS, WIDTH = 9, 4, 2, 16


def draw(rng, heads=KV_HEADS):
    shapes = [(2, HEADS, T, WIDTH), (2, heads, T, WIDTH), (2, heads, T, WIDTH)]
    return [jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes]


def equation(q, k, v, scale, window):
    """softmax over the tokens that a token sees, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HEADS // x.shape[1], axis=1) for x in (k, v))
    back = np.arange(T)[:, None] - np.arange(T)[None]
    seen = (back >= 0) & (back < (window or T))
    z = np.where(seen, scale * q @ np.swapaxes(k, 2, 3), -np.inf)
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.rotating
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("implementation", ["reference", "gpu interpret"])
def test_it_is_the_equation(implementation, window, rng):
    q, k, v = draw(rng)
    got = attend_whole_rows(q, k, v, scale=0.3, window=window, implementation=implementation)
    assert got.shape == q.shape and rms(got, equation(q, k, v, 0.3, window)) < 6e-3


@pytest.mark.rotating
@pytest.mark.parametrize(("mesh", "heads"), [("data=2,model=2", 2), ("data=2,model=2", 1), ("data=4", 2)])
def test_devices_attend_to_their_own_rows_and_heads(mesh, heads, rng):
    q, k, v = (jnp.repeat(x, 2, axis=0) for x in draw(rng, heads))
    on = on_mesh(mesh, "tensor" if "model" in mesh else "batch")
    whole = partial(attend_whole_rows, scale=0.3, window=4, implementation="gpu interpret")
    got = jax.jit(partial(whole, on=on))(q, k, v)
    assert rms(got, whole(q, k, v)) < 1e-6
    assert got.addressable_shards[0].data.size * on.mesh.size == got.size


def test_what_cudnn_cannot_take_says_why(rng):
    q, k, v = draw(rng)
    with pytest.raises(NotImplementedError, match=r"cuDNN is not detected.*this runs on cpu"):
        attend_whole_rows(q, k, v, scale=1.0, implementation="gpu")
    with pytest.raises(NotImplementedError, match=r"q, k and v of float32, .* expected bfloat16 or float16"):
        single = [x.astype(jnp.float32) for x in (q, k, v)]
        attend_whole_rows(*single, scale=1.0, implementation="gpu interpret")
    with pytest.raises(NotImplementedError, match=r"expected one length and width"):
        attend_whole_rows(q, k, v[..., :8], scale=1.0, implementation="gpu interpret")
    assert not can_run(q, k, v, None)


@pytest.fixture
def made(monkeypatch):
    """Has layers make the call wherever a GPU would; the shapes of the queries that did."""
    calls = []

    def able(q, k, v, window, implementation=None, on=None):
        return implementation is None and not whole_rows.refusal(q, k, v)

    def call(q, k, v, **options):
        calls.append(q.shape)
        return attend_whole_rows(q, k, v, **options, implementation="gpu interpret")

    monkeypatch.setattr(attending, "kernels_may_run", lambda implementation: implementation is None)
    monkeypatch.setattr(attending, "can_run", able)
    monkeypatch.setattr(attending, "attend_whole_rows", call)
    return calls


def config(**changes):
    base = dict(vocab=64, d_model=32, layers=1, heads=4, kv_heads=2, head_dim=8, d_ff=48, max_positions=128)
    return Config(**base | changes)


def model(shape):
    return Model(shape, jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(shape, jax.random.key(0))))


LATENT = Latent(rank=16, rope_dim=4, nope_dim=8, value_dim=12)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(config(), marks=pytest.mark.rotating, id="grouped"),
        pytest.param(config(windows=(5,)), id="window"),
        pytest.param(config(mixers=(LATENT,)), marks=pytest.mark.rotating, id="latent"),
    ],
)
def test_a_model_trains_as_by_strips(shape, made, monkeypatch, rng):
    weights = model(shape).params
    tokens = jnp.asarray(rng.integers(1, 64, (2, T)), jnp.int32)

    def slopes(weights):
        def loss(weights):
            return -jax.nn.log_softmax(forward(weights, tokens, shape).astype(jnp.float32))[..., 3].mean()

        return jax.value_and_grad(loss)(weights)

    with jax.numpy_dtype_promotion("standard"):  # the gradient of jax's own form needs it
        got = jax.jit(slopes)(weights)
    assert made
    monkeypatch.setattr(attending, "can_run", lambda *x: False)
    want = jax.jit(lambda weights: slopes(weights))(weights)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rms(x, y) < 3e-2


def test_a_softcap_is_attended_to_in_strips(made):
    shape = config(attention_softcap=20.0)
    jax.eval_shape(lambda x: forward(model(shape).params, x, shape), jnp.zeros((1, T), jnp.int32))
    assert not made


def test_texts_of_one_row_are_kept_apart_by_strips(made, rng):
    shape = config()
    tokens = jnp.asarray(rng.integers(1, 64, (1, T)), jnp.int32)
    segments = jnp.asarray([[0] * 4 + [1] * 5])
    jax.eval_shape(lambda x: forward(model(shape).params, x, shape, segments=segments), tokens)
    assert not made


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [
        pytest.param("snapkv", dict(budget=0.5, window=7), True, marks=pytest.mark.rotating),
        ("h2o", dict(budget=0.5), False),
        pytest.param("full", {}, True, marks=pytest.mark.rotating),
        pytest.param("streamingllm", dict(budget=0.5), True, marks=pytest.mark.rotating),
    ],
)
def test_prompts_of_unlike_lengths_are_read_as_by_strips(name, options, calls, made, monkeypatch, rng):
    prompts = [rng.integers(1, 64, n).tolist() for n in (40, 29)]
    method = kvjax.method(name, **options)
    of = model(config(max_positions=200 + len(name)))  # a program of its own
    got, cache = kvjax.prefill(of, prompts, method=method, room=4)
    assert bool(made) == calls
    count = len(made)
    kvjax.prefill(of, prompts, cache=cache, room=4)
    assert len(made) == count, "something stands before the new tokens"
    monkeypatch.setattr(attending, "can_run", lambda *x: False)
    # Programs are kept by the model's shape: another one has the strips' program made.
    want, other = kvjax.prefill(model(config(max_positions=129)), prompts, method=method, room=4)
    assert rms(got, want) < 3e-2 and kvjax.nbytes(cache) == kvjax.nbytes(other)
