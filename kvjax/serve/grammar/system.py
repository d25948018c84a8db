"""`System`: the description of a serving system. Equal systems are equal values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvjax.base.errors import InputError
from kvjax.serve.grammar.words import (
    LRU,
    Apart,
    Arrival,
    Attend,
    Batch,
    Bins,
    Blocks,
    ByNode,
    ByRow,
    Calls,
    Chain,
    Iterations,
    Lanes,
    LongestPrefix,
    Never,
    Order,
    Place,
    Preempt,
    PrefillFirst,
    PrefixGroups,
    Preserved,
    Recompute,
    Resident,
    SkipJoin,
    Split,
    Swap,
    Together,
    Tree,
    Weights,
    Whole,
)


@dataclass(frozen=True)
class System:
    """A serving system: where slots lie, who shares them, who runs next, who gives way, and on what devices.

    Raises InputError for a value that does not belong in its field, and for two words that exclude each
    other.

    >>> System(share=Tree(), evict=LRU(), order=LongestPrefix()).place
    Blocks(page=16)
    """

    place: Place = Blocks()
    share: Tree | None = None
    evict: LRU | None = None
    order: Order = Arrival()
    batch: Batch = Iterations()
    preempt: Preempt = Recompute()
    calls: Calls = Preserved()
    split: Split = Together()
    weights: Weights = Resident()
    attend: Attend = ByRow()

    def __post_init__(self) -> None:
        for field, kinds in _KINDS.items():
            word = getattr(self, field)
            if not isinstance(word, kinds):
                known = ", ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise InputError(f"a system's {field} is {word!r}, expected one of {known}")
        for wrong, message in _refusals(self):
            if wrong:
                raise InputError(message)

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.place.page

    @property
    def devices(self) -> int:
        """How many devices `split` takes."""
        if isinstance(self.split, Chain):
            return self.split.devices
        return self.split.prefill + self.split.decode if isinstance(self.split, Apart) else 1

    def __str__(self) -> str:
        lines = [f"    {one.name}={getattr(self, one.name)!r}," for one in dataclasses.fields(self)]
        return "\n".join(["System(", *lines, ")"])


_KINDS = {
    "place": Place.__args__,
    "share": (Tree, type(None)),
    "evict": (LRU, type(None)),
    "order": Order.__args__,
    "batch": Batch.__args__,
    "preempt": Preempt.__args__,
    "calls": Calls.__args__,
    "split": Split.__args__,
    "weights": Weights.__args__,
    "attend": Attend.__args__,
}


def _refusals(system: System) -> list[tuple[bool, str]]:
    """(whether two words exclude each other, the error message)."""
    order, batch, lanes = system.order, system.batch, isinstance(system.place, Lanes)
    grows = not isinstance(system.place, Lanes) or system.place.room == "predicted"
    shares, never = system.share is not None, isinstance(system.preempt, Never)
    by_prefix = isinstance(order, LongestPrefix | PrefixGroups)
    return [
        (shares and lanes, "Tree() shares pages, and Lanes has none to share: write place=Blocks(16)"),
        (shares and system.evict is None, "Tree() keeps pages until something evicts them: add evict=LRU()"),
        (not shares and system.evict is not None, "LRU() evicts from a tree: add share=Tree()"),
        (not shares and by_prefix, f"{order!r} looks for prefixes in a tree: add share=Tree(), evict=LRU()"),
        (
            not shares and isinstance(system.attend, ByNode),
            f"{system.attend!r} reads shared pages once: add share=Tree(), evict=LRU()",
        ),
        (
            isinstance(order, SkipJoin) and not isinstance(batch, Iterations),
            f"SkipJoin chooses anew every iteration, and {batch!r} does not: write batch=Iterations()",
        ),
        (
            isinstance(order, SkipJoin) and not isinstance(system.preempt, Swap),
            "SkipJoin sets requests aside, and only preempt=Swap() keeps what they have stored: write that",
        ),
        (
            isinstance(order, Bins) and not isinstance(batch, Whole),
            f"Bins fills batches that end together, and {batch!r} has none: write batch=Whole()",
        ),
        (
            isinstance(batch, Whole) and (grows or not never),
            "Whole() starts what it can end: write place=Lanes('max') and preempt=Never()",
        ),
        (
            isinstance(system.split, Apart) and not isinstance(system.place, Blocks),
            f"Apart moves pages, and {system.place!r} has none to move: write place=Blocks(16)",
        ),
        (
            isinstance(system.split, Chain) and not isinstance(batch, PrefillFirst),
            f"Chain divides whole prompts, and {batch!r} mixes them with others: write batch=PrefillFirst()",
        ),
        (never and grows, f"{system.place!r} grows, so somebody must give way: write preempt=Recompute()"),
    ]  # fmt: skip
