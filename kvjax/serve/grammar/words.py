"""The words of a system's sentence: frozen values that say what is decided, and nothing of how.

What a word does stands in `kvjax.serve.policies`, one function for each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from kvjax.base.errors import InputError

Room = Literal["max", "pow2", "oracle", "predicted"]


class Word:
    """Checks the numbers of a word when it is made: all are whole numbers from 1 up."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value: Any = getattr(self, field.name)
            if isinstance(field.default, str):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{type(self).__name__} has {field.name}={value!r}, expected a whole number from 1 up"
                )


# --- place: what memory a request holds ---------------------------------------------------------------


@dataclass(frozen=True)
class Blocks(Word):
    """Pages of `page` tokens, taken when a token needs one (PagedAttention)."""

    page: int = 16


@dataclass(frozen=True)
class Lanes(Word):
    """Room for a whole request, taken when it starts.

    room: `longest` tokens ("max"), or after the prompt a power of two above the output's length ("pow2"),
    the output's length ("oracle"), or a power of two above the predicted one, doubled where that was too
    short ("predicted"). page: what room is counted in.
    """

    room: Room = "max"
    longest: int = 8192
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.room not in ("max", "pow2", "oracle", "predicted"):
            raise InputError(f"Lanes has room={self.room!r}, expected max, pow2, oracle or predicted")


# --- share, evict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree(Word):
    """Prompts share the pages of their longest common prefix, which stay when a request ends."""


@dataclass(frozen=True)
class LRU(Word):
    """The leaf of the tree that was used longest ago leaves first."""


# --- order: who starts next ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival(Word):
    """First come, first served."""


@dataclass(frozen=True)
class Shortest(Word):
    """The shortest predicted output first."""


@dataclass(frozen=True)
class LongestPrefix(Word):
    """The longest prefix in the tree first, among the `window` that have waited longest."""

    window: int = 128


@dataclass(frozen=True)
class PrefixGroups(Word):
    """Requests of one prefix together; first the group that writes most for each token it reads."""


@dataclass(frozen=True)
class Bins(Word):
    """Requests of like predicted outputs together: `bins` bins of equal width up to `longest` tokens."""

    bins: int = 4
    longest: int = 1024


@dataclass(frozen=True)
class SkipJoin(Word):
    """Queues by service; a request enters the one that its prompt costs, and sinks as it is served.

    Queue i grants quantum * 2^i iterations; a prompt costs one for every `tokens` tokens.
    """

    levels: int = 6
    quantum: int = 16
    tokens: int = 512


# --- batch: what one iteration does -------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(Word):
    """Batches that start and end together; who ended keeps its row and its room until all have."""

    rows: int = 8


@dataclass(frozen=True)
class Iterations(Word):
    """Every iteration all running requests write one token, and new prompts are read whole beside them."""

    rows: int = 64


@dataclass(frozen=True)
class PrefillFirst(Word):
    """Prompts of up to `tokens` tokens are read in iterations of their own, before anyone writes."""

    rows: int = 256
    tokens: int = 8192


@dataclass(frozen=True)
class Chunked(Word):
    """Every iteration has `tokens` tokens: all that write, then pieces of prompts."""

    tokens: int = 512
    rows: int = 256


# --- preempt: what becomes of a request that gives way ------------------------------------------------


@dataclass(frozen=True)
class Never(Word):
    """Nobody gives way: all room is taken at the start."""


@dataclass(frozen=True)
class Recompute(Word):
    """The last come gives its pages back and is read again later."""


@dataclass(frozen=True)
class Swap(Word):
    """The last come moves to host memory, and comes back from there."""


Place = Blocks | Lanes
Order = Arrival | Shortest | LongestPrefix | PrefixGroups | Bins | SkipJoin
Batch = Whole | Iterations | PrefillFirst | Chunked
Preempt = Never | Recompute | Swap
