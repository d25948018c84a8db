"""Which requests to preempt when pages run short, and which return."""

from __future__ import annotations

from typing import NamedTuple

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Lanes, Reserved
from kvjax.serve.policies.room import capacity, extra, pages
from kvjax.serve.requests import RequestProgress
from kvjax.serve.view import PolicyView


class Preemption(NamedTuple):
    """The requests that keep decoding and prefilling, those preempted, those that return; the free pages."""

    write: list[RequestProgress]
    read: list[RequestProgress]
    out: list[RequestProgress]
    back: list[RequestProgress]
    free: int


def give_way(system: System, view: PolicyView) -> Preemption:
    """Preempt the latest arrivals if earlier requests need their pages (vLLM, section 4.5).

    The earliest request is never preempted, so every request finishes.
    """
    place = system.place
    full = [entry for entry in view.writing if entry.slots >= capacity(place, entry.request, entry.held)]
    need = sum(extra(place, entry) for entry in full)
    if need <= view.free:
        return come_back(system, view, Preemption(view.writing, view.reading, [], [], view.free - need))
    free, out = view.free, []
    latest = sorted(running(view) + view.calling, key=lambda entry: entry.age)
    while need > free and len(latest) > 1:
        last = latest.pop()
        free += view.gives(last)
        need -= extra(place, last) if last.state == "writing" else 0
        out.append(last)
    gone = {id(entry) for entry in out}
    write = [entry for entry in view.writing if id(entry) not in gone]
    read = [entry for entry in view.reading if id(entry) not in gone]
    return Preemption(write, read, out, [], free - need)


def come_back(system: System, view: PolicyView, kept: Preemption) -> Preemption:
    """Choose requests from host memory in order of arrival, while their pages fit beside a reserve."""
    free, back = kept.free, []
    reserved = isinstance(system.preempt, Reserved)
    promised = promises(system, view) if reserved else 0
    for entry in view.away:
        need = pages(system.place, entry.request, entry.slots + 1)
        if reserved:
            promised += pages(system.place, entry.request, entry.request.most - entry.evicted)
            if promised > view.free:
                break
        elif need > free - (reserve(view) if kept.write or kept.read or back else 0):
            break
        free -= need
        back.append(entry)
    return kept._replace(write=kept.write + back, back=back, free=free) if back else kept


def reserve(view: PolicyView) -> int:
    """How many pages stay free for running requests: a hundredth of the pool, as vLLM's watermark."""
    return max(1, view.pages // 100)


def running(view: PolicyView) -> list[RequestProgress]:
    """List the requests that hold pages on the device and are not over."""
    return view.writing + view.reading


def promises(system: System, view: PolicyView) -> int:
    """Pages that requests which hold some may still take, up to their longest outputs (Reserved)."""
    return sum(
        pages(system.place, entry.request, entry.request.most - entry.evicted) - entry.held
        for entry in running(view) + view.calling
    )


def steps_that_fit(system: System, rows: list[RequestProgress], free: int) -> int:
    """Count iterations in which these rows surely find their pages, from 1 up."""
    if not rows:
        return 1
    place, more, held, grown = system.place, free // len(rows), [], []
    for entry in rows:
        now = capacity(place, entry.request, entry.held)
        held.append(now - entry.slots)
        grown.append(capacity(place, entry.request, entry.held + more) - now)
    return max(1, min(held), 0 if isinstance(place, Lanes) else min(grown))
