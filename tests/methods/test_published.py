"""Words compute what their authors' code computed; `scripts/fixtures/record_published.py` recorded it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import View
from kvjax.keep.algebra import Word, stage
from kvjax.keep.budgets.profile import ByProfile, Profile
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.merges.merge_counted import CountedMerge
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedDecayedMass, AccumulatedMass
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.drawn import GumbelTopK
from kvjax.keep.scores.keyformer import NoisyMass
from kvjax.methods import takes_budget
from kvjax.ops.attention.union import Keys, attend
from tests.float64.reference import softmax
from tests.keep.test_score import seen_by
from tests.methods.recorded import LENGTHS, kept_by_kvjax, model, numbers, prompt, tokens
from tests.sweep import sweep


@pytest.mark.rotating
@pytest.mark.parametrize(("budget", "tokens"), sweep([(24, 96), (24, 40), (48, 60), (16, 32)], (24, 40)))
def test_headkv_slots_are_those_of_the_authors_code(budget, tokens):
    """Where a head's share exceeds the prompt, of 40 and 60 tokens, the rest of it is lost."""
    recorded = numbers("headkv")
    want = recorded[f"slots/{budget}/{tokens}"]
    profile = recorded["profile"].astype(np.float32)
    word = ByProfile(Profile(Fitted({"importance": profile}, "Profile", "")), 8, 1.5, lost=True)
    layers, heads = profile.shape
    scores, n = jnp.zeros((layers, 1, heads, tokens)), jnp.array([budget], jnp.int32)
    found = word.counts(scores, n, jnp.asarray(profile)[:, None])
    np.testing.assert_array_equal(found[:, 0], want)
    shared = ByProfile(word.profile, 8, 1.5).counts(scores, n, jnp.asarray(profile)[:, None])
    assert int(shared.sum()) == layers * heads * budget >= want.sum()
    assert (int(shared.sum()) > want.sum()) == (tokens in (40, 60))


@pytest.mark.rotating
def test_keyformer_noise_has_the_spread_of_the_authors_code():
    """A draw per token alone would have four times the deviation: nothing averages it out."""
    recorded, q, k = numbers("keyformer"), prompt(3).q[0], prompt(3).k[0]
    at = jnp.arange(LENGTHS[3], dtype=jnp.int32)[None]
    queries, keys = (jnp.asarray(x, jnp.float32)[None] for x in (q, k))
    word = NoisyMass(1.0, 1.0)
    layers = jnp.arange(600, dtype=jnp.int32)
    drawn = np.asarray(jax.vmap(lambda i: word.of(queries, at, keys, at[:, None], i))(layers))[:, 0]
    group = lambda x: x.reshape(len(k), -1, x.shape[-1]).sum(1)  # noqa: E731
    mean, deviation = group(recorded["mean"]), np.sqrt(group(recorded["deviation"] ** 2))
    # Five standard errors of a mean, and a fifth of a deviation, of 600 draws.
    assert (np.abs(drawn.mean(0) - mean) < 5 * deviation * np.sqrt(1 / 600 + 1 / 2000) + 1e-6).all()
    np.testing.assert_allclose(drawn.std(0), deviation, rtol=0.2)


@dataclasses.dataclass(frozen=True)
class GivenSums(Word):
    """The sums of attention that NACL's authors' code was given."""

    def __call__(self, view, seen):
        return jnp.asarray(numbers("nacl")["sums"], jnp.float32)[None]


