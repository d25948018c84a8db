"""Requests that wait for other programs: they go on after the call, and no page and no token is lost."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.serve.grammar import System, words
from kvjax.serve.load.synth import synthetic
from kvjax.serve.requests import Call, Request
from kvjax.serve.sim import Costs, simulate
from kvjax.serve.systems import system
from tests.serve.test_loop import COSTS, clean, crowd
from tests.sweep import sweep

SECOND = Costs("by hand", 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0)
WORDS = (words.Preserved(), words.Discarded(), words.Swapped(), words.LeastWaste(1000, 4000))


@pytest.mark.parametrize(
    "word, ends, computed",
    [
        # 5 slots stay, and the third token comes a second after the return at 12.
        (words.Preserved(), [1, 2, 13, 14], 4),
        # Prompt and two tokens are read again, which gives the third token.
        (words.Discarded(), [1, 2, 13, 14], 4 + 6),
        # 5 slots move out during the call, and back after it.
        (words.Swapped(), [1, 2, 15.5, 16.5], 4),
    ],
    ids=repr,
)
def test_a_request_goes_on_after_its_call_as_by_hand(word, ends, computed):
    asked = Request(0, 0.0, 4, 4, calls=(Call(2, 10.0),))
    out = simulate(System(words.Blocks(2), calls=word), [asked], SECOND, pages=4, watch=clean)
    assert out.ends.tolist() == ends and out.entries[0].computed == computed
    assert out.moved == (10 if word == words.Swapped() else 0)


def calling(seed, count=24):
    """Draw requests of up to 60 tokens; most of them wait up to a second after some tokens."""
    draw = np.random.default_rng(seed)
    found = []
    for one in crowd(seed, count):
        after = sorted(draw.permutation(np.arange(1, one.output))[:2].tolist())
        calls = tuple(Call(at, float(draw.random()), float(draw.random())) for at in after)
        found.append(dataclasses.replace(one, calls=calls))
    return found


@pytest.mark.parametrize(
    "preempt", sweep([words.Recompute(), words.Swap(), words.Reserved()], words.Swap()), ids=repr
)
@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_calls_lose_no_page_and_no_token_in_small_pools(word, preempt):
    batches = (words.Iterations(8), words.PrefillFirst(8), words.Chunked(16, 8))
    for seed, batch in enumerate(batches):
        one = System(
            words.Blocks(4), words.Tree(), words.LRU(), words.MemoryTime(), batch, preempt, calls=word
        )
        out = simulate(one, calling(seed), COSTS, pages=20, watch=clean)
        steps = simulate(one, calling(seed), COSTS, pages=20, steps=1)
        np.testing.assert_array_equal(out.ends, steps.ends)
        for entry in out.entries:
            assert entry.written == entry.request.output and entry.called == len(entry.request.calls)
            at = np.concatenate([out.ends[first : first + count] for first, count in entry.spans])
            for call in entry.request.calls:
                assert at[call.after] - at[call.after - 1] >= call.seconds


def test_the_earliest_request_gets_pages_that_a_waiting_one_preserves():
    first = Request(0, 0.0, 4, 12)
    second = Request(1, 0.5, 8, 4, calls=(Call(2, 1000.0),))
    out = simulate(System(words.Blocks(4)), [first, second], SECOND, pages=5, watch=clean)
    ends = [out.ends[sum(entry.spans[-1]) - 1] for entry in out.entries]
    assert ends[0] < 20 and ends[1] > 1000 and out.entries[1].preempted == 1


def test_calls_are_refused_where_no_system_can_hold_them():
    asked = [Request(7, 0.0, 4, 4, calls=(Call(2, 1.0),))]
    for id in ("distserve", "fastertransformer", "fastserve"):
        with pytest.raises(kvjax.InputError, match="request 7 waits for other programs"):
            simulate(system(id), asked, COSTS)
    for calls in ((Call(0, 1.0),), (Call(4, 1.0),), (Call(2, 1.0), Call(2, 1.0)), (Call(1, -1.0),)):
        with pytest.raises(kvjax.InputError, match="request 1 of 4 tokens has calls"):
            Request(1, 0.0, 4, 4, calls=calls)


def test_drawn_requests_call_other_programs_up_to_so_many_times():
    found = synthetic("azure-conv:requests=300,calls=2,seed=3")
    plain = synthetic("azure-conv:requests=300,seed=3")
    assert [dataclasses.replace(one, calls=()) for one in found] == plain
    assert {len(one.calls) for one in found} == {0, 1, 2}
    seconds = np.array([call.seconds for one in found for call in one.calls])
    assert ((seconds < 1) | (seconds > 10)).all() and 0.4 < (seconds < 1).mean() < 0.6
