"""Requests, and how far each has come."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvjax.base.errors import InputError

WAITING, READING, WRITING, AWAY = "waiting", "reading", "writing", "away"
ENDED, REFUSED, GONE = "ended", "refused", "gone"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: when (seconds), tokens of the prompt, and after how many written tokens it ends.

    keys: what names the prompt's beginning, one for every `span` tokens; equal keys are equal tokens.
    predicted: tokens of the output as a predictor says before it starts; None: it is always right.
    """

    id: int
    arrived: float
    prompt: int
    output: int
    keys: tuple[Hashable, ...] = ()
    span: int = 0
    predicted: int | None = None

    def __post_init__(self) -> None:
        if min(self.prompt, self.output) < 1 or self.arrived < 0 or self.arrived != self.arrived:
            raise InputError(
                f"request {self.id} has {self.prompt} tokens, writes {self.output} and arrives at "
                f"{self.arrived} s, expected at least one token of each and a time from 0 up"
            )

    @property
    def most(self) -> int:
        """Tokens that are stored when it ends: the last one written never is."""
        return self.prompt + self.output - 1

    @property
    def expected(self) -> int:
        """Tokens of its output, as predicted."""
        return self.output if self.predicted is None else self.predicted

    def page_keys(self, page: int) -> list[Hashable]:
        """What names each whole page of the prompt: the spans that it lies in, and where it begins there.

        >>> Request(0, 0.0, 7, 1, keys=("a", "b"), span=4).page_keys(2)
        [(0, 'a'), (2, 'a'), (0, 'b')]
        >>> Request(0, 0.0, 8, 1, keys=("a", "b", "c"), span=3).page_keys(4)
        [(0, 'a', 'b'), (1, 'b', 'c')]
        """
        if not self.span:
            return []
        covered, span = min(self.prompt, len(self.keys) * self.span), self.span
        starts = range(0, covered - page + 1, page)
        return [(at % span, *self.keys[at // span : -(-(at + page) // span)]) for at in starts]


@dataclass(slots=True, eq=False)
class Entry:
    """How far a request has come; only the loop changes it.

    stored: tokens whose keys and values are there. written: tokens that it has got. held: pages. keys: of its
    prompt's pages. spans: [first iteration, how many] of the iterations that gave it a token.
    since: what was stored when it began to write. matched: tokens found in the tree. computed: tokens that
    were read. preempted: how often it gave way. idle: iterations that its row stood still after its end.
    """

    request: Request
    keys: list[Hashable] = field(default_factory=list)
    state: str = WAITING
    stored: int = 0
    written: int = 0
    held: int = 0
    spans: list[list[int]] = field(default_factory=list)
    since: int = 0
    matched: int = 0
    computed: int = 0
    preempted: int = 0
    idle: int = 0

    @property
    def goal(self) -> int:
        """Tokens to store before it can write: its prompt, and what it wrote before it gave way."""
        return self.request.prompt + self.written

    @property
    def age(self) -> tuple[float, int]:
        """Smaller for those who came earlier."""
        return self.request.arrived, self.request.id
