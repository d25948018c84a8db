"""`ServingLoop`: builds a view, lets a policy decide, checks the plan, yields effects, records their results.

loop = ServingLoop(system, pages)
effects = loop.run()
effect = next(effects)
while True:
    effect = effects.send(carry_out(effect))  # StopIteration when all have ended
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Generator

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import ByNode, Discarded, Preserved, Swap, Swapped, Whole
from kvjax.serve.ledger.blocks import Ledger
from kvjax.serve.ledger.nodes import read_again
from kvjax.serve.ledger.tree import PrefixTree
from kvjax.serve.loop.check import check
from kvjax.serve.loop.effects import Done, Effect, Move, RunIteration, Wait
from kvjax.serve.policies import decide
from kvjax.serve.policies.batch import decide as decide_plainly
from kvjax.serve.policies.calls import during_call
from kvjax.serve.policies.room import capacity, pages
from kvjax.serve.requests import (
    AWAY,
    CALLING,
    ENDED,
    GONE,
    READING,
    REFUSED,
    WAITING,
    WRITING,
    RequestProgress,
)
from kvjax.serve.view import Match, Plan, PolicyView


class ServingLoop:
    """Serves requests by a system's policies, in a pool of `pages` pages.

    entries: all requests so far, in order. iterations: how many were run. spare: the system whose policies
    decide if this one's raise or plan what cannot be executed; None: the error ends the loop. faults: these
    errors.

    >>> from kvjax.serve.requests import Request
    >>> loop = ServingLoop(System(), 8)
    >>> effects = loop.run()
    >>> next(effects)
    Wait(until=inf)
    >>> effects.send(Done(0.0, arrived=[Request(0, 0.0, 20, 1)])).read[0][1]
    20
    """

    def __init__(self, system: System, pages: int):
        self.system, self.ledger = system, Ledger(pages)
        self.tree = PrefixTree(self.ledger) if system.share else None
        self.entries: list[RequestProgress] = []
        self.waiting: list[RequestProgress] = []
        self.reading: list[RequestProgress] = []
        self.writing: list[RequestProgress] = []
        self.away: list[RequestProgress] = []
        self.calling: list[RequestProgress] = []
        self._leaving: list[RequestProgress] = []
        self.standing: list[RequestProgress] = []
        self.iterations = 0
        self.spare: System | None = None
        self.faults: list[Exception] = []
        self._over = False

    def run(self) -> Generator[Effect, Done, None]:
        """Yield effects and receive their results, until no request is left and no more will arrive."""
        now = 0.0
        while True:
            if self._leaving:
                out, self._leaving = self._leaving, []
                now = self._hear((yield Move(out, [])))
                continue
            returns = min((entry.until for entry in self.calling), default=math.inf)
            if not (self.waiting or self.reading or self.writing or self.away):
                if self._over and not self.calling:
                    return
                now = self._hear((yield Wait(returns)))
                continue
            view = self.view(now)
            plan = self._decided(view)
            self._make_room(plan)
            out = plan.out if isinstance(self.system.preempt, Swap) else []
            if out or plan.back:
                now = self._hear((yield Move(out, plan.back)))
            if not plan.write and not plan.read:
                # What is free is not enough for anybody before a call returns.
                now = self._hear((yield Wait(returns)))
                continue
            done = yield RunIteration(
                plan.write, plan.read, plan.steps, len(self.standing), self._shared(plan), returns
            )
            self._settle(plan, done)
            now = self._hear(done)

    def _decided(self, view: PolicyView) -> Plan:
        """Decide a legal plan, by the system's policies or, if these fail, by those of the system `spare`."""
        try:
            plan = decide(self.system, view)
            if plan.steps > 1 and any(entry.request.calls for entry in plan.write):
                plan = plan._replace(steps=min(plan.steps, *(entry.to_call for entry in plan.write)))
            if plan.write or plan.read or not self.calling:
                check(self.system, plan, view)
        except Exception as error:
            if self.spare is None:
                raise
            self.faults.append(error)
            plan = decide_plainly(self.spare, view)
            check(self.spare, plan, view)
        return plan

    def view(self, now: float) -> PolicyView:
        """Build the view that policies get."""
        matches: dict[int, Match] = {}

        def match(entry: RequestProgress) -> Match:
            found = matches.get(entry.request.id)
            if found is None:
                found = matches[entry.request.id] = self._match(entry)
            return found

        ledger = self.ledger
        return PolicyView(
            now, self.system.page, ledger.pages, ledger.free + ledger.idle, self.waiting, self.reading,
            self.writing, self.away, self.standing, match, lambda entry: ledger.gives(entry.request.id),
            [entry for entry in self.calling if entry.held],
        )  # fmt: skip

    def _hear(self, done: Done) -> float:
        """Record arrivals; refuse requests that need more pages than there are."""
        self._over = done.arrived is None
        for entry in done.gone:
            self._leave(entry)
        for entry in [entry for entry in self.calling if entry.until <= done.now]:
            self._return(entry)
        for request in done.arrived or ():
            entry = RequestProgress(request, request.page_keys(self.system.page) if self.tree else [])
            self.entries.append(entry)
            if pages(self.system.place, request, request.most) > self.ledger.pages:
                entry.state = REFUSED
            else:
                self._wait(entry)
        return done.now

    def _wait(self, entry: RequestProgress) -> None:
        entry.state = WAITING
        insort(self.waiting, entry, key=lambda one: one.age)

    def _match(self, entry: RequestProgress) -> Match:
        """Match an entry in the tree; its last token is always computed, because it predicts the next."""
        if ready := _ready(entry):
            return Match(ready)
        if self.tree is None:
            return Match()
        found = self.tree.match(entry.keys[: (entry.goal - 1) // self.system.page])
        idle = sum(self.ledger.counts[page] == 1 for page in found)
        return Match(len(found) * self.system.page, len(found), idle)

    # --- before an iteration ---

    def _make_room(self, plan: Plan) -> None:
        """Preempt the requests that the plan names, and allocate pages to those that run."""
        for entry in plan.out:
            self._give_way(entry)
        # Shared prefixes are held before anything is evicted to free pages.
        new = [entry for entry, _ in plan.read if entry.state == WAITING]
        for entry in new:
            self._share(entry)
        for entry in new:
            self._take(entry, entry.goal)
            self.waiting.remove(entry)
            self.reading.append(entry)
            entry.state = READING
        for entry in plan.back:
            self.away.remove(entry)
            self.writing.append(entry)
            entry.state = WRITING
        place = self.system.place
        for entry in plan.write:
            if entry.slots + plan.steps > capacity(place, entry.request, entry.held):
                self._take(entry, entry.slots + 1)
        self._take_ahead(plan)

    def _take_ahead(self, plan: Plan) -> None:
        """Allocate pages for all steps of a plan, although only one is certain; unused ones are released."""
        if plan.steps == 1:
            return
        place, all_pages = self.system.place, self.ledger.pages
        for entry in plan.write:
            request = entry.request
            wanted = min(entry.slots + plan.steps, request.most, capacity(place, request, all_pages))
            if wanted > capacity(place, request, entry.held):
                self._take(entry, wanted)

    def _share(self, entry: RequestProgress) -> None:
        if ready := _ready(entry):
            entry.stored = ready
            return
        if self.tree is None:
            return
        keys = entry.keys[: (entry.goal - 1) // self.system.page]
        found = self.tree.match(keys)
        self.tree.use(keys)
        self.ledger.share(entry.request.id, found)
        entry.held, entry.stored = len(found), len(found) * self.system.page
        if not entry.preempted:
            entry.matched = entry.stored

    def _take(self, entry: RequestProgress, tokens: int) -> None:
        count = pages(self.system.place, entry.request, tokens) - entry.held
        if count <= 0:
            return
        if count > self.ledger.free and self.tree is not None:
            self.tree.evict(count - self.ledger.free)
        self.ledger.take(entry.request.id, count)
        entry.held += count

    def _give_way(self, entry: RequestProgress) -> None:
        """Preempt an entry: Recompute drops its slots; Swap keeps them, unless its prefill is unfinished."""
        entry.preempted += 1
        if entry.state == CALLING:
            self._release(entry)
            entry.stored = entry.evicted = 0
            return
        swaps = isinstance(self.system.preempt, Swap) and entry.state == WRITING
        (self.writing if entry.state == WRITING else self.reading).remove(entry)
        self._release(entry)
        if swaps:
            entry.state = AWAY
            insort(self.away, entry, key=lambda one: one.age)
        else:
            entry.stored, entry.evicted, entry.shorter = 0, 0, 0.0
            self._wait(entry)

    def _release(self, entry: RequestProgress) -> None:
        self.ledger.release(entry.request.id)
        entry.held = 0
        if self.tree is not None:
            self.tree.released(entry.keys)

    def _shared(self, plan: Plan) -> int:
        if not isinstance(self.system.attend, ByNode):
            return 0
        tables = [self.ledger.tables[entry.request.id] for entry in plan.write]
        return read_again(tables) * self.system.page

    # --- after an iteration ---

    def _settle(self, plan: Plan, done: Done) -> None:
        """Record which tokens were stored and generated, and which requests finished."""
        first, steps = self.iterations, done.steps
        self.iterations += steps
        for entry in self.standing:
            entry.idle += steps
        for entry in plan.write:
            entry.stored += steps
            wrote(entry, first, steps)
        for entry, count in plan.read:
            entry.stored += count
            entry.computed += count
            if entry.stored == entry.goal and entry not in done.gone:
                self._begin(entry, first)
        for entry, longest, mean in done.kept:
            entry.evicted, entry.shorter = entry.stored - longest, longest - mean
            self._trim(entry)
        for entry in done.ended:
            self._end(entry)
        if plan.steps > steps:
            for entry in plan.write:
                self._trim(entry)
        for entry in [*plan.write, *(entry for entry, _ in plan.read)]:
            if entry.state == WRITING and entry.request.calls and not entry.to_call:
                self._call(entry, done.now)
        self._end_batch()

    def _begin(self, entry: RequestProgress, iteration: int) -> None:
        """End an entry's prefill, whose last token gave the first generated one."""
        self.reading.remove(entry)
        self.writing.append(entry)
        entry.state, entry.since = WRITING, entry.stored
        wrote(entry, iteration, 1)
        if self.tree is not None:
            self.tree.insert(entry.keys, entry.request.id)

    def _call(self, entry: RequestProgress, now: float) -> None:
        """Set an entry aside until its call returns, and its slots where the system says."""
        call = entry.request.calls[entry.called]
        how = during_call(self.system.calls, self.view(now), entry, call.expected)
        self.writing.remove(entry)
        entry.state, entry.until, entry.called = CALLING, now + call.seconds, entry.called + 1
        self.calling.append(entry)
        if isinstance(how, Preserved):
            return
        self._release(entry)
        if isinstance(how, Swapped):
            self._leaving.append(entry)
        if isinstance(how, Discarded):
            entry.stored, entry.evicted, entry.shorter = 0, 0, 0.0

    def _return(self, entry: RequestProgress) -> None:
        """Goes on with an entry whose call has returned: at once, from the host, or by reading it again."""
        self.calling.remove(entry)
        if entry.held:
            entry.state = WRITING
            self.writing.append(entry)
        elif entry.stored:
            entry.state = AWAY
            insort(self.away, entry, key=lambda one: one.age)
        else:
            self._wait(entry)

    def _end(self, entry: RequestProgress) -> None:
        self.writing.remove(entry)
        entry.state = ENDED
        if isinstance(self.system.batch, Whole):
            self.standing.append(entry)
        else:
            self._release(entry)

    def _leave(self, entry: RequestProgress) -> None:
        """Release what an unfinished request holds, because it was cancelled or failed."""
        for state in (self.waiting, self.reading, self.writing, self.away, self.calling):
            if entry in state:
                state.remove(entry)
        if entry.request.id in self.ledger.tables:
            self._release(entry)
        entry.state = GONE
        self._end_batch()

    def _end_batch(self) -> None:
        """Release the pages of a static batch in which no request decodes any more."""
        if self.standing and not self.writing:
            for entry in self.standing:
                self._release(entry)
            self.standing = []

    def _trim(self, entry: RequestProgress) -> None:
        """Release the pages allocated for steps that were not run, and for what its method evicted."""
        if entry.state != WRITING:
            return
        needed = pages(self.system.place, entry.request, entry.slots)
        if needed < entry.held:
            self.ledger.trim(entry.request.id, needed)
            entry.held = needed


def _ready(entry: RequestProgress) -> int:
    """Tokens whose slots come with a request; none of them after a preemption."""
    return 0 if entry.preempted else entry.request.ready


def wrote(entry: RequestProgress, first: int, count: int) -> None:
    """Record that an entry got a token in each of `count` iterations, starting at `first`."""
    entry.written += count
    if entry.spans and sum(entry.spans[-1]) == first:
        entry.spans[-1][1] += count
    else:
        entry.spans.append([first, count])
