"""A second tier: what one method drops, another stores with fewer bits, and nothing is lost on the way."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, Store, chain
from kvjax.grammar.when import STEP, Every
from kvjax.keep.budgets.budget import AcrossHeads, Uniform
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.scores.score import AccumulatedAttention
from kvjax.pure import bind
from kvjax.state.cache import kept_positions
from kvjax.state.codes import dense, encode
from kvjax.store.affine import Affine
from tests.methods.battery import MAIN, model
from tests.methods.golden import model as golden_model

LOW = Affine(4, group=8)


def tier(slots, layer, row, head):
    """{position: slot} of one list."""
    pos = np.asarray(slots.pos[layer, row, head])
    return {int(p): i for i, p in enumerate(pos) if p >= 0}


def conversation(**method):
    """Return caches after the prompt and after every step, one forked from the other."""
    m = model("4/2")
    found = [kvjax.prefill(m, MAIN.first, method=kvjax.method(budget=0.5, **method), room=8)[1]]
    for token in MAIN.steps:
        found.append(kvjax.step(m, kvjax.fork(found[-1], 1), token)[1])
    return found


@pytest.mark.rotating
def test_the_first_tier_is_what_h2o_keeps_and_the_second_all_else():
    """In steps the queries also attend to the second tier, so that other tokens may leave than with H2O."""
    both, alone = conversation(id="mikv", high=8, low=4, group=8), conversation(id="h2o")
    for turn, (tiers, dropped) in enumerate(zip(both, alone, strict=True)):
        for group, pos in zip(tiers.groups, kept_positions(dropped), strict=True):
            for row, head in np.ndindex(*pos.shape[:2]):
                first = tier(group.tail, 0, row, head)
                second = tier(group.bodies[0], 0, row, head)
                length = len(MAIN.first[row]) + turn
                assert first.keys() | second.keys() == set(range(length)) and not first.keys() & second.keys()
                assert len(first) == length // 2
                if turn == 0:
                    assert first.keys() == {int(p) for p in pos[row, head] if p >= 0}


@pytest.mark.rotating
def test_the_second_tier_holds_the_codes_of_what_the_first_one_held():
    m = model("4/2")
    _, full = kvjax.prefill(m, MAIN.first, room=8)
    prompt, *_, last = conversation(id="mikv", high=8, low=4, group=8)
    for layer, plain in enumerate(full.groups):
        for row, head in np.ndindex(4, 2):
            at = tier(plain.tail, 0, row, head)
            for cache, codec in ((prompt, None), (last, Affine(8))):
                body = cache.groups[layer].bodies[0]
                moved = tier(body, 0, row, head)
                here = sorted(moved.keys() & at.keys())
                # What left the first tier in a step had its bits before.
                late = (
                    set(moved) - set(tier(prompt.groups[layer].bodies[0], 0, row, head)) if codec else set()
                )
                for p in here:
                    k = plain.tail.k[0, row, head, at[p]][None]
                    k = dense(encode(k, codec)) if p in late else k
                    want = dense(encode(k, LOW))
                    np.testing.assert_allclose(dense(body.k)[0, row, head, moved[p]][None], want, atol=1e-5)


@pytest.mark.rotating
def test_what_is_remembered_of_a_slot_goes_with_it():
    """The masses of both tiers together are those that H2O remembers of every token, had it kept all."""
    m = model("4/2")
    keep = Keep(AccumulatedAttention(), Budget(1.0), Uniform())
    _, whole = kvjax.prefill(m, MAIN.first, method=chain(keep), room=8)
    both = conversation(id="mikv", high=8, low=4, group=8)[0]
    for mine, all_of_it in zip(both.groups, whole.groups, strict=True):
        (name,) = all_of_it.tail.traces
        for row, head in np.ndindex(4, 2):
            at = tier(all_of_it.tail, 0, row, head)
            for part in mine.parts:
                for p, slot in tier(part, 0, row, head).items():
                    got = part.traces[name][0, row, head, slot]
                    np.testing.assert_allclose(
                        got, all_of_it.tail.traces[name][0, row, head, at[p]], rtol=1e-5
                    )


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (dict(lower=Store(Affine(2, axis="channel", group=4))), "one by one while decoding"),
        (dict(lower=Store(LOW, LOW), allocate=AcrossHeads()), "works with the uniform allocation"),
        (dict(lower=Store(LOW, LOW), merge=ZipMerge()), "leave out the merge"),
        (dict(lower=Store(LOW, LOW), when=Every(4)), "after every token"),
    ],
)
def test_tiers_that_cannot_work_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        chain(Keep(AccumulatedAttention(), Budget(0.5), **dict(allocate=Uniform(), when=STEP) | keep))


@pytest.mark.rotating
def test_rows_that_ask_again_move_nothing():
    m = model("4/2")
    cache = conversation(id="mikv", high=8, low=4, group=8)[0]
    _, same = kvjax.step(m, kvjax.fork(cache, 1), [r[-1] for r in MAIN.first], append=False)
    for a, b in zip(kept_positions(cache), kept_positions(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jnp.array_equal(cache.next, same.next)


def test_codes_of_a_second_tier_that_cannot_hold_a_models_channels_are_refused():
    with pytest.raises(InputError, match="leankv cannot store keys of 24 channels: group=16 must divide"):
        bind(kvjax.method("leankv", group=16, high=8), golden_model("latents"))


@pytest.mark.rotating
def test_behind_a_prompt_that_was_not_compressed_steps_move_slots_to_the_second_tier():
    m, method = model("4/2"), kvjax.method("mikv", budget=0.5, high=8, low=4, group=8)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=8, compress=False)
    _, codes = kvjax.prefill(m, MAIN.first, method=Method(store=method.store), room=8)
    got, cache = kvjax.step(m, cache, MAIN.steps[0])
    # Its query attends before a slot leaves, to the first tier's codes of all.
    np.testing.assert_allclose(got, kvjax.step(m, codes, MAIN.steps[0])[0], atol=1e-5)
    for token in MAIN.steps[1:]:
        cache = kvjax.step(m, cache, token)[1]
    for group in cache.groups:
        for row, head in np.ndindex(*group.tail.pos.shape[1:3]):
            first, second = tier(group.tail, 0, row, head), tier(group.bodies[0], 0, row, head)
            assert first.keys() | second.keys() == set(range(len(MAIN.first[row]) + len(MAIN.steps)))
            assert not first.keys() & second.keys() and len(second) == len(MAIN.steps)