@pytest.mark.rotating
def test_nacl_draws_as_often_as_the_authors_code():
    """Of 40 tokens 8 by their sums and 8 by chance, beside 4 sinks and a window of 8."""
    recorded = numbers("nacl")
    heads, tokens = recorded["sums"].shape
    pos = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (1, heads, tokens))
    empty = jnp.zeros((1, heads, tokens, 1))
    view = View(empty, empty, pos, None, {})
    protect = (Sink(4), Recent(8))
    seen = seen_by(length=np.array([tokens]))._replace(n=jnp.array([28]), protect=protect)
    word = stage(GivenSums(), 0.5, GumbelTopK(GivenSums(), 1))
    scores = jax.vmap(lambda layer: word(view, seen._replace(layer=layer)))(jnp.arange(4000))
    stays = np.any([one(pos, seen.length, seen.n) for one in protect], 0)
    scores = np.where(stays, np.inf, scores)[:, 0]
    found = (np.argsort(np.argsort(-scores, -1), -1) < 28).mean(0)
    want = recorded["stays"]
    assert ((want > 0.05) & (want < 0.9)).sum() == 2 * (tokens - 4 - 8 - 8)
    spread = np.sqrt(want * (1 - want) * (1 / 4000 + 1 / recorded["draws"]))
    assert (np.abs(found - want) <= 5 * spread).all()


@pytest.mark.rotating
def test_zeromerge_keeps_the_heavy_hitters_of_the_authors_code():
    """Their residual slot is a mean; here it is the heavy hitter of the least attention."""
    found, recorded = kept_by_kvjax("zeromerge", dict(budget=0.5)), numbers("zeromerge")
    assert found.keys() == set(range(len(LENGTHS)))
    for row, layers in found.items():
        for layer, held in enumerate(layers):
            want = recorded[f"kept/{row}/{layer}"]
            assert (held & want).sum() == want.sum() == held.sum() - len(held)


def held_before() -> View:
    recorded = numbers("zeromerge")
    k, v, weight, score = (
        jnp.asarray(recorded[f"before/{name}"], jnp.float32) for name in ("k", "v", "weight", "score")
    )
    pos = jnp.broadcast_to(jnp.arange(k.shape[2], dtype=jnp.int32), k.shape[:3])
    return View(k, v, pos, 0.6 * jnp.log(weight), {key_of(AccumulatedDecayedMass(0.98)): score})


@pytest.mark.rotating
def test_zeromerge_merges_as_the_authors_code():
    """Mean by counts, the larger score, in the one slot that takes up."""
    view, recorded = held_before(), numbers("zeromerge")
    score = view.traces[key_of(AccumulatedDecayedMass(0.98))]
    leaves = 1 + jnp.argmin(score[..., 1:], -1, keepdims=True).astype(jnp.int32)
    kept = jnp.arange(12)[None, None] != leaves
    word = CountedMerge(takers=0.0, fading=0.98, bonus=0.6, largest=True)
    seen = seen_by()._replace(length=jnp.array([12]), n=jnp.array([11]))
    new = word(view, kept, leaves, seen)
    got = {
        "k": new.k,
        "v": new.v,
        "weight": jnp.exp(new.bias / 0.6),
        "score": new.traces[key_of(AccumulatedDecayedMass(0.98))],
    }
    for name, x in got.items():
        np.testing.assert_allclose(x[:, :, 0], recorded[f"after/{name}"], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(x[:, :, 1:], recorded[f"before/{name}"][:, :, 1:], rtol=2e-6)


def test_zeromerge_bonus_is_that_of_the_authors_code():
    view, recorded = held_before(), numbers("zeromerge")
    keys = Keys(view.k, view.v, view.pos, view.bias)
    out = attend(jnp.asarray(recorded["q"], jnp.float32), [keys], jnp.full((1, 1), 12), scale=8**-0.5)[0]
    np.testing.assert_allclose(out, recorded["attended"], rtol=2e-6)


@pytest.mark.rotating
def test_cam_merges_values_with_the_chance_of_the_authors_code():
    """Merges always where a token received more than later ones, and never where it received nothing."""
    recorded = numbers("cam")
    v, received = (jnp.asarray(recorded[name], jnp.float32) for name in ("before", "attention"))
    pos = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (1, 3, 12))
    word = ValueMerge(following=4)
    view = View(v, v, pos, None, {key_of(AccumulatedMass(Mass("sum"))): received})
    # What leaves stands in front of the recent tokens; those before it are gone.
    kept, leaves = pos > 3, jnp.full((1, 3, 1), 3, jnp.int32)
    merged = lambda layer: word(view, kept, leaves, seen_by()._replace(layer=layer)).v  # noqa: E731
    found = np.asarray(jax.vmap(merged)(jnp.arange(3000, dtype=jnp.int32)))[:, 0]
    before, after = recorded["before"][0], recorded["after"][0]
    merges = np.abs(found - before).max((-2, -1)) > 1e-6
    want = np.where(merges[..., None, None], after, before)
    np.testing.assert_allclose(found[:, :, 4:], want[:, :, 4:], rtol=2e-6, atol=1e-6)
    chance = np.clip(recorded["chance"][0], 0, 1)
    assert chance[0] == 1 and chance[1] == 0 and 0.2 < chance[2] < 0.98
    np.testing.assert_allclose(merges.mean(0), chance, atol=5 * 0.5 / np.sqrt(3000))
    assert merges[:, 0].all() and not merges[:, 1].any()


