"""Values that hold a share of the attention which codes of keys say, in host memory too."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from kvjax.grammar.kinds import AttentionSpec
from kvjax.ops.base import memory
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import Slots, host_nbytes, nbytes
from kvjax.store.affine import Affine
from tests.float64.codes import affine
from tests.float64.reads_by_index import hcattention
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import BY_LABEL, MAIN, B, off
from tests.read.test_persistent import model

HYPER = dict(mass=0.6, newest=3)
TOKENS = np.random.default_rng(7).integers(0, 64, (5, B))


def talked(method, m):
    """Logits of a prompt and of steps, and the cache after them."""
    logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=8)
    found = [logits]
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        found.append(logits)
    return np.stack(found), cache


def test_each_layer_reads_as_few_values_as_hold_the_mass():
    m, seen, rows = model(layers=2), [], []
    logits, _ = talked(kvjax.method("hcattention", budget=0.5, bits=8, group=16, **HYPER), m)
    for tokens in MAIN.first:
        attends = hcattention(lambda n: max(1, n // 2), code=affine(8, 16), seen=seen, **HYPER)
        prompt = Prompt(Decoder(m), tokens)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token, found in zip(TOKENS, logits[1:], strict=True):
        assert off(found, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 2e-3
    # The mass decides in some lists, and the budget in others.
    assert 0.05 < np.mean([read == old // 2 for read, old in seen]) < 0.95
    assert len({read for read, old in seen if old == 29}) > 1


@pytest.mark.rotating
def test_all_of_the_mass_is_attention_to_the_codes():
    m, more = model(layers=2), dict(bits=4, group=16, newest=3)
    codes = Method(store=Store(Affine(4, group=16), None, residual=3))
    (want, _), (got, _) = (
        talked(x, m) for x in (codes, kvjax.method("hcattention", budget=1.0, mass=1.0, **more))
    )
    assert off(got, want) < 1e-5


@pytest.mark.rotating
def test_values_in_host_memory_change_no_number():
    m, more = model(layers=2), dict(budget=0.25, bits=4, group=16, **HYPER)
    found = [talked(kvjax.method("hcattention", **more, **at), m) for at in ({}, dict(resident=0.0))]
    np.testing.assert_array_equal(found[0][0], found[1][0])
    cache = found[1][1]
    bodies = [g.bodies[0] for g in cache.groups]
    assert host_nbytes(cache) == (sum(nbytes(b.v) for b in bodies) if memory.offers_host() else 0)
    assert all(b.near.slots.capacity < b.capacity / 2 for b in bodies)


def test_a_mass_of_none_or_of_more_than_all_is_refused():
    for wrong in (0, 1.5):
        with pytest.raises(kvjax.InputError, match="hcattention: mass must be"):
            kvjax.method("hcattention", budget=0.5, mass=wrong)


@pytest.mark.parametrize("name", ["kcache", "top-theta"])
def test_values_that_are_channels_of_latents_are_left_out_as_stored_ones_are(name, rng):
    """What is not read gets its probability in the softmax and no value, whether or not values are stored."""
    k, q = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, 2, 1, 12, 8), (2, 4, 1, 8)))
    pos = jnp.broadcast_to(jnp.arange(12), (1, 2, 1, 12))
    stored = Slots(k, k[..., :6], pos)
    stored = dataclasses.replace(stored, sums={"values": k[..., :6].sum(3)})
    latents = dataclasses.replace(stored, v=None, shared=6)
    read, spec = BY_LABEL[name].method().read, AttentionSpec(scale=0.3, softcap=None, rope=Rope())
    chosen = jnp.tile(jnp.asarray([2, 5, 9]), (2, 1, 1)), jnp.asarray([[3], [2]])
    found = [read.rest(q, x, x, 0, chosen, jnp.zeros((2, 4, 1)), spec) for x in (stored, latents)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    s = 0.3 * np.einsum("bnth,bksh->bns", np.asarray(q, float), np.asarray(k[0], float))
    unread = np.array([[i not in at for i in range(12)] for at in ([2, 5, 9], [2, 5])])
    want = np.log(np.where(unread[:, None], np.exp(s), 0).sum(-1))
    np.testing.assert_allclose(found[1][1][..., 0], want, rtol=1e-5)
    assert found[1][0].shape == (2, 4, 1, 6)
