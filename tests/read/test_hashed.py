"""Slots that query heads draw by hash tables, and the centre that their codes are made about."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import layout_class
from kvjax.compress.unread import unread_bytes
from kvjax.grammar import Budget, Method
from kvjax.grammar.read_kinds import EstimatingRest, Learning, Read, Sampling
from kvjax.read.channels import LargestChannels
from kvjax.read.hashed import HashSampling
from kvjax.state.cache import Slots, nbytes
from kvjax.steps import Run
from tests.float64.reads import chances, drawn_by, normals
from tests.methods.battery import MAIN, ROOM, B, model, off, step
from tests.models import conversation
from tests.sweep import sweep

HASH = dict(planes=3, tables=4, sinks=2)
HYPER = HASH | dict(newest=4, skip_layers=0)
METHOD = kvjax.method("magicpig", budget=0.5, **HYPER)
# Nearly all slots collide, so that their chance is 1: full attention.
ALL = kvjax.method("magicpig", budget=1.0, **HYPER | dict(planes=1, tables=256))
ROWS, HEADS, GROUP, S, H = 300, 2, 3, 20, 8


def held(word, rng, rows=ROWS):
    """Draw queries, and rows of one body, whose last five slots are empty and whose first two are sinks."""
    k, q = rng.normal(size=(HEADS, S, H)) + 1.0, rng.normal(size=(HEADS * GROUP, 1, H))
    pos = np.where(np.arange(S) < 15, np.arange(S), -1)
    k, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (rows, *x.shape)) for x in (k, q))
    pos = jnp.broadcast_to(jnp.asarray(pos, jnp.int32), (rows, HEADS, S))
    learnt = word.learn(k, pos)
    summary = word.summarise(k, learnt)
    body = jax.tree.map(lambda x: x[None], Slots(k, k, pos, summary=summary, sums=learnt))
    return q, body


def by_hand(q, body, h, planes, tables):
    """Of list h of the first row: who draws which slots [G, S], and how likely that is, in float64."""
    k = np.asarray(body.k, np.float64)[0, 0, h]
    k = k - k[2:15].mean(0)
    mine = np.asarray(q, np.float64)[0, h * GROUP : (h + 1) * GROUP, 0]
    drawn = drawn_by(mine, k, normals(H, planes=planes, tables=tables))
    pos = np.asarray(body.pos)[0, 0, h]
    return drawn & (pos >= 2), chances(mine, k, planes=planes, tables=tables)


def sampled(word, q, body, length):
    found = jax.jit(lambda q, body, length: word.sample(q, body, 0, length))(q, body, jnp.asarray(length))
    return [np.asarray(x) for x in found]


@pytest.mark.rotating
def test_heads_draw_the_slots_that_collide_and_know_how_likely_that_was(rng):
    word = HashSampling(Budget(1.0), **HASH)
    q, body = held(word, rng, rows=1)
    mean = np.asarray(body.k)[0, 0, :, 2:15].mean(1)
    np.testing.assert_allclose(body.sums["centre"][0, 0], mean, atol=1e-6)
    slots, counts, bias = sampled(word, q, body, [19])
    assert slots.shape == (1, HEADS, S) and bias.shape == (1, HEADS * GROUP, S)
    for h in range(HEADS):
        drawn, u = by_hand(q, body, h, 3, 4)
        visited = slots[0, h, : counts[0, h]]
        assert set(visited) == {0, 1} | set(np.flatnonzero(drawn.any(0)))
        want = np.where(drawn, -np.log(u), -np.inf)
        want[:, :2] = 0.0
        got = bias[0, h * GROUP : (h + 1) * GROUP, : counts[0, h]]
        np.testing.assert_allclose(got, want[:, visited], rtol=1e-4, atol=1e-4)
        # No head draws all that its group draws.
        assert drawn.any(0).sum() > drawn.sum(1).max() > 0


@pytest.mark.rotating
def test_where_more_collide_than_fit_some_are_chosen_by_chance_and_weigh_more(rng):
    """Over many tokens, what is drawn and visited weighs in the mean as much as what is drawn."""
    word = HashSampling(Budget(3), **HASH)
    q, body = held(word, rng)
    slots, counts, bias = sampled(word, q, body, np.arange(ROWS))
    assert slots.shape[-1] == 5 and (counts == 5).all()
    for h in range(HEADS):
        drawn, u = by_hand(q, body, h, 3, 4)
        assert drawn.any(0).sum() > 3
        weights = np.zeros((ROWS, GROUP, S))
        for g in range(GROUP):
            np.put_along_axis(weights[:, g], slots[:, h], np.exp(bias[:, h * GROUP + g]), -1)
        want = np.where(drawn, 1 / u, 0.0)
        want[:, :2] = 1.0
        error = weights.std(0) / np.sqrt(ROWS)
        assert (np.abs(weights.mean(0) - want) <= 4 * error + 1e-4).all()
        # Tokens do not all visit the same ones.
        assert len({tuple(sorted(row)) for row in slots[:, h]}) > 3


def bodies(cache):
    return [body for group in cache.groups for body in group.bodies]


def mean_keys(body, sinks=2):
    """Average every list's keys behind the sinks; 0 where there are none."""
    hashed = (np.asarray(body.pos) >= sinks)[..., None]
    return np.where(hashed, body.keys().k, 0.0).sum(3) / np.maximum(hashed.sum(3), 1)


