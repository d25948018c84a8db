"""Kernels on a machine with several devices run over arrays that lie on one of them, and over no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base import dispatch
from kvjax.ops.base.dispatch import alone
from kvjax.ops.decode.stacked_decode import stacked_decode
from kvjax.pure import static

MANY = jax.make_mesh((2,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
ONE = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[3:4])
# Where arrays lie, and whether one device sees them whole.
PLACES = {
    "nowhere in particular": (None, True),
    "another device": (jax.sharding.SingleDeviceSharding(jax.devices()[5]), True),
    "a mesh of one device": (jax.NamedSharding(ONE, jax.P("rows")), True),
    "split over a mesh": (jax.NamedSharding(MANY, jax.P("rows")), False),
    "copied over a mesh": (jax.NamedSharding(MANY, jax.P()), False),
}
places = pytest.mark.parametrize(("place", "whole"), PLACES.values(), ids=PLACES)


def put(tree, place):
    return tree if place is None else jax.device_put(tree, place)


def kernels(jaxpr):
    """How many kernels a program calls."""
    return str(jaxpr).count("pallas_call")


@pytest.fixture
def tpu(monkeypatch):
    """Traces choose as on a TPU; what they choose is looked at, and never runs."""
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")


@places
def test_an_array_is_alone_where_one_device_sees_it_whole(place, whole):
    x = put(jnp.ones((2, 8)), place)
    assert alone(x) == whole and alone({"of": (jnp.ones(3), x)}, 1.0) == whole
    seen = []

    def late(x):
        seen.extend([alone(x), alone((x @ jnp.ones((8, 4))).sum()), alone(jnp.ones(3), x[:1])])
        return jax.lax.scan(lambda c, row: (c, seen.append(alone(c)) or alone(row)), x, x)[0]

    jax.jit(late)(x)
    assert seen == [whole] * len(seen) and len(seen) >= 4


def test_within_shard_map_what_was_spread_is_alone():
    seen, rows = [], jax.P("rows")
    look = jax.shard_map(
        lambda x: (seen.append(alone(2 * x)), x)[1], mesh=MANY, in_specs=rows, out_specs=rows
    )
    look(put(jnp.ones((2, 8)), jax.NamedSharding(MANY, rows)))
    assert seen == [True]


@places
def test_an_operation_takes_its_kernel_over_arrays_of_one_device(tpu, place, whole):
    q, k = jnp.zeros((2, 4, 1, 128)), put(k := jnp.ones((1, 2, 2, 64, 128)), rows_second(k, place))
    pos = jnp.zeros((2, 1), jnp.int32)
    traced = jax.make_jaxpr(lambda q, k: stacked_decode(q, k, k, pos[:, 0] + 1, pos, 0, scale=1.0))(q, k)
    assert kernels(traced) == int(whole)


CONFIG = Config(vocab=16, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=128, d_ff=16)


@pytest.mark.rotating
@places
def test_prompts_and_steps_take_kernels_over_arrays_of_one_device(tpu, place, whole):
    """The cache alone lies elsewhere: that is enough. In a user's own jit it is the same."""
    m = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    tokens, lengths = jnp.zeros((2, 128), jnp.int32), jnp.full(2, 128, jnp.int32)
    how = static(m)
    prompt = jax.make_jaxpr(lambda params: kvjax.pure.prefill(how, params, tokens, lengths, room=8))
    assert kernels(prompt(put(m.params, None if place is None else replicated(place)))) == whole * 2
    cache = jax.eval_shape(lambda: kvjax.pure.prefill(how, m.params, tokens, lengths, room=8)[1])
    cache = jax.tree.map(lambda x: put(jnp.zeros(x.shape, x.dtype), rows_second(x, place)), cache)

    def twice(params, cache):
        def body(cache, token):
            logits, cache = kvjax.pure.step(how, params, cache, token)
            return cache, logits

        return jax.lax.scan(body, cache, tokens[:, :2].T)

    traced = jax.make_jaxpr(jax.jit(twice))(m.params, cache)
    assert kernels(traced) == whole * 2


def replicated(place):
    return jax.NamedSharding(place.mesh, jax.P()) if isinstance(place, jax.NamedSharding) else place


def rows_second(x, place):
    """Choose the place for arrays of a cache, whose rows are the second axis."""
    if not isinstance(place, jax.NamedSharding) or x.ndim < 2:
        return None if place is None else replicated(place)
    return jax.NamedSharding(place.mesh, jax.P(None, *place.spec))


@pytest.mark.rotating
def test_a_forced_kernel_gives_the_same_numbers_on_another_device():
    """The kernel's program, interpreted, for a user who says nothing of devices on a machine with eight."""
    m = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    _, cache = kvjax.prefill(m, [[1, 2, 3]], room=112)
    far = dataclasses.replace(jax.device_put(cache, jax.devices()[6]), spare=cache.spare)
    moved = Model(CONFIG, jax.device_put(m.params, jax.devices()[6]))
    want, _ = kvjax.step(m, cache, [5], append=False)
    got, new = kvjax.step(moved, far, [5], append=False, implementation="tpu interpret")
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert new.next.devices() == {jax.devices()[6]}
