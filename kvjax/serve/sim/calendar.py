"""The calendar: carries out the loop's effects by adding their seconds. One instance, one model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Brought, ByNode, Chain
from kvjax.serve.loop import Done, Move, RunIteration, ServingLoop, Wait
from kvjax.serve.loop.programs import MOST_ROWS, ProgramSizes, of_a_few
from kvjax.serve.policies.room import pages as pages_of
from kvjax.serve.requests import Request, RequestProgress
from kvjax.serve.sim.chain import searched
from kvjax.serve.sim.compression import Compression
from kvjax.serve.sim.costs import Costs


class Outcome(NamedTuple):
    """The results of a simulation: the progress of requests, the ends of iterations, and what was moved.

    ends: seconds, [iterations]; of several instances, one after the other. moved: slots to and from host
    memory, or between devices. computed: tokens through the model plus idle rows of static batches. costs:
    the source of the timings.
    """

    entries: list[RequestProgress]
    ends: np.ndarray
    moved: int
    computed: int
    system: System
    costs: str


def one_instance(
    system: System, queue: list[Request], costs: Costs, how: Compression, pages: int,
    steps: int | None = None, watch: Callable[[ServingLoop], None] | None = None,
) -> Outcome:  # fmt: skip
    """Serve requests, in their order of arrival, on one instance of the model; see `simulate`."""
    devices = system.split.devices if isinstance(system.split, Chain) else 1
    if isinstance(system.weights, Brought):
        costs = dataclasses.replace(costs, base=costs.base + costs.bringing)
    sizes = program_sizes(system, queue, costs, pages)
    calendar = _Calendar(queue, costs, how, steps or 1 << 62, devices, sizes)
    loop = ServingLoop(system, pages)
    effects = loop.run()
    effect = next(effects)
    try:
        while True:
            if watch is not None:
                watch(loop)
            effect = effects.send(calendar.carry_out(effect))
    except StopIteration:
        pass
    ends = np.array(calendar.ends)
    return Outcome(loop.entries, ends, calendar.moved, calendar.computed, system, costs.by)


def program_sizes(system: System, queue: list[Request], costs: Costs, count: int) -> ProgramSizes:
    """Return the sizes of the programs with which an engine of `count` pages serves a queue."""
    if not costs.gathers or isinstance(system.attend, ByNode):
        return ProgramSizes(costs.pieces)
    longest = max((pages_of(system.place, one, one.most) for one in queue), default=1)
    rows = min(system.batch.rows, len(queue), MOST_ROWS)
    return ProgramSizes(costs.pieces, rows, system.page, of_a_few(min(longest, count)))


class _Calendar:
    """The simulated time, and the arrivals to come. devices: among how many a prompt is divided."""

    def __init__(
        self,
        queue: list[Request],
        costs: Costs,
        how: Compression,
        steps: int,
        devices: int,
        sizes: ProgramSizes,
    ):
        self.queue, self.costs, self.how, self.steps = queue, costs, how, steps
        self.devices, self.sizes = devices, sizes
        self.now, self.next, self.moved, self.computed = 0.0, 0, 0, 0
        self.ends: list[float] = []

    def carry_out(self, effect: Wait | Move | RunIteration) -> Done:
        """Add the seconds of an effect."""
        if isinstance(effect, RunIteration):
            return self._run(effect)
        if isinstance(effect, Move):
            slots = sum(entry.slots for entry in (*effect.out, *effect.back))
            self.moved += slots
            self.now += slots * self.costs.move
        else:
            comes = self.queue[self.next].arrived if self.next < len(self.queue) else math.inf
            if (until := min(comes, effect.until)) < math.inf:
                self.now = max(self.now, until)
        return Done(self.now, arrived=self._arrived())

    def _arrived(self) -> list[Request] | None:
        first = self.next
        if first == len(self.queue):
            return None
        while self.next < len(self.queue) and self.queue[self.next].arrived <= self.now:
            self.next += 1
        return self.queue[first : self.next]

    def _run(self, run: RunIteration) -> Done:
        """Run iterations until a request finishes or arrives, or a slice of them ends.

        Every row attends to all its slots.
        """
        rows, write = len(run.write), run.write
        left = min((entry.request.output - entry.written for entry in write), default=1)
        slices = self.costs.slice > 1 and not run.read
        most = min(run.steps, left, self.costs.slice if slices else self.steps)
        comes = self.queue[self.next].arrived if self.next < len(self.queue) else math.inf
        comes = min(comes, run.until)
        useful = run.counts(self.how.again)
        tokens, slots, pairs, passes = self.sizes.padded(run, useful, most if slices else 1)
        seconds, done, whole = self.costs.seconds, 0, self._divided(run)
        # Every further step reads a slot more of each row, if its table is not padded.
        more = 0 if self.sizes.widest else rows
        while done < most:
            self.now += seconds(tokens, slots, pairs, passes) if whole is None else whole
            self.ends.append(self.now)
            done += 1
            slots += more
            pairs += more
            if comes <= self.now and not slices:
                break
        self.computed += done * useful.tokens
        kept = [] if self.how.keeps_all else [self._kept(*one) for one in run.read if _reads_all(*one)]
        return Done(self.now, done, _ended(run, done), self._arrived(), [], kept)

    def _divided(self, run: RunIteration) -> float | None:
        """Seconds of an iteration whose prompts are divided among devices, one after the other; else None."""
        if self.devices == 1 or run.write:
            return None
        return sum(searched(self.costs, count, self.devices) for _, count in run.read)

    def _kept(self, entry: RequestProgress, _: int) -> tuple[RequestProgress, int, float]:
        """Return the slots that stay at the end of a prompt, and what was written before a preemption."""
        slots = self.how.left(entry.request.prompt) + entry.written
        return entry, slots, float(slots)


def _ended(run: RunIteration, done: int) -> list[RequestProgress]:
    """List the requests that got their last token in these iterations."""
    ended = [entry for entry in run.write if entry.written + done == entry.request.output]
    for entry, count in run.read:
        if _reads_all(entry, count) and entry.written + 1 == entry.request.output:
            ended.append(entry)
    return ended


def _reads_all(entry: RequestProgress, count: int) -> bool:
    return entry.stored + count == entry.goal
