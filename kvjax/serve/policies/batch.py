"""What one iteration does: one function for each batch word."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Chunked, Iterations, PrefillFirst, Reserved, SkipJoin, Whole
from kvjax.serve.policies.order import ordered, queue
from kvjax.serve.policies.preempt import Preemption, give_way, promises, reserve, running, steps_that_fit
from kvjax.serve.policies.room import extra, pages
from kvjax.serve.requests import AWAY, READING, WAITING, WRITING, RequestProgress
from kvjax.serve.view import Plan, PolicyView

Read = list[tuple[RequestProgress, int]]
NO_LIMIT = 1 << 62


def decide(system: System, view: PolicyView) -> Plan:
    """Decide the next plan of a system.

    >>> from kvjax.serve.requests import Request
    >>> from kvjax.serve.view import Match
    >>> one = RequestProgress(Request(0, 0.0, 700, 9))
    >>> empty = dict(reading=[], writing=[], away=[], standing=[])
    >>> view = PolicyView(0.0, 16, 100, 100, [one], **empty, match=lambda _: Match(), gives=lambda _: 0)
    >>> [tokens for _, tokens in decide(System(batch=Chunked(512)), view).read]
    [512]
    """
    batch = system.batch
    if isinstance(batch, Whole):
        return whole(system, batch, view)
    if isinstance(system.order, SkipJoin):
        assert isinstance(batch, Iterations)
        return skip_join(system, system.order, batch, view)
    kept = give_way(system, view)
    if isinstance(batch, Iterations):
        return iterations(system, batch, view, kept)
    if isinstance(batch, PrefillFirst):
        return prefill_first(system, batch, view, kept)
    return chunked(system, batch, view, kept)


def whole(system: System, batch: Whole, view: PolicyView) -> Plan:
    """Serve static batches: the current batch decodes until all have finished, then the next is prefilled."""
    if view.writing:
        return Plan(write=view.writing, steps=NO_LIMIT)
    return Plan(read=starts(system, view, view.free, batch.rows, NO_LIMIT))


def iterations(system: System, batch: Iterations, view: PolicyView, kept: Preemption) -> Plan:
    """Orca (OSDI 2022, algorithm 1): all decode, and new prompts are prefilled beside them."""
    rows = batch.rows - len(kept.write) - len(kept.read)
    new = [] if kept.out else starts(system, view, kept.free, rows, NO_LIMIT)
    return planned(system, kept, rest(kept) + new)


def prefill_first(system: System, batch: PrefillFirst, view: PolicyView, kept: Preemption) -> Plan:
    """Run only prefills if a prompt can start, while decoding waits (vLLM's first scheduler)."""
    if kept.out or kept.back or kept.read:
        return planned(system, kept, rest(kept))
    new = starts(system, view, view.free, batch.rows - len(kept.write), batch.tokens)
    return Plan(read=new) if new else planned(system, kept, [])


def chunked(system: System, batch: Chunked, view: PolicyView, kept: Preemption) -> Plan:
    """Sarathi-Serve (arXiv:2403.02310, algorithm 3): all decode, begun prompts continue, new ones start."""
    tokens, going = batch.tokens - len(kept.write), []
    for entry in kept.read:
        count = min(entry.goal - entry.stored, tokens)
        if count > 0:
            going.append((entry, count))
            tokens -= count
    rows = batch.rows - len(kept.write) - len(kept.read)
    new = [] if kept.out else starts(system, view, kept.free, rows, tokens, cut=True)
    return planned(system, kept, going + new)


def skip_join(system: System, order: SkipJoin, batch: Iterations, view: PolicyView) -> Plan:
    """FastServe (arXiv:2305.05920, algorithm 1): the heads of all queues run, preempting others.

    Preempted requests keep their pages, and move to the host, the last ones first, if pages run short.
    """
    place, resident = system.place, view.writing + view.reading
    everyone = sorted(view.waiting + resident + view.away, key=lambda e: (queue(order, e)[0], e.age))
    last, free, out, chosen = len(everyone), view.free, [], []
    for at, entry in enumerate(everyone[: batch.rows]):
        need = extra(place, entry) if entry.state == WRITING else 0
        if entry.state in (WAITING, AWAY):
            need = pages(place, entry.request, max(entry.goal, entry.stored + 1))
        while need > free and last - 1 > at:
            last -= 1
            if everyone[last].state == WRITING:
                free += view.gives(everyone[last])
                out.append(everyone[last])
        if need > free or at >= last:
            break
        free -= need
        chosen.append(entry)
    back = [entry for entry in chosen if entry.state == AWAY]
    write = [entry for entry in chosen if entry.state in (WRITING, AWAY)]
    read = [(entry, entry.goal - entry.stored) for entry in chosen if entry.state in (WAITING, READING)]
    steps = min((queue(order, entry)[1] for entry in write), default=1)
    return Plan(write, read, out, back, 1 if read else min(steps, steps_that_fit(system, write, free)))


def starts(
    system: System, view: PolicyView, free: int, rows: int, tokens: int, cut: bool = False
) -> Read:  # fmt: skip
    """Choose waiting requests that may start, in the system's order, and how many tokens of each to prefill.

    rows, tokens: the limits of this iteration. cut: whether a prompt may be prefilled in part; otherwise the
    first one may exceed the limit. Requests in host memory return before new ones start.
    """
    new: Read = []
    if rows <= 0 or tokens <= 0 or view.away or not view.waiting:
        return new
    promised = isinstance(system.preempt, Reserved)
    # The pages that rows take in this iteration are among those promised.
    spare = view.free - promises(system, view) if promised else free - (reserve(view) if running(view) else 0)
    for entry in ordered(system.order, view, rows):
        match = view.match(entry)
        todo = entry.goal - match.tokens
        most = entry.request.most if promised else entry.goal
        need = pages(system.place, entry.request, most) - match.pages + match.idle
        if need > spare or (todo > tokens and not cut and new):
            break
        new.append((entry, min(todo, tokens) if cut else todo))
        spare, tokens, rows = spare - need, tokens - todo, rows - 1
        if rows <= 0 or tokens <= 0:
            break
    return new


def rest(kept: Preemption) -> Read:
    """Return all remaining tokens of prompts whose prefill has begun."""
    return [(entry, entry.goal - entry.stored) for entry in kept.read]


def planned(system: System, kept: Preemption, read: Read) -> Plan:
    """Plan an iteration: the kept sequences decode, and those in `read` prefill."""
    # When one has left or come back, another may start next.
    steps = 1 if read or kept.out or kept.back else steps_that_fit(system, kept.write, kept.free)
    return Plan(kept.write, read, kept.out, kept.back, steps)
