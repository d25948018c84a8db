"""Checks whether a plan is legal. An illegal plan is a bug of its policy, and is never executed."""

from __future__ import annotations

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Never, Reserved
from kvjax.serve.policies.room import extra, pages
from kvjax.serve.requests import AWAY, CALLING, READING, WAITING, WRITING
from kvjax.serve.view import Plan, PolicyView


class IllegalPlan(AssertionError):
    """A policy planned what cannot be executed."""


def check(system: System, plan: Plan, view: PolicyView) -> None:
    """Raise IllegalPlan, with the reason, unless a plan can be executed and make progress."""
    name = f"{system.order!r} with {system.batch!r}"
    write, read = {id(e) for e in plan.write}, {id(e) for e, _ in plan.read}
    out, back = {id(e) for e in plan.out}, {id(e) for e in plan.back}
    if len(write) + len(read) < len(plan.write) + len(plan.read) or write & read or out & (write | read):
        raise IllegalPlan(f"{name} names a request twice")
    if not write and not read:
        raise IllegalPlan(f"{name} runs no request, and {len(view.waiting)} wait")
    for entry in plan.write:
        if entry.state != WRITING and id(entry) not in back:
            raise IllegalPlan(f"{name} decodes a token of request {entry.request.id}, which is {entry.state}")
    for entry, count in plan.read:
        have = view.match(entry).tokens if entry.state == WAITING else entry.stored
        if entry.state not in (WAITING, READING) or not 1 <= count <= entry.goal - have:
            raise IllegalPlan(f"{name} reads {count} tokens of request {entry.request.id}, {entry.state}")
    if any(entry.state not in (WRITING, READING, CALLING) for entry in plan.out) or plan.steps < 1:
        raise IllegalPlan(
            f"{name} moves a request to the host that holds no slots, or plans {plan.steps} steps"
        )
    if any(entry.state != AWAY for entry in plan.back) or (
        plan.out and isinstance(system.preempt, Never | Reserved)
    ):
        raise IllegalPlan(
            f"{name} brings back a request that is on the device, or preempts where the system never does"
        )
    need, free = needed(system, plan, view), view.free + sum(map(view.gives, plan.out))
    if need > free:
        raise IllegalPlan(f"{name} needs {need} pages, and {free} of {view.pages} are free")


def needed(system: System, plan: Plan, view: PolicyView) -> int:
    """Pages that a plan takes."""
    place = system.place
    need = sum(extra(place, e) for e in plan.write if e.state == WRITING)
    need += sum(pages(place, entry.request, entry.slots + 1) for entry in plan.back)
    for entry, _ in plan.read:
        if entry.state == WAITING:
            match = view.match(entry)
            # Of the tree's pages, those that only a preempted request holds are not free once this one shares
            # them.
            idle = match.pages if plan.out else match.idle
            need += pages(place, entry.request, entry.goal) - match.pages + idle
    return need
