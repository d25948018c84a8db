"""Two keeps in one method: the first evicts at the ends of prompts, the second after every decoded token."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observation, Observed, Score, Trace, View
from kvjax.grammar.sentence import Keep


@dataclasses.dataclass(frozen=True)
class PrefillAndDecode(Score):
    """One score at the end of prompts, and another one while decoding, where every token evicts one slot.

    >>> from kvjax.words import KeyNorm, Position
    >>> PrefillAndDecode(KeyNorm(), Position()).looks
    True
    """

    prompt: Score
    later: Score

    @property
    def in_steps(self) -> Score:
        """The score that ranks slots while decoding; the other one's observations exist in prompts alone."""
        return self.later

    @property
    def needs(self) -> frozenset[Observation]:
        return self.prompt.needs | self.later.needs

    @property
    def traces(self) -> frozenset[Trace]:
        return self.prompt.traces | self.later.traces

    @property
    def looks(self) -> bool:
        return self.prompt.looks or self.later.looks

    @property
    def ordered(self) -> bool:
        return self.prompt.ordered or self.later.ordered

    @property
    def weights(self) -> bool:
        return self.prompt.weights or self.later.weights

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return scored(self.prompt if seen.query is None else self.later, view, seen)


def in_stages(prompt: Keep, later: Keep) -> Keep:
    """Build the keep that evicts by `prompt` at prompts' ends and by `later` after every decoded token.

    Slots that either of them protects stay in both stages. The allocation, the probe and the edits of prompts
    come from `prompt`; when to evict comes from `later`; in all else they must agree.

    Raises ValueError if the two cannot be combined, saying what to give instead.
    """
    if prompt.score is None or later.score is None:
        raise ValueError("one of them selects no slots: give two that do, as in snapkv + tova")
    if prompt.when.in_steps:
        raise ValueError(
            "the first evicts while decoding, too: the first of two keeps selects at the ends of prompts "
            "alone, as snapkv does"
        )
    if not later.when.at_once:
        raise ValueError(
            "the second does not evict after every token: give one that does, such as tova, or "
            "while_decoding(...) of it"
        )
    for name, what in _SHARED.items():
        first, then = getattr(prompt, name), getattr(later, name)
        if first != then:
            raise ValueError(f"the first has {what} {first!r} and the second {then!r}: give both the same")
    return dataclasses.replace(
        later,
        score=PrefillAndDecode(prompt.score, later.score),
        protect=(*prompt.protect, *(p for p in later.protect if p not in prompt.protect)),
        per_query_head=prompt.per_query_head or later.per_query_head,
        **{name: getattr(prompt, name) for name in _OF_PROMPTS},
    )


# Fields of a keep that act in prompts alone, or must be the same in both, and what messages call them.
_OF_PROMPTS = ("allocate", "probe", "narrow", "restore", "page")
_SHARED = {
    "budget": "the budget",
    "phase": "the phase",
    "merge": "the merge",
    "lower": "the second tier",
    "skip_layers": "the number of whole layers",
    "reuse": "the number of layers that keep alike",
}
