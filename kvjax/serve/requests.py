"""Requests, and the progress of each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvjax.base.errors import InputError
from kvjax.serve.holding import Holding

WAITING, READING, WRITING, AWAY = "waiting", "reading", "writing", "away"
CALLING = "calling"
ENDED, REFUSED, GONE = "ended", "refused", "gone"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of another program: after `after` output tokens a request waits `seconds` before the next one.

    predicted: the seconds that a predictor estimates; None: the true ones.
    """

    after: int
    seconds: float
    predicted: float | None = None

    @property
    def expected(self) -> float:
        """Its seconds, as predicted."""
        return self.seconds if self.predicted is None else self.predicted


@dataclass(frozen=True, slots=True)
class Request:
    """A request: arrival (seconds), tokens of the prompt, and the number of output tokens.

    keys: identify the prompt's beginning, one for every `span` tokens; equal keys mean equal tokens.
    predicted: the output length that a predictor estimates before the start; None: the true length. ready:
    tokens of the prompt whose slots come with it, because another device prefilled them. holding: what its
    pages hold; None: as many tokens as the system's pages have. calls: of other programs, in order.
    """

    id: int
    arrived: float
    prompt: int
    output: int
    keys: tuple[Hashable, ...] = ()
    span: int = 0
    predicted: int | None = None
    ready: int = 0
    holding: Holding | None = None
    calls: tuple[Call, ...] = ()

    def __post_init__(self) -> None:
        if min(self.prompt, self.output) < 1 or self.arrived < 0 or self.arrived != self.arrived:
            raise InputError(
                f"request {self.id} has {self.prompt} tokens, writes {self.output} and arrives at "
                f"{self.arrived} s, expected at least one token of each and a time from 0 up"
            )
        after = [0, *(call.after for call in self.calls), self.output]
        late = any(a >= b for a, b in zip(after, after[1:], strict=False))
        if self.calls and (late or not min(call.seconds for call in self.calls) >= 0):
            raise InputError(
                f"request {self.id} of {self.output} tokens has calls {self.calls}, expected calls "
                "one after the other, before its last token, of 0 seconds or more"
            )
        if not 0 <= self.ready < self.prompt:
            raise InputError(
                f"request {self.id} comes with {self.ready} of {self.prompt} tokens, expected fewer"
            )

    @property
    def most(self) -> int:
        """Tokens stored when it finishes: the last generated token never is."""
        return self.prompt + self.output - 1

    @property
    def expected(self) -> int:
        """Tokens of its output, as predicted."""
        return self.output if self.predicted is None else self.predicted

    def page_keys(self, page: int) -> list[Hashable]:
        """Compute the key of each whole page of a prompt: the spans that contain it, and its offset in them.

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
class RequestProgress:
    """The progress of a request; only the loop changes it.

    stored: tokens whose keys and values are cached. written: generated tokens. held: pages. keys: of its
    prompt's pages. spans: [first iteration, how many] of the iterations that gave it a token. since: `stored`
    when decoding began. matched: tokens found in the tree. computed: tokens that were prefilled. preempted:
    how often it was preempted. idle: iterations in which its row stood idle after it finished. evicted:
    stored tokens that hold no slot in its longest list, because its method evicted them at the end of the
    prompt. shorter: slots by which its lists are shorter than the longest, on average. outside: whether its
    slots lie outside the pool, in a cache of its own. called: how many of its calls began; until: when the
    last one returns, in seconds.
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
    evicted: int = 0
    shorter: float = 0.0
    outside: bool = False
    called: int = 0
    until: float = 0.0

    @property
    def slots(self) -> int:
        """Slots of its longest KV head."""
        return self.stored - self.evicted

    @property
    def goal(self) -> int:
        """Tokens to store before decoding: its prompt, and what it generated before it was preempted."""
        return self.request.prompt + self.written

    @property
    def to_call(self) -> int:
        """Tokens to generate before its next call or its end."""
        calls = self.request.calls
        last = calls[self.called].after if self.called < len(calls) else self.request.output
        return last - self.written

    @property
    def age(self) -> tuple[float, int]:
        """The order of arrival: smaller for earlier requests."""
        return self.request.arrived, self.request.id
