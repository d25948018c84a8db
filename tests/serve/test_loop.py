"""The loop under every system: all end with every token, no page is lost, slices of steps change nothing."""

import dataclasses
import inspect
import random

import numpy as np
import pytest

import kvjax
from kvjax.serve.grammar import System, words
from kvjax.serve.ledger.audit import audit
from kvjax.serve.loop import ServingLoop, check
from kvjax.serve.policies import batch
from kvjax.serve.requests import Request
from kvjax.serve.sim import Costs, simulate
from kvjax.serve.systems import SYSTEMS
from kvjax.serve.view import Plan

# An iteration costs 10 ms and more with tokens and slots.
COSTS = Costs("by hand", 0.01, 0.0, 2e-6, 1e-5, 0.0, 1e-5, 1e6, 1.0)
HEAVY = dataclasses.replace(COSTS, weights=1e-3)
SMALL = {"longest": 64, "room": 64, "rows": 4, "tokens": 24, "page": 4, "quantum": 3}


def small(id):
    """Return a system whose numbers fit requests of up to 60 tokens."""
    known = inspect.signature(SYSTEMS[id]).parameters
    return SYSTEMS[id](**{name: value for name, value in SMALL.items() if name in known})


def crowd(seed, count=24, keys=True, rate=20.0):
    """Draw requests of up to 60 tokens: half begin like others, and one in five is predicted wrongly."""
    draw = random.Random(seed)
    found, now = [], 0.0
    for id in range(count):
        now += draw.expovariate(rate)
        prompt, output = draw.randint(1, 40), draw.randint(1, 20)
        names = tuple((draw.randrange(2),) for _ in range(prompt // 4)) if keys else ()
        wrong = draw.randint(1, 20) if draw.random() < 0.2 else None
        found.append(Request(id, now, prompt, output, names, 4, wrong))
    return found


def pool(system):
    """Pages for three requests of the longest kind."""
    return 3 * 64 // system.page


@pytest.mark.parametrize("id", SYSTEMS)
def test_every_request_ends_with_every_token_and_no_page_is_lost(id):
    system = small(id)
    for seed in range(2):

        def watch(loop):
            assert audit(loop.ledger, loop.tree) == []
            for entry in loop.reading + loop.writing:
                table = loop.ledger.tables[entry.request.id]
                assert len(table) == entry.held and entry.stored <= entry.held * system.page

        out = simulate(system, crowd(seed), HEAVY, pages=pool(system), watch=watch)
        assert len(out.entries) == 24
        for entry in out.entries:
            assert entry.state == "ended" and entry.written == entry.request.output
            assert sum(n for _, n in entry.spans) == entry.request.output
            assert all(a + n <= b for (a, n), (b, _) in zip(entry.spans, entry.spans[1:], strict=False))
        assert system.devices > 1 or (np.diff(out.ends) > 0).all()


@pytest.mark.parametrize("preempt", [words.Recompute(), words.Swap()], ids=repr)
@pytest.mark.parametrize(
    "batch", [words.Iterations(8), words.PrefillFirst(8), words.Chunked(16, 8)], ids=repr
)
def test_a_pool_that_is_too_small_loses_nothing_and_ends(batch, preempt):
    system = System(words.Blocks(4), batch=batch, preempt=preempt)
    requests = crowd(7, 40, rate=1e3)
    demand = sum(-(-one.most // 4) for one in requests)
    out = simulate(system, requests, COSTS, pages=max(16, demand // 5 // 8))
    assert all(entry.written == entry.request.output for entry in out.entries)
    assert sum(entry.preempted for entry in out.entries) > 0
    assert max(entry.preempted for entry in out.entries) <= 8
    assert (out.moved > 0) == isinstance(preempt, words.Swap)


@pytest.mark.parametrize("id", SYSTEMS)
def test_many_steps_at_once_are_the_same_steps_one_by_one(id):
    system = small(id)
    requests = crowd(3, rate=5.0)
    fast, slow = (simulate(system, requests, HEAVY, pages=pool(system), steps=n) for n in (None, 1))
    np.testing.assert_array_equal(fast.ends, slow.ends)
    assert [e.spans for e in fast.entries] == [e.spans for e in slow.entries]
    assert [e.preempted for e in fast.entries] == [e.preempted for e in slow.entries]


def test_a_slice_of_iterations_hears_of_an_arrival_when_it_ends():
    costs = Costs("by hand", 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e3, 1.0)
    asked = [Request(0, 0.0, 1, 10), Request(1, 2.5, 1, 1)]
    for slice, first in ((1, 3), (4, 5), (16, 10)):
        out = simulate(System(), asked, dataclasses.replace(costs, slice=slice))
        assert out.entries[1].spans == [[first, 1]] and out.ends[first] == first + 1


@pytest.mark.parametrize(
    "pages, seconds, spans",
    [
        # 3 slots are read; 4 and the other prompt of 2; rows of 5 and 3, of which each takes a page.
        (5, [1.375, 1.75, 2.0], [[[0, 3]], [[1, 2]]]),
        # The second page is not there: the last come gives way, and reads its 3 tokens again.
        (4, [1.375, 1.75, 1.625, 1.375], [[[0, 3]], [[1, 1], [3, 1]]]),
    ],
)
def test_two_requests_take_what_they_take_by_hand(pages, seconds, spans):
    costs = Costs("by hand", 1.0, 0.0, 0.125, 0.0, 0.0, 0.0, 1.0, 1.0)
    requests = [Request(0, 0.0, 3, 3), Request(1, 0.5, 2, 2)]
    out = simulate(System(words.Blocks(2)), requests, costs, pages=pages)
    assert out.ends.tolist() == np.cumsum(seconds).tolist()
    assert [e.spans for e in out.entries] == spans


def test_a_request_longer_than_the_pool_is_refused_and_others_go_on():
    requests = [Request(0, 0.0, 100, 5), Request(1, 0.0, 10, 5)]
    out = simulate(System(words.Blocks(4)), requests, COSTS, pages=8)
    assert [entry.state for entry in out.entries] == ["refused", "ended"]


def test_a_request_of_nothing_and_two_of_one_id_are_refused():
    with pytest.raises(kvjax.InputError, match="request 3 has 0 tokens"):
        Request(3, 0.0, 0, 5)
    with pytest.raises(kvjax.InputError, match="two requests have one id"):
        simulate(System(), [Request(0, 0.0, 1, 1)] * 2, COSTS)


ILLEGAL = {
    "names a request twice": lambda v: Plan(write=[v.writing[0]] * 2),
    "runs no request": lambda v: Plan(),
    "which is waiting": lambda v: Plan(write=[v.waiting[0]]),
    "reads 999 tokens": lambda v: Plan(read=[(v.waiting[0], 999)]),
    "moves a request to the host that holds no slots": lambda v: Plan(write=v.writing, out=[v.waiting[0]]),
    "brings back a request that is on the device": lambda v: Plan(write=v.writing, back=[v.waiting[0]]),
    "plans 0 steps": lambda v: Plan(write=v.writing, steps=0),
    "pages, and": lambda v: Plan(read=[(e, 1) for e in v.waiting]),
}


@pytest.mark.parametrize("said", ILLEGAL)
def test_an_illegal_plan_is_found_and_said_by_the_name_of_its_policy(said, monkeypatch):
    legal = batch.decide

    def decide(system, view):
        return ILLEGAL[said](view) if view.writing and len(view.waiting) > 2 else legal(system, view)

    monkeypatch.setattr("kvjax.serve.loop.loop.decide", decide)
    with pytest.raises(check.IllegalPlan, match="Arrival.*Iterations.*" + said):
        simulate(System(words.Blocks(4), batch=words.Iterations(2)), crowd(0, rate=1e3), COSTS, pages=24)


def test_policies_change_nothing_of_what_they_see():
    requests = crowd(5, 8, rate=1e3)
    for id in SYSTEMS:

        def watch(loop):
            view = loop.view(0.0)
            if not (view.waiting or view.reading or view.writing or view.away):
                return
            lists = [list(x) for x in (view.waiting, view.reading, view.writing, view.away)]
            before = [(e.stored, e.written, e.state, e.held) for one in lists for e in one]
            first, second = (batch.decide(loop.system, loop.view(0.0)) for _ in range(2))
            assert [(e.stored, e.written, e.state, e.held) for one in lists for e in one] == before
            assert lists == [view.waiting, view.reading, view.writing, view.away] and first == second

        simulate(small(id), requests, HEAVY, pages=pool(small(id)), watch=watch)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_legal_schedules_lose_no_page_and_no_token(seed, monkeypatch):
    """Whatever is chosen, every request ends with its tokens, and the audit is clean."""
    draw = random.Random(seed)
    monkeypatch.setattr("kvjax.serve.loop.loop.decide", lambda s, v: at_random(draw, s, v))
    preempt = draw.choice([words.Recompute(), words.Swap()])
    system = System(words.Blocks(4), words.Tree(), words.LRU(), preempt=preempt)
    out = simulate(system, crowd(seed, 24), COSTS, pages=32, watch=clean)
    assert all(entry.written == entry.request.output for entry in out.entries)


def clean(loop: ServingLoop):
    assert audit(loop.ledger, loop.tree) == []


def at_random(draw, system, view):
    """Draw a legal plan: random rows, chunks, preemptions and returns; illegal ones are thrown away."""
    for _ in range(20):
        running = view.writing + view.reading
        out = draw.sample(running, min(len(running), draw.choice([0, 0, 0, 1])))
        back = draw.sample(view.away, min(len(view.away), draw.randrange(2)))
        write = [e for e in view.writing + back if e not in out and draw.random() < 0.8]
        read = [
            (e, draw.randint(1, e.goal - (e.stored if e in view.reading else view.match(e).tokens)))
            for e in draw.sample(view.waiting, min(len(view.waiting), 2)) + view.reading
            if e not in out and draw.random() < 0.6
        ]
        plan = Plan(write, read, out, [e for e in back if e in write], draw.choice([1, 1, 2]))
        try:
            check.check(system, plan, view)
        except check.IllegalPlan:
            continue
        if not view.writing or plan.steps == 1 or view.free > 8 * len(write):
            return plan._replace(steps=1)
    return batch.decide(system, view)