def cam_of_the_newest_query(v, attention, leaves):
    """Find a merge's chance and values after it, as in the authors' utils_hh/modify_llama_cam.py (fc80e64).

    attention [H, T] is that of the newest query; slot `leaves` is compared with the mean of all newer ones,
    and each of the next 32 gets a 32nd of its value.
    """
    chance = np.clip(attention[:, leaves] / attention[:, leaves + 1 :].mean(-1), 0, 1)
    after = v.copy()
    after[:, leaves + 1 : leaves + 33] += v[:, leaves, None] / 32
    return chance, after


@pytest.mark.rotating
@pytest.mark.parametrize("newer", [9, 40])
def test_cam_by_the_newest_query_is_the_authors_other_form(newer):
    rng, leaves, draws = np.random.default_rng(0), 3, 3000
    slots = leaves + 1 + newer
    v, attention = rng.normal(size=(3, slots, 6)), rng.uniform(0.2, 1, (3, slots))
    attention[:, leaves] = 2.0, 0.0, 0.3
    chance, after = cam_of_the_newest_query(v, attention, leaves)
    assert chance[0] == 1 and chance[1] == 0 and 0.2 < chance[2] < 0.98
    # In any order, as slots lie in a cache; those before the one that leaves have left.
    order = rng.permutation(slots)
    pos = jnp.broadcast_to(jnp.asarray(order, jnp.int32), (1, 3, slots))
    values = jnp.asarray(v[None, :, order], jnp.float32)
    word, kept = ValueMerge(following=32, newest=True), pos > leaves
    observed = {key_of(Mass("sum")): jnp.asarray(attention[None, :, order], jnp.float32)}
    index = jnp.full((1, 3, 1), int(np.flatnonzero(order == leaves)[0]), jnp.int32)
    view = View(values, values, pos, None, {})
    merged = lambda layer: word(view, kept, index, seen_by()._replace(layer=layer, observed=observed)).v  # noqa: E731
    found = np.asarray(jax.vmap(merged)(jnp.arange(draws, dtype=jnp.int32)))[:, 0][:, :, np.argsort(order)]
    merges = np.abs(found - v).max((-2, -1)) > 1e-4
    want = np.where(merges[..., None, None], after, v)
    np.testing.assert_allclose(found[:, :, leaves + 1 :], want[:, :, leaves + 1 :], atol=2e-6)
    np.testing.assert_allclose(merges.mean(0), chance, atol=5 * 0.5 / np.sqrt(draws))
    assert merges[:, 0].all() and not merges[:, 1].any()


