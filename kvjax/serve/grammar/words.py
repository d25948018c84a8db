"""The words of a system: frozen values that name a decision without implementing it.

`kvjax.serve.policies` implements each word in one function.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from kvjax.base.errors import InputError

Room = Literal["max", "pow2", "oracle", "predicted"]


class SystemWord:
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


# --- place: the memory that a request holds ---------------------------------------------------------------


@dataclass(frozen=True)
class Blocks(SystemWord):
    """Pages of `page` tokens, taken when a token needs one (PagedAttention)."""

    page: int = 16


@dataclass(frozen=True)
class Lanes(SystemWord):
    """Memory for a whole request, allocated when it starts.

    room: its size: `longest` tokens ("max"), or after the prompt a power of two above the output's length
    ("pow2"), the output's length ("oracle"), or a power of two above the predicted length, doubled if that
    was too short ("predicted"). page: the unit of allocation.
    """

    room: Room = "max"
    longest: int = 8192
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.room not in ("max", "pow2", "oracle", "predicted"):
            raise InputError(f"Lanes has room={self.room!r}, expected max, pow2, oracle or predicted")


@dataclass(frozen=True)
class Spans(SystemWord):
    """Contiguous virtual memory, in which physical pages of `page` tokens are mapped before they are needed.

    ahead: how many tokens early. The ledger counts physical pages, as of Blocks; kernels need no page table.
    JAX cannot map memory, so on a device these pages have tables.
    """

    page: int = 32
    ahead: int = 1


# --- share, evict -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree(SystemWord):
    """Prompts share the pages of their longest common prefix, which are kept when a request ends."""


@dataclass(frozen=True)
class LRU(SystemWord):
    """Evicts the least recently used leaf of the tree first."""


# --- order: who starts next ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival(SystemWord):
    """First come, first served."""


@dataclass(frozen=True)
class Shortest(SystemWord):
    """The shortest predicted output first."""


@dataclass(frozen=True)
class LongestPrefix(SystemWord):
    """The longest prefix in the tree first, among the `window` that have waited longest."""

    window: int = 128


@dataclass(frozen=True)
class PrefixGroups(SystemWord):
    """Requests with the same prefix run together, the group with the most output per input token first."""


@dataclass(frozen=True)
class Bins(SystemWord):
    """Requests of like predicted outputs together: `bins` bins of equal width up to `longest` tokens."""

    bins: int = 4
    longest: int = 1024


@dataclass(frozen=True)
class SkipJoin(SystemWord):
    """Queues by service: a request enters the queue that its prompt's cost selects, and moves down later.

    Queue i grants quantum * 2^i iterations; a prompt costs one for every `tokens` tokens.
    """

    levels: int = 6
    quantum: int = 16
    tokens: int = 512


@dataclass(frozen=True)
class MemoryTime(SystemWord):
    """The fewest predicted token-seconds of memory first: those of decoding, and of calls of other programs.

    steps: iterations in a second. read, moved: tokens that are read, or moved to the host, in a second.
    """

    steps: int = 50
    read: int = 36_000
    moved: int = 196_000


# --- batch: what one iteration does -------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(SystemWord):
    """Batches that start and end together; finished requests keep rows and memory until all have finished."""

    rows: int = 8


@dataclass(frozen=True)
class Iterations(SystemWord):
    """In every iteration the running requests generate one token each, and new prompts are prefilled."""

    rows: int = 64


@dataclass(frozen=True)
class PrefillFirst(SystemWord):
    """Prompts of up to `tokens` tokens are prefilled in iterations of their own, before any decoding."""

    rows: int = 256
    tokens: int = 8192


@dataclass(frozen=True)
class Chunked(SystemWord):
    """Every iteration has `tokens` tokens: one of each decoding request, then chunks of prompts."""

    tokens: int = 512
    rows: int = 256


# --- preempt: what happens to a preempted request ---------------------------------------------------------


@dataclass(frozen=True)
class Never(SystemWord):
    """No preemption: all memory is allocated at the start."""


@dataclass(frozen=True)
class Recompute(SystemWord):
    """The request that arrived last frees its pages and is prefilled again later."""


@dataclass(frozen=True)
class Swap(SystemWord):
    """The request that arrived last moves to host memory, and returns from there."""


@dataclass(frozen=True)
class Reserved(SystemWord):
    """No preemption: a request starts if pages for its longest output are free beside those of others."""


# --- calls: what happens to a request's slots while it waits for another program ----------------------------


@dataclass(frozen=True)
class Preserved(SystemWord):
    """They stay, unless an earlier request needs their pages."""


@dataclass(frozen=True)
class Discarded(SystemWord):
    """They are freed, and read again when the call returns."""


@dataclass(frozen=True)
class Swapped(SystemWord):
    """They move to host memory, and return from there."""


@dataclass(frozen=True)
class LeastWaste(SystemWord):
    """Whichever of the three wastes the fewest predicted token-seconds of memory.

    read, moved: tokens that are read, or moved to the host, in a second.
    """

    read: int = 36_000
    moved: int = 196_000


# --- split: which devices do what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Together(SystemWord):
    """Prefill and decoding on the same device."""


@dataclass(frozen=True)
class Apart(SystemWord):
    """Prefill on `prefill` devices and decoding on `decode` others, to which slots move."""

    prefill: int = 1
    decode: int = 1


@dataclass(frozen=True)
class Chain(SystemWord):
    """A prompt is divided among `devices`, each of which hands keys and values on (simulated only).

    The last device decodes.
    """

    devices: int = 2


# --- weights: where they lie -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resident(SystemWord):
    """On the device."""


@dataclass(frozen=True)
class Brought(SystemWord):
    """In host memory, from which every iteration brings them all to the device."""


# --- attend: how a decode step reads pages that several rows share -----------------------------------------


@dataclass(frozen=True)
class ByRow(SystemWord):
    """Every row reads all of its pages."""


@dataclass(frozen=True)
class ByNode(SystemWord):
    """Pages that several rows share are read once for all of them, in pieces of at most `pages` pages."""

    pages: int = 8


Place = Blocks | Spans | Lanes
Order = Arrival | Shortest | LongestPrefix | PrefixGroups | Bins | SkipJoin | MemoryTime
Batch = Whole | Iterations | PrefillFirst | Chunked
Preempt = Never | Recompute | Swap | Reserved
Calls = Preserved | Discarded | Swapped | LeastWaste
Split = Together | Apart | Chain
Weights = Resident | Brought
Attend = ByRow | ByNode
