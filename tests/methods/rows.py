"""The columns of the table of methods: the type of its rows, and bytes as arithmetic over sizes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

import kvjax
from kvjax.grammar import Method
from kvjax.methods import takes_budget
from kvjax.ops.base.rope import Rope
from tests.float64.ranges import Ranges
from tests.float64.reference import Prompt

WINDOW, KERNEL, PAGE = 4, 3, 4
SNAP = dict(window=WINDOW, kernel=KERNEL)
THETA = Rope().theta
HASH = dict(planes=3, tables=4, sinks=2, newest=4)


class PromptSizes(NamedTuple):
    """What bytes are a function of: rows, KV heads, query heads, head dim, layers, prompt tokens, room."""

    b: int
    k: int
    n: int
    h: int
    layers: int
    tokens: int
    room: int


BUDGET = [Fraction(1, 2)]


def count(length: int) -> int:
    """Slots that the budget leaves of `length` tokens: 0.5, which all rows use, or that of `at_budget`."""
    return max(1, length * BUDGET[-1].numerator // BUDGET[-1].denominator)


@contextlib.contextmanager
def at_budget(budget: float) -> Iterator[None]:
    """Rows say here what another budget leaves of a prompt."""
    BUDGET.append(Fraction(budget))
    try:
        yield
    finally:
        BUDGET.pop()


@dataclasses.dataclass(frozen=True)
class Row:
    """The expected behaviour of one configuration of a method.

    build: chain of (id, hyper-parameters). kept: prompt -> per layer, boolean [lists, T]; None keeps all.
    nbytes: PromptSizes -> bytes of the cache. whole: hyper-parameters under which it keeps all exactly.
    error: what its logits may be off by, relative to the largest, once the kept tokens are given; None where
    no slots describe it (merging, reading in part). victim: what leaves at a decode step. leave: what that
    changes in the other slots (`tests.float64.reference.Row`). phase: what slots
    are rotated by. model: which tiny model. moves: whether slots of its cache may be permuted. counted:
    whether how many slots stay follows from the data. narrow: (prompt, layer) -> the tokens that go on, where
    upper layers see fewer (as `Prompt` takes it). reread: prompt -> the tokens that are read of it, or
    what a reading of its own leaves. attends:
    what a step gives the queries, where it does not attend to all slots (as `tests.float64.reference.Row`
    takes it). stored: prompt -> the same with the keys and values that its cache holds in place of its own.
    stacks: whether layers may be stacked. hides: (prompt, layer) -> which tokens of the prompt see which
    others no more (as `Prompt` takes it). looks_ahead: whether chunks of a prompt are told what comes behind
    them.
    """

    label: str
    build: tuple[tuple[str, dict[str, Any]], ...]
    nbytes: Callable[[PromptSizes], int]
    kept: Callable[[Prompt], list[np.ndarray]] | None = None
    whole: tuple[tuple[str, dict[str, Any]], ...] | None = None
    error: float | None = 3e-5
    victim: Callable | None = None
    leave: Callable | None = None
    phase: str | int | Ranges = "position"
    model: str = "4/2"
    moves: bool = True
    counted: bool = False
    narrow: Callable | None = None
    reread: Callable | None = None
    attends: Callable | None = None
    stored: Callable | None = None
    stacks: bool = True
    hides: Callable | None = None
    looks_ahead: bool = False

    def method(self, parts: tuple[tuple[str, dict[str, Any]], ...] | None = None) -> Method:
        return self._own if parts is None else _chained(parts)

    @cached_property
    def _own(self) -> Method:
        return _chained(self.build)

    @property
    def budgeted(self) -> bool:
        """Whether what stays follows from the budget that all rows have."""
        return self.kept is not None and any(hyper.get("budget") == 0.5 for _, hyper in self.build)

    def at_budget(self, budget: float) -> Method:
        changed = {"budget": budget}
        return self.method(
            tuple((id, hyper | (changed if "budget" in hyper else {})) for id, hyper in self.build)
        )

    @property
    def evicts(self) -> bool:
        """Whether decoding drops tokens, too."""
        return self.victim is not None or self.label == "keepkv"

    def read(self, prompt: Prompt) -> Prompt:
        """Read a prompt as the method reads it."""
        if self.reread is not None:
            found = self.reread(prompt)
            return found if hasattr(found, "raw_k") else Prompt(prompt.decoder, found)
        if self.stored is not None:
            return self.stored(prompt)
        farthest = self.phase if isinstance(self.phase, int) else None
        ranges = self.phase if isinstance(self.phase, Ranges) else None
        if self.narrow is None and farthest is None and ranges is None and self.hides is None:
            return prompt
        return Prompt(prompt.decoder, prompt.tokens, self.narrow, farthest, ranges, self.hides)

    @property
    def reads_all(self) -> bool:
        """Whether all layers see all tokens of a prompt, and steps attend to all slots."""
        return self.reread is None and self.narrow is None and self.attends is None


def _chained(parts: tuple[tuple[str, dict[str, Any]], ...]) -> Method:
    made = [kvjax.method(id, **hyper) for id, hyper in parts]
    return made[0] if len(made) == 1 else kvjax.chain(*made)


def row(label, nbytes, id=None, *, hyper=None, whole=None, **more):
    """Make a row of one method; where it takes a budget, that is 0.5, and 1.0 where it keeps everything."""
    id, hyper = id or label, dict(hyper or {})
    if takes_budget(id):
        whole, hyper = ((id, hyper | {"budget": 1.0} | (whole or {})),), hyper | {"budget": 0.5}
    return Row(label, ((id, hyper),), nbytes, whole=whole, **more)


def chained(label, nbytes, *parts, **more):
    return Row(label, tuple(parts), nbytes, **more)


# --- bytes ---------------------------------------------------------------------------------------------


def plain(s: PromptSizes) -> int:
    """Bytes of a slot: float32 keys and values, an int32 position."""
    return 2 * s.h * 4 + 4


def dense(slots, heads=None, slot=plain, extra=0):
    """Each KV head of every layer holds `slots` slots; 4 bytes per row for the next position."""
    return lambda s: s.layers * s.b * (heads or s.k) * slots(s) * (slot(s) + extra) + 4 * s.b


def everything(s: PromptSizes) -> int:
    return s.tokens + s.room


MINI, MINI_MOST = dict(t=0.6, gamma=0.3), 0.125


def minicache_bytes(direction):
    """One layer of three keeps everything. The others have a body for the prompt, and a tail for an eighth.

    In the body, a direction of keys and one of values, two lengths in each layer, and its positions.
    """

    def total(s):
        shared = s.tokens * (2 * direction(s) + 2 * (2 * 4 + 4))
        tails = 2 * (int(MINI_MOST * s.tokens) + s.room) * plain(s)
        return s.b * s.k * (everything(s) * plain(s) + shared + tails) + 4 * s.b

    return total


def half(s: PromptSizes) -> int:
    return count(s.tokens) + s.room


def half_and_one(s: PromptSizes) -> int:
    """Evicting at every step: the budget of all that may come, and the token that is just attended."""
    return count(s.tokens + s.room) + 1


def due_by_2(s: PromptSizes) -> int:
    """Count the budget of all that may come, and two tokens more, which are then given up."""
    return count(s.tokens + s.room) + 2


def queries_of(window):
    """Bytes of the last queries that rows carry in every layer, with their positions."""
    return lambda s: s.layers * s.b * window * (s.n * s.h + 1) * 4


def most_pages(held: int, lists: int, longest: int) -> int:
    """Find the most pages that `held` slots fill or begin in lists of at most `longest`, split in any way.

    A list begins its first page with one slot, and each further one with PAGE slots more, up to its longest.
    """
    pages = 0
    for cost in [1] + [PAGE] * (-(-longest // PAGE) - 1):
        begun = min(lists, held // cost)
        pages, held = pages + begun, held - begun * cost
    return pages


def paged(kept_per_layer, heads=lambda s: s.k, slot=plain, one_pool=False, longest=lambda s: s.tokens):
    """Pools that hold kept_per_layer(s, layer) slots per row in any split over the heads, and dense room.

    longest: of how many slots a list in pages consists at most.
    """

    def total(s: PromptSizes) -> int:
        lists = s.b * heads(s)
        slots = [s.b * kept_per_layer(s, i) for i in range(s.layers)]
        pools = [(sum(slots), lists * s.layers)] if one_pool else [(x, lists) for x in slots]
        found = 4 * s.b + s.layers * lists * s.room * slot(s)
        for held, owners in pools:
            pages = most_pages(held, owners, longest(s))
            # A page: its slots and its owner. A list: its first page and its length.
            found += pages * (PAGE * slot(s) + 4) + owners * (4 + 4)
        return found

    return total


def window_paged(slot=plain):
    """Pages that may hold all tokens but the newest WINDOW, which lie in the tail, before its room."""
    older = lambda s: s.tokens - WINDOW  # noqa: E731
    pages = paged(lambda s, i: s.k * older(s), slot=slot, longest=older)
    return lambda s: pages(s._replace(room=s.room + WINDOW))


def split(slots, granule, residual, body_granule, body_slot):
    """Count an encoded body of whole granules and a tail of residual + granule plain slots."""

    def total(s: PromptSizes) -> int:
        granules = max((slots(s) - residual) // granule, 1)
        body = granules * (body_granule(s) + granule * body_slot(s))
        return s.layers * s.b * s.k * (body + (residual + granule) * plain(s)) + 4 * s.b

    return total


def coded(bits: int, groups: int = 1):
    """Bytes of a slot whose tokens are encoded one by one, with a float16 scale and zero per group."""
    return lambda s: 2 * (s.h * bits // 8 + 4 * groups) + 4


def turboquant_bytes(s: PromptSizes) -> int:
    """Count a 4-bit slot: a key's words of 2, 1 and 1 bits and two float16, a value's of 4 bits and one."""
    key = sum(4 * -(-s.h * bits // 32) for bits in (2, 1, 1)) + 4
    return key + 4 * -(-s.h * 4 // 32) + 2 + 4


def kivi_bytes(bits, slots=everything, group=16, residual=16):
    # Keys: per granule and channel, `group` codes and two float16. Values: per token, h codes, two per group.
    return split(
        slots, group, residual,
        lambda s: s.h * (group * bits // 8 + 4), lambda s: s.h * bits // 8 + 4 * (s.h // group) + 4,
    )  # fmt: skip


def quantspec_bytes(s: PromptSizes) -> int:
    """Two codes of 4 bits: of keys with two float16 per granule and channel, of values with two per token."""
    keys, values = (lambda s: 2 * s.h * (16 // 2 + 4)), (lambda s: 2 * (s.h // 2 + 4) + 4)
    return split(everything, 16, 16, keys, values)(s)


def holes_bytes(s: PromptSizes, group=4, residual=4) -> int:
    """KIVI's 8 bits under H2O: up to a granule of holes in the body, and a mass beside every slot."""
    slots = lambda s: half_and_one(s) + group - 1  # noqa: E731
    body, tail = (slots(s) - residual) // group * group, residual + group
    return kivi_bytes(8, slots, group, residual)(s) + s.layers * s.b * s.k * 4 * (body + tail)


