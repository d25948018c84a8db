"""Reads over rewritten models that store latents: pages are ranked by the keys that are computed of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.compress.computed_keys import ComputedKeys
from kvjax.grammar import Method
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.make.stored_inputs import StoredInputs
from kvjax.models.config import Config
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.mixers.key_as_value import KeyAsValue
from kvjax.ops.base.rope import Rope
from kvjax.read.pages import PageBounds
from kvjax.state.cache import Slots
from kvjax.words import Budget
from tests.float64.reference import rope
from tests.methods.battery import model
from tests.methods.method_pairs import PROMPTS, STEPS, answers, apart
from tests.sweep import sweep

# Every channel of every KV head: the rewritten models answer as the one that they are made of.
WHOLE = {
    "palu": Method(make=GroupedLowRank(1.0, heads=1)),
    "kvpruner": kvjax.method("kvpruner", keep=1.0),
}
READS = {
    "quest": dict(page=4, skip_layers=0),
    "moba": dict(page=4),
    "tokenselect": dict(sinks=2, newest=4),
    "recycled-attention": dict(stride=2),
    "sparq": dict(newest=4),
}


def read(name, budget=0.5):
    return kvjax.method(name, budget=budget, **READS[name])


# What several KV heads share: latents of low rank, or the inputs of layers, of which no values are stored.
SHARED = {
    "palu": kvjax.method("palu", rank=0.5, heads=2),
    "inputs": Method(make=StoredInputs()),
}
TOGETHER = [(name, make) for name in READS for make in SHARED if (name, make) != ("sparq", "inputs")]
PAIRS = [(name, make) for name in READS for make in WHOLE]


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "make"), sweep(PAIRS, ("quest", "palu")))
def test_a_read_of_latents_reads_what_it_reads_of_the_keys(name, make):
    got, want = answers(kvjax.chain(WHOLE[make], read(name)))[0], answers(read(name))[0]
    assert apart(got, want) < 1e-5
    assert apart(answers(kvjax.method("full"))[0], want) > 1e-3


@pytest.mark.rotating
@pytest.mark.parametrize(("name", "make"), sweep(TOGETHER, ("quest", "palu")))
def test_a_read_of_all_pages_of_what_two_heads_share_is_no_read(name, make):
    one = SHARED[make]
    assert apart(answers(kvjax.chain(one, read(name, 1.0)))[0], answers(one)[0]) < 1e-5
    assert apart(answers(kvjax.chain(one, read(name)))[0], answers(one)[0]) > 1e-3


def test_pages_of_latents_of_two_heads_have_the_largest_bound_of_their_query_heads(rng):
    """In float64: two lists of latents, of two KV heads each, with two query heads each."""
    lists, each, rank, h, page, pages = 2, 2, 5, 8, 4, 6
    config = Config(
        vocab=8, d_model=16, layers=1, heads=8, kv_heads=4, head_dim=h, d_ff=8, rope=Rope(theta=50.0)
    )
    computed = ComputedKeys(GroupedLatent(each, rank, rank), config, None, each)
    latents, up = rng.normal(size=(lists, page * pages, rank)), rng.normal(size=(lists, rank, each * h))
    pos = np.stack([np.sort(rng.choice(80, page * pages, replace=False)) for _ in range(lists)])
    q = rng.normal(size=(8, h))
    word = PageBounds(Budget(2 * page), page=page)

    def select(latents, up, q):
        k = computed.keys({"k_up": up[None]}, latents[None, None], jnp.asarray(pos)[None, None])
        body = Slots(k, k, jnp.asarray(pos)[None, None], summary=word.summarise(k))
        return word.select(computed.queries(q[None, :, None], lists), body, 0, jnp.asarray([80]))

    found, counts = jax.jit(select)(*(jnp.asarray(x, jnp.float32) for x in (latents, up, q)))
    assert counts.tolist() == [[2, 2]]
    for i in range(lists):
        keys = np.split(latents[i] @ up[i], each, -1)
        bounds = []
        for n in range(4):
            k = rope(keys[n // 2], pos[i], 50.0).reshape(pages, page, h)
            ask = q[4 * i + n]
            bounds.append(np.maximum(ask * k.min(1), ask * k.max(1)).sum(-1))
        want = np.argsort(-np.max(bounds, 0))[:2]
        assert sorted(found[0, i].tolist()) == sorted(want.tolist())


@pytest.mark.rotating
def test_pages_of_unequal_heads_are_ranked_by_computed_keys_too():
    """Heads of unequal budgets lie in the pages of a pool, which are summarised once, at the end."""
    keep = kvjax.method("adakv", budget=0.5, window=4, page=4)
    one = kvjax.chain(keep, read("quest"))
    assert apart(answers(kvjax.chain(WHOLE["palu"], one))[0], answers(one)[0]) < 1e-5
    assert apart(answers(keep)[0], answers(one)[0]) > 1e-3


def test_a_sum_of_values_needs_values_that_are_stored():
    with pytest.raises(kvjax.InputError, match=r"the model stores factors, and the method scores"):
        answers(kvjax.chain(SHARED["inputs"], read("sparq")))


def test_a_read_that_learns_or_copies_needs_the_keys_themselves():
    palu = kvjax.method("palu", rank=0.5)
    for name in ("clusterkv", "specache"):
        with pytest.raises(ValueError, match=r"compares queries with stored keys, .* stores latents"):
            kvjax.chain(palu, kvjax.method(name, budget=0.5))


@pytest.mark.rotating
def test_layers_of_a_stack_compute_keys_by_their_own_weights():
    method = kvjax.chain(SHARED["palu"], read("quest"))
    said = []
    for m in (model("4/2"), model("4/2").in_runs()):
        logits, cache = kvjax.prefill(m, PROMPTS, method=method, room=len(STEPS))
        found = [logits]
        for tokens in STEPS:
            logits, cache = kvjax.step(m, cache, tokens)
            found.append(logits)
        said.append(np.stack(found))
    assert apart(said[1], said[0]) < 1e-5


def test_keys_that_are_values_are_ranked_as_attention_sees_them(rng):
    """In float64: v * w, rotated."""
    config = Config(
        vocab=8, d_model=16, layers=1, heads=4, kv_heads=2, head_dim=8, d_ff=8, qk_norm="head",
        rope=Rope(theta=50.0),
    )  # fmt: skip
    mixer = KeyAsValue(kv_heads=1, head_dim=6)
    computed = ComputedKeys(mixer, config, None, mixer.met_heads(config))
    values, weight, pos = rng.normal(size=(9, 6)), rng.normal(size=6), rng.choice(80, 9, replace=False)
    stored = jnp.asarray(values, jnp.float32)[None, None, None]
    got = computed.keys(
        {"k_norm": jnp.asarray(weight, jnp.float32)[None]}, stored, jnp.asarray(pos)[None, None, None]
    )
    np.testing.assert_allclose(got[0, 0, 0], rope(values * weight, pos, 50.0), rtol=1e-5, atol=1e-5)
