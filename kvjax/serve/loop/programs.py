"""The few sizes of an engine's programs, and what an iteration computes with the padding to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvjax.serve.loop.effects import Counts, RunIteration

# Of how many prompts a program reads tokens beside a decode step.
PROMPTS = 4
# Of how many rows a decode step is, unless more decode.
MOST_ROWS = 64


def of_a_few(least: int, first: int = 4, times: int = 2) -> int:
    """Return the smallest of first, first * times, ... that is at least `least`; so few sizes are compiled.

    >>> of_a_few(3), of_a_few(17), of_a_few(17, times=4)
    (4, 32, 64)
    """
    while first < least:
        first *= times
    return first


def beside_a_step(lasts: Sequence[int], most: int) -> list[int]:
    """Choose, by index, the last pieces of prompts that one program reads beside a decode step.

    lasts: the tokens of each. most: of all that are chosen. The shortest are chosen first.

    >>> beside_a_step([200, 9, 90], 256)
    [1, 2]
    """
    order = sorted(range(len(lasts)), key=lasts.__getitem__)[:PROMPTS]
    return sorted(i for i, sum in zip(order, accumulate(lasts[i] for i in order), strict=True) if sum <= most)


class ProgramSizes(NamedTuple):
    """The sizes to which an engine pads; without pieces it pads nothing.

    pieces: tokens of a prompt that a program reads, ascending. rows: of a decode step, 4 times as many for
    larger batches. page: tokens of a page. widest: pages of the widest table, which all programs have but
    decode steps without prompts; 0 where kernels read pages in place. Then only tokens are padded.
    """

    pieces: tuple[int, ...] = ()
    rows: int = 0
    page: int = 0
    widest: int = 0

    def padded(self, run: RunIteration, found: Counts, steps: int = 1) -> Counts:
        """Add padding to what an iteration computes (`run.counts`); of a slice of `steps`, each one's share.

        A program gathers the pages of a layer, and attends to them while they are in the processor's caches.
        A slice gathers those of all layers, which reads and writes its slots three times more.
        """
        if not self.pieces:
            return found
        programs = self._of_prompts(run)
        vain = sum(computed for _, _, computed in programs) - sum(count for _, count in run.read)
        rows = of_a_few(len(run.write), self.rows, 4) if run.write and self.widest else 0
        tokens = found.tokens + vain + max(0, rows - len(run.write) - run.standing)
        # A step computes its piece in its own program.
        alone = len(programs) - (1 if run.write and programs else 0)
        passes = max(1, alone + (1 if run.write else 0))
        if not self.widest:
            return Counts(tokens, found.slots, found.pairs, passes)
        widest, once = self.widest * self.page, run.counts()
        slots, pairs = found.slots - once.slots, found.pairs - once.pairs
        slots += sum(prompts for prompts, _, _ in programs) * widest
        pairs += sum(prompts * size for prompts, size, _ in programs) * widest
        width = widest if programs else self._width(run)
        slots += rows * width if programs else rows * width * (steps + 3) // steps
        return Counts(tokens, slots, pairs + rows * width, passes)

    def _of_prompts(self, run: RunIteration) -> list[tuple[int, int, int]]:
        """List programs that read prompts: of how many, tokens of each, and of all outside attention.

        The last one is that of a decode step, if there is one.
        """
        most = self.pieces[-1]
        lasts = [(count - 1) % most + 1 for _, count in run.read]
        here = beside_a_step(lasts, most) if run.write else []
        whole = sum((count - 1) // most for _, count in run.read)
        alone = [self._size(last) for i, last in enumerate(lasts) if i not in here]
        found = [(1, most, most)] * whole + [(1, size, size) for size in alone]
        if here:
            beside = [lasts[i] for i in here]
            prompts, size = of_a_few(len(here), 1), self._size(max(beside))
            found.append((prompts, size, self._size(sum(beside)) if prompts > 1 else size))
        return found

    def _size(self, tokens: int) -> int:
        return next(size for size in self.pieces if size >= tokens)

    def _width(self, run: RunIteration) -> int:
        """Return the slots of tables of a step without prompts: a power of two pages for the longest."""
        longest = max((min(one.slots + run.steps, one.request.most) for one in run.write), default=0)
        return of_a_few(-(-longest // self.page)) * self.page