def granules_in_pages_bytes(s: PromptSizes, group=4, residual=4) -> int:
    """KIVI's 8 bits in pages of PAGE slots; granules for the room, and a plain tail."""
    slot = lambda s: (s.h * (group + 4)) // group + s.h + 4 * (s.h // group) + 4  # noqa: E731
    pages = paged(lambda s, i: s.k * count(s.tokens), slot=slot)(s._replace(room=-(-s.room // group) * group))
    return pages + s.layers * s.b * s.k * (residual + group) * plain(s)


def read_in_pages_bytes(s: PromptSizes) -> int:
    """Quest's bounds of every 4 slots, in pages of PAGE slots and in granules for the room; a plain tail."""
    bounds = lambda s: 2 * s.h * 4 // 4  # noqa: E731
    slot = lambda s: plain(s) + bounds(s)  # noqa: E731
    pages = paged(lambda s, i: s.k * count(s.tokens), slot=slot)(s._replace(room=-(-s.room // 4) * 4))
    return pages + s.layers * s.b * s.k * 4 * plain(s)


def lserve_bytes(s: PromptSizes) -> int:
    """4 bits and bounds of every 2: older slots in pages; WINDOW, room, holes in granules; a plain tail."""
    older = lambda s: s.tokens - WINDOW  # noqa: E731
    slot = lambda s: coded(4, 2)(s) + 2 * s.h * 4 // 2  # noqa: E731
    room = -(-(WINDOW + s.room + PAGE - 1) // PAGE) * PAGE
    pages = paged(lambda s, i: s.k * older(s), slot=slot, longest=older)(s._replace(room=room))
    return pages + s.layers * s.b * s.k * PAGE * plain(s)


def read_with_holes_bytes(s: PromptSizes) -> int:
    """Quest's bounds of every 4 slots under H2O: up to a granule of holes, and a mass beside every slot."""
    body = (half_and_one(s) + 3) // 4 * 4
    each = body * (plain(s) + 4 + 2 * s.h * 4 // 4) + 4 * (plain(s) + 4)
    return s.layers * s.b * s.k * each + 4 * s.b


def gear_bytes(bits, rank, group=16):
    """KIVI's codes; a number and an index for one outlier at each end; two float16 matrices per granule."""
    ends, matrices = 2 * (4 + 1), lambda s: (group + s.h) * rank * 2
    return split(
        everything, group, 0,
        lambda s: s.h * (group * bits // 8 + 4 + ends) + 2 * matrices(s),
        lambda s: s.h * bits // 8 + 4 * (s.h // group) + ends + 4,
    )  # fmt: skip


def mikv_bytes(s: PromptSizes) -> int:
    """Half of the tokens, and the one just attended, in 8 bits; the others in 4; all with their masses."""
    most = s.tokens + s.room
    first, second = half_and_one(s) * (coded(8)(s) + 4), (most - count(most)) * (coded(4, 2)(s) + 4)
    return s.layers * s.b * s.k * (first + second) + 4 * s.b


def kvquant_bytes(s: PromptSizes) -> int:
    """Count a row's first token as is; of others 4 bits, an outlier of a key, two and a range of a value."""
    slot = 2 * (s.h * 4 // 8) + (4 + 1) + (2 * (4 + 1) + 4) + 4
    return s.layers * s.b * s.k * (plain(s) + (everything(s) - 1) * slot) + 4 * s.b


def quest_bytes(s: PromptSizes) -> int:
    """Count the first two layers as they are; the others in pages of 8 with two bounds per channel."""
    rest = s._replace(layers=s.layers - 2)
    first = dense(everything)(s._replace(layers=2))
    return first - 4 * s.b + split(everything, 8, 0, lambda s: 2 * s.h * 4, plain)(rest)


def infllm_bytes(s: PromptSizes) -> int:
    """Blocks of 4 with a key each behind a tail of 8 and 4 more with a score each; copies on the device.

    The device has places for the blocks that a step reads: one of sinks, and half of all, 2 bytes more for
    which they are and when each was read.
    """
    blocks = (s.tokens + s.room - 8) // 4
    places = 1 + -(-(blocks * 4 // 2) // 4)
    near = s.layers * s.b * s.k * places * (4 * plain(s) + 8)
    return split(everything, 4, 8, lambda s: s.h * 4, plain)(s) + near + s.layers * s.b * s.k * 12 * 4


def sparq_bytes(s: PromptSizes) -> int:
    """Slots one by one, a tail of the newest 4 and one more, and a float32 sum of the values of each list."""
    sums = s.layers * s.b * s.k * s.h * 4
    return split(everything, 1, 4, lambda s: 0, plain)(s) + sums


def magicpig_bytes(s: PromptSizes) -> int:
    """Slots one by one, each with a word of 4 codes of 3 bits, a tail as SparQ's, a float32 centre a list."""
    centres = s.layers * s.b * s.k * s.h * 4
    return split(everything, 1, 4, lambda s: 4, plain)(s) + centres


def mustafar_bytes(s: PromptSizes) -> int:
    """Behind 4 whole tokens and one more, half of a slot's numbers, a bit for each, and its position."""
    slot = lambda s: 2 * (s.h // 2 * 4 + -(-s.h // 32) * 4) + 4  # noqa: E731
    return split(everything, 1, 4, lambda s: 0, slot)(s)