@pytest.mark.rotating
def test_roco_read_token_by_token_is_easykv_s_stream():
    """Written from easykv.py (a1d71ca), stride 1: a token attends, then one leaves a list beyond its budget.

    In the first layer, whose queries and keys do not depend on what has left.
    """
    row, n, newest, sinks, steady = 3, 12, 2, 1, 0.5
    text, held = prompt(row), []
    for head, k in enumerate(text.k[0]):
        q = text.q[0].reshape(len(text.k[0]), -1, *text.q[0].shape[1:])[head]
        slots, total, squares = [], np.zeros(text.length), np.zeros(text.length)
        for t in range(text.length):
            slots.append(t)
            p = softmax(q[:, t] @ k[slots].T / np.sqrt(k.shape[-1]))
            total[slots] += p.mean(0)
            squares[slots] += (p**2).mean(0)
            if len(slots) > n:
                at = np.array(slots)
                mean, square = total[at] / (t + 1 - at), squares[at] / (t + 1 - at)
                spread = np.sqrt(np.maximum(square - mean**2, 0))
                spread[(at < sinks) | (at > t - newest)] = np.inf
                able = np.argsort(spread, kind="stable")[: len(at) - int(n * steady)]
                slots.remove(at[able[np.argmin(mean[able])]])
        held.append(set(slots))
    method = kvjax.method("roco", budget=n, newest=newest, sinks=sinks, steady=steady)
    _, cache = kvjax.prefill(model(), [tokens()[row]], method=method, chunk=1)
    first = np.asarray(kvjax.kept_positions(cache)[0])[0]
    assert [set(pos[pos >= 0].tolist()) for pos in first] == held
    _, whole = kvjax.prefill(model(), [tokens()[row]], method=method)
    cut = np.asarray(kvjax.kept_positions(whole)[0])[0]
    assert [set(pos[pos >= 0].tolist()) for pos in cut] != held


@pytest.mark.rotating
def test_l2compress_in_steps_lets_the_largest_key_go_after_every_token():
    """In the first layer, whose keys do not depend on what has left."""
    text = prompt(3)
    sizes = np.linalg.norm(text.k[0], axis=-1)
    method = kvjax.method("l2compress", budget=12, skip_layers=0, variant="steps")
    _, cache = kvjax.prefill(model(), [tokens()[3][:-3]], method=method, room=4)
    for length in range(LENGTHS[3] - 2, LENGTHS[3] + 1):
        _, cache = kvjax.step(model(), cache, np.array([tokens()[3][length - 1]], np.int32))
        for held, size in zip(np.asarray(kvjax.kept_positions(cache)[0])[0], sizes, strict=True):
            assert set(held[held >= 0].tolist()) == set(np.argsort(size[:length])[:12].tolist())


DEFAULTS = {
    "snapkv": dict(window=64, kernel=5, variant="grouped"),
    "a2sf": dict(forgetting=0.2, newest=0, variant="paper"),
    "a2sf:variant=prefill": dict(forgetting=0.95, newest=16),
    "simlayerkv:variant=prefill": dict(last=32),
    "nacl": dict(share=0.632, sinks=4),
    "roco": dict(sinks=4),
    "sirllm": dict(decay=1.0),
    "cam": dict(following=16),
    "cam:variant=window": dict(following=32),
    "zeromerge": dict(fading=0.98, bonus=0.6, recent=0.4),
    "chunkkv": dict(reuse=1),
}


@pytest.mark.parametrize("text", DEFAULTS)
def test_defaults_are_those_of_the_authors_code(text):
    """As read in the repositories at the commits that docs and recordings name."""
    id = text.partition(":")[0]
    given = {"budget": 1024} if takes_budget(id) else {}
    plain = kvjax.method(text, **given)
    told = dataclasses.replace(plain, spec=())
    written = kvjax.method(text, **given, **DEFAULTS[text])
    assert dataclasses.replace(written, spec=()) == told


def test_a_lost_share_is_a_variant_of_headkv():
    profile = Fitted({"importance": numbers("headkv")["profile"].astype(np.float32)}, "Profile", "")
    lost, shared = (
        kvjax.method("headkv", budget=0.5, fitted=profile, variant=name).keep for name in ("paper", "shared")
    )
    assert lost.allocate.lost and not shared.allocate.lost and lost.budget == Budget(0.5)