def hashed_about_their_centres(cache):
    """Whether codes are those of the stored keys about the centre that is held."""
    word = cache.method.read
    for body in bodies(cache):
        again = word.summarise(body.keys().k, body.sums)["codes"]
        differ = (again != body.summary["codes"]).any(-1)
        if np.asarray(differ & (body.pos >= 0)).any():
            return False
    return True


@pytest.mark.rotating
@pytest.mark.parametrize("store", sweep([None, "int8"], None))
def test_a_prompt_is_centred_and_steps_hash_new_keys_about_that(store):
    m, method = model("4/2"), METHOD if store is None else kvjax.chain(METHOD, kvjax.method(store))
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    assert hashed_about_their_centres(cache)
    centres = [np.asarray(body.sums["centre"]) for body in bodies(cache)]
    for mine, body in zip(centres, bodies(cache), strict=True):
        np.testing.assert_allclose(mine, mean_keys(body), atol=1e-5)
    stored = [(np.asarray(body.pos) >= 0).sum() for body in bodies(cache)]
    for token in MAIN.steps:
        cache = step(m, cache, token, append=True)[1]
    assert hashed_about_their_centres(cache)
    for mine, body, before in zip(centres, bodies(cache), stored, strict=True):
        np.testing.assert_array_equal(body.sums["centre"], mine)
        assert (np.asarray(body.pos) >= 0).sum() > before


@pytest.mark.rotating
def test_a_turn_centres_the_rows_that_it_gives_tokens_and_leaves_others_as_they_are():
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=ROOM)
    for token in MAIN.steps:
        cache = step(m, cache, token, append=True)[1]
    before = [np.asarray(body.sums["centre"]) for body in bodies(cache)]
    run, tokens = Run(m.config, METHOD), jnp.asarray(MAIN.steps.T, jnp.int32)
    given, bare = jnp.asarray([3, 0, 2, 3]), dataclasses.replace(cache, method=None)
    _, after = steps.prefill(run, m.params, tokens, given, bare, tokens_bound=48, room=8, compress=True)
    assert hashed_about_their_centres(dataclasses.replace(after, method=METHOD))
    others = np.asarray([0, 2, 3])
    for mine, body in zip(before, bodies(after), strict=True):
        centre = np.asarray(body.sums["centre"])
        np.testing.assert_array_equal(centre[:, 1], mine[:, 1])
        np.testing.assert_allclose(centre[:, others], mean_keys(body)[:, others], atol=1e-5)
        assert (centre[:, others] != mine[:, others]).any()


@pytest.mark.rotating
def test_a_row_that_is_emptied_and_filled_again_answers_like_a_new_one():
    m = model("4/2")
    _, fresh = kvjax.prefill(m, MAIN.first, method=METHOD, room=ROOM)
    want, _ = step(m, fresh, MAIN.steps[0], append=True)
    emptied = kvjax.reset_rows(fresh, [True, *[False] * (B - 1)])
    assert all((np.asarray(body.sums["centre"])[:, 0] == 0).all() for body in bodies(emptied))
    _, cache = kvjax.prefill(m, [MAIN.first[0], *[[1]] * (B - 1)], cache=emptied, room=8)
    got, _ = step(m, cache, MAIN.steps[0], append=True)
    assert off(got[0], want[0]) < 1e-5


