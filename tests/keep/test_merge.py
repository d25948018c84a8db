"""Slots and what rows carry after slots have merged, against the papers' equations in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Observed, View
from kvjax.grammar.when import Every
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.merges.merge_d2o import SimilarMerge
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention
from kvjax.ops.base.rope import Rope
from tests.float64.merges import d2o, turned
from tests.float64.reference import Prompt
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import MAIN, PACKED, decoder, kept_of, model, packed, step, talk
from tests.methods.rows import THETA, count
from tests.methods.table import BY_LABEL


def check_slots(cache, rows):
    """Check the keys and values of all slots, and the thresholds that rows carry."""
    for layer, group in enumerate(cache.groups):
        tail = jax.device_get(group.tail)
        for b, row in enumerate(rows):
            for h, slots in enumerate(row.slots[layer]):
                order = [int(np.flatnonzero(tail.pos[0, b, h] == s["pos"])[0]) for s in slots]
                np.testing.assert_allclose(tail.k[0, b, h][order], turned(slots, THETA), atol=2e-5)
                np.testing.assert_allclose(
                    tail.v[0, b, h][order], np.stack([s["v"] for s in slots]), atol=2e-5
                )
            for carried in group.rows.values():
                np.testing.assert_allclose(carried[0, b], row.memory[layer]["tau"], atol=1e-5)


def merged_and_dropped(rows):
    return [sum(m.get(which, 0) for row in rows for m in row.memory) for which in (True, False)]


@pytest.mark.parametrize("label", ["d2o", "cam", "cam window"])
@pytest.mark.rotating
@pytest.mark.xdist_group("sentences 4/2")
def test_slots_after_a_prompt_and_after_steps_are_those_of_the_equations(label):
    row, cache = BY_LABEL[label], packed(label).cache
    prompts = [Prompt(decoder("4/2"), tokens) for tokens in PACKED]
    rows = [Slotwise(p, kept_of(label, p), leave=row.leave) for p in prompts]
    check_slots(cache, rows)
    first = merged_and_dropped(rows)
    for token in range(3):
        _, cache = step(model("4/2"), cache, [token] * len(rows), append=True)
        for one in rows:
            one.step(token, victim=row.victim)
    check_slots(cache, rows)
    # Both happen, in the steps and in the prompt, where what merges acts there.
    assert (0 not in first) == getattr(row.leave, "at_prompts", True)
    assert all(b > a for a, b in zip(first, merged_and_dropped(rows), strict=True))


@pytest.mark.rotating
def test_what_rows_carry_is_the_same_where_several_slots_leave_at_once_while_decoding():
    """The lowest leave when a list is two slots over its budget; the rows are due at different steps."""
    keep = Keep(
        AccumulatedAttention(), Budget(0.5), Uniform(), (Recent(2),), when=Every(2), merge=SimilarMerge()
    )
    m = model("4/2")

    def stays(slots, length):
        score = [np.inf if s["pos"] >= length - 2 else s["mass"] for s in slots]
        return np.argsort(-np.array(score), kind="stable")[: count(length)]

    def victim(lists, length, queries):
        leaving = lambda s: np.setdiff1d(np.arange(len(s)), stays(s, length))  # noqa: E731
        return [leaving(s) if len(s) >= count(length) + 2 else None for s in lists]

    rows = []
    for tokens in MAIN.first:
        prompt = Prompt(decoder("4/2"), tokens)
        mass = [p.sum(1).reshape(2, -1, prompt.length).sum(1) for p in prompt.p]
        kept = np.zeros((len(mass), 2, prompt.length), bool)
        for layer, head in np.ndindex(kept.shape[:2]):
            slots = [dict(pos=j, mass=mass[layer][head, j]) for j in range(prompt.length)]
            kept[layer, head, stays(slots, prompt.length)] = True
        rows.append(Slotwise(prompt, list(kept), leave=d2o(THETA)))
    _, cache = kvjax.prefill(m, MAIN.first, method=Method(keep), room=8)
    check_slots(cache, rows)
    before = merged_and_dropped(rows)
    for token in (3, 1, 4, 1, 5, 9):
        _, cache = step(m, cache, [token] * len(rows), append=True)
        for one in rows:
            one.step(token, victim=victim)
        check_slots(cache, rows)
    assert all(b > a for a, b in zip(before, merged_and_dropped(rows), strict=True))


@pytest.mark.rotating
@pytest.mark.xdist_group("d2o")
def test_a_second_turn_merges_by_the_threshold_that_the_first_one_left():
    row, rows = BY_LABEL["d2o"], []
    for first, second in zip(MAIN.first, MAIN.second, strict=True):
        prompt = Prompt(decoder("4/2"), first)
        one = Slotwise(prompt, kept_of("d2o", prompt), leave=row.leave)
        for token in second:
            one.step(token)
        n = count(one.next)
        stays = lambda s, one=one, n=n: s["pos"] < 2 or s["pos"] >= one.next - n // 2  # noqa: E731
        for layer, lists in enumerate(one.slots):
            scores = [np.array([np.inf if stays(s) else s["mass"] for s in slots]) for slots in lists]
            one.remove(layer, [np.argsort(-score, kind="stable")[n:] for score in scores])
        rows.append(one)
    check_slots(talk("d2o").second[1], rows)


@pytest.mark.rotating
def test_a_row_that_starts_anew_has_no_threshold_yet():
    cache = packed("d2o").cache
    first = jnp.arange(len(PACKED)) == 0
    (carried,) = kvjax.reset_rows(cache, first).groups[0].rows.values()
    (before,) = cache.groups[0].rows.values()
    assert carried[0, 0] == 0 and (carried[0, 1:] == before[0, 1:]).all() and (before != 0).all()


def test_a_value_goes_to_the_slots_that_follow_and_to_no_other():
    """Slots out of order; where none follows, and where nothing was received, nothing is merged."""
    pos = jnp.asarray([[[7, 2, 5, -1, 0, 9, 3]]])
    received = jnp.asarray([[[1.0, 9.0, 1.0, 5.0, 1.0, 9.0, 0.0]]])
    v = jnp.eye(7)[None, None]
    view = View(v, v, pos, None, {key_of(AccumulatedMass()): received})
    length = jnp.asarray([10])
    seen = Observed({}, None, length, length // 2, 0, AttentionSpec(1.0, None, Rope()))
    kept = jnp.asarray([[[True, False, True, False, True, False, False]]])
    # The tokens 2, 3 and 9 leave; 0, 5 and 7 stay.
    leaving = jnp.asarray([[[1, 7, 6, 5]]])
    new = ValueMerge(following=4)(view, kept, leaving, seen)
    want = np.eye(7)
    want[[0, 2], 1] = 0.5
    np.testing.assert_array_equal(new.v[0, 0], want)
    np.testing.assert_array_equal(new.k, v)
