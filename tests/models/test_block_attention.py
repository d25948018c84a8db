"""Queries that pick blocks of tokens: MoBA's layer by its equations, whole texts, steps and under methods."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import attending_picked
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.picked_blocks import PickedBlocks
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.picking_blocks import BlockPicking
from kvjax.ops.attention.union import Keys
from tests.float64.reference import Decoder, rope
from tests.models.architectures import with_layers

BLOCK, TOP = 4, 3
CONFIG = with_layers(PickedBlocks(block=BLOCK, top=TOP), PickedBlocks(block=BLOCK, top=TOP), mlps=())
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return Model(CONFIG, init(CONFIG, jax.random.key(1)))


def moba(q, k, v, block, top):
    """Equations 2 to 6 in float64, token by token: q [T, N, H], k and v [T, K, H], rotated."""
    t, n, h = q.shape
    out, group = np.zeros_like(q), n // k.shape[1]
    for i, a in np.ndindex(t, n):
        keys, values = k[:, a // group], v[:, a // group]
        own = i // block
        gate = [q[i, a] @ keys[b * block : (b + 1) * block].mean(0) for b in range(own)]
        chosen = {own, *np.argsort(-np.array(gate), kind="stable")[: top - 1]}
        seen = np.array([j for j in range(i + 1) if j // block in chosen])
        s = keys[seen] @ q[i, a] / np.sqrt(h)
        p = np.exp(s - s.max())
        out[i, a] = p / p.sum() @ values[seen]
    return out


def test_layers_attend_to_the_blocks_of_the_papers_equations(model):
    sharp = [{n: 3 * w if n in "qk" else w for n, w in layer.items()} for layer in model.params["layers"]]
    made = Model(CONFIG, {**model.params, "layers": tuple(sharp)})
    decoder = Decoder(made)
    x, theta = decoder.rest["embed"][TOKENS[0]], CONFIG.rope.theta
    for layer in decoder.layers:
        q, k, v = decoder.project(layer, x)
        q, k = (rope(y, range(40), theta) for y in (q, k))
        out = moba(*(y.swapaxes(0, 1) for y in (q, k, v)), BLOCK, TOP)
        x = decoder.finish(layer, x, out.swapaxes(0, 1))
    np.testing.assert_allclose(made(TOKENS[:1])[0], decoder.logits(x), atol=2e-5)
    dense = Model(with_layers(Attention(), Attention(), mlps=()), made.params)(TOKENS[:1])
    assert np.abs(np.asarray(dense)[0] - decoder.logits(x)).max() > 1e-2


@pytest.mark.rotating
def test_blocks_are_those_of_positions_in_any_order_and_of_what_is_left_of_them():
    rng = np.random.default_rng(3)
    pos = np.array([[9, 4, -1, 1], [0, 21, 20, 5]], np.int32)
    k, q = rng.normal(size=(1, 2, 4, 6)), rng.normal(size=(1, 4, 1, 6))
    parts = [slice(0, 1), slice(1, 4)]
    sets = [Keys(*(jnp.asarray(k[:, :, s], jnp.float32),) * 2, jnp.asarray(pos[None, :, s])) for s in parts]
    seen, _ = BlockPicking(4, 2).pick(jnp.asarray(q, jnp.float32), sets, jnp.asarray([[22]]))
    found = np.concatenate([np.asarray(s) for s in seen], -1)[0, :, 0]
    for head in range(4):
        at, keys = pos[head // 2], k[0, head // 2]
        earlier = {b: keys[at // 4 == b].mean(0) for b in {*(at[at >= 0] // 4)} - {5}}
        best = max(earlier, key=lambda b: q[0, head, 0] @ earlier[b])
        assert found[head].tolist() == [p >= 0 and p // 4 in (best, 5) for p in at]


@pytest.mark.rotating
def test_queries_some_at_a_time_attend_as_all_at_once(model, monkeypatch):
    whole = np.asarray(model(TOKENS))
    monkeypatch.setattr(attending_picked, "QUERIES", 16)
    jax.clear_caches()
    np.testing.assert_allclose(model(TOKENS), whole, atol=1e-5)
    jax.clear_caches()


# Slots in order, in pages of unequal lists, as codes and with keys that turn when they are read.
@pytest.mark.rotating
@pytest.mark.parametrize("method", ["full", "adakv(budget=64)", "streamingllm(budget=64)", "h2o(budget=64)"])
def test_steps_pick_what_one_pass_does(method, model):
    whole = np.asarray(model(TOKENS))
    logits, cache = kvjax.prefill(model, TOKENS[:, :30], method=method, room=10)
    np.testing.assert_allclose(logits, whole[:, 29], atol=1e-4)
    for t in range(30, 34):
        logits, cache = kvjax.step(model, cache, TOKENS[:, t])
        np.testing.assert_allclose(logits, whole[:, t], atol=1e-4)


@pytest.mark.parametrize(
    ("word", "windows", "message"),
    [
        (dict(sink=True), (), "leave sink out"),
        (dict(source=0), (), "leave source out"),
        (dict(top=0), (), "top"),
        (dict(), (4, 4), "give it no window"),
    ],
)
def test_what_does_not_fit_a_layer_that_picks_blocks_is_refused(word, windows, message):
    with pytest.raises(ValueError, match=message):
        with_layers(Attention(), PickedBlocks(**word), windows=windows)