@pytest.mark.rotating
def test_a_saved_cache_answers_as_before(tmp_path):
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=ROOM)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    want, _ = step(m, cache, MAIN.steps[0], append=True)
    got, _ = step(m, kvjax.load_cache(tmp_path / "a.cache"), MAIN.steps[0], append=True)
    np.testing.assert_array_equal(got, want)


def test_what_a_step_reads_is_the_slots_there_is_room_for_and_all_codes():
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=kvjax.method("magicpig", budget=0.25, **HYPER), room=ROOM)
    slots, lists = len(MAIN.first[0]) + ROOM - 4, B * 2
    for gm, group in zip(Run(m.config, cache.method).groups(m.params), cache.groups, strict=True):
        (body,) = group.bodies
        assert nbytes(body.summary) == lists * slots * 4 and nbytes(body.sums) == lists * 16 * 4
        assert unread_bytes(gm, group) == lists * (slots - slots // 4 - 2) * 2 * 16 * 4


CHAINS = {
    "snapkv": kvjax.method("snapkv", budget=0.75, window=4, kernel=3),
    "int8": kvjax.method("int8"),
    "int4": kvjax.method("int4", group=8),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", CHAINS)
def test_with_a_chance_of_one_a_chain_answers_as_without_sampling(name):
    m, found = model("4/2"), []
    for method in (CHAINS[name], kvjax.chain(CHAINS[name], ALL)):
        _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
        found.append(step(m, cache, MAIN.steps[0], append=False)[0])
    # Of codes, the tail is not encoded.
    assert off(found[1], found[0]) < (1e-5 if name == "snapkv" else 0.2)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["mla", "sinks", "lckv", "mixattention"])
def test_with_a_chance_of_one_other_layers_answer_as_with_a_full_cache(name):
    texts, found = conversation.TEXTS, []
    for method in (Method(), ALL):
        _, cache = kvjax.prefill(conversation.model(name), texts[:2, :13], method=method, room=8)
        found.append(kvjax.step(conversation.model(name), cache, texts[:2, 13])[0])
    conversation.close(found[1], found[0])


@pytest.mark.rotating
def test_half_precision_stays_near_the_full_one():
    m, found = model("4/2"), []
    half = dataclasses.replace(m, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params))
    for one in (m, half):
        _, cache = kvjax.prefill(one, MAIN.first, method=ALL, room=ROOM)
        (body,) = cache.groups[0].bodies
        assert body.sums["centre"].dtype == jnp.float32
        found.append(kvjax.step(one, cache, MAIN.steps[0])[0].astype(jnp.float32))
    assert body.k.dtype == jnp.bfloat16 and off(found[1], found[0]) < 0.1


def test_what_the_method_cannot_do_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="a key is rotated by its position for all queries"):
        kvjax.chain(kvjax.method("streamingllm", budget=0.5), METHOD)
    with pytest.raises(ValueError, match="4 tables of 33 hyperplanes were given"):
        HashSampling(Budget(0.5), planes=33, tables=4)
    with pytest.raises(InputError, match="weighs more than its probability, which layers clip"):
        kvjax.prefill(
            conversation.model("clipped softmax"), conversation.TEXTS[:2, :13], method=METHOD, room=8
        )
    m = model("4/2")
    _, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=ROOM)
    with pytest.raises(InputError, match="layer 0 has sums over the slots of its body"):
        kvjax.rollback(cache, [len(row) for row in MAIN.first])


def test_words_and_layouts_say_that_slots_are_sampled():
    word = HashSampling(Budget(0.5), skip_layers=0)
    assert all(isinstance(word, kind) for kind in (Read, Sampling, Learning)) and not isinstance(
        word, EstimatingRest
    )
    assert not isinstance(LargestChannels(Budget(0.5)), Sampling | Learning)
    assert str(layout_class(Method(read=word))) == "dense, kv heads, evicts never, reads samples"
