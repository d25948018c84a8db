"""What keeps and stores require of the other parts of a method, and what they break."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvjax.grammar.calls import compares_once, hiding_of, observations
from kvjax.grammar.facts import Fact, Reasons, Stating
from kvjax.grammar.fitted import fitted_words, lacks_fit, learns, sees_below
from kvjax.state.codes import at_layer

if TYPE_CHECKING:
    from kvjax.grammar import Keep, Store


class KeepFacts(Stating):
    """The facts that a keep requires and breaks, given its words."""

    @property
    def requires(self: Keep) -> Reasons:  # type: ignore[misc]
        found = _looked_at(self)
        if _observes_prompts(self):
            found[Fact.OBSERVED] = "selects slots by what the layers record"
        if self.merge is not None and self.when.in_steps:
            found[Fact.ONE_BY_ONE] = f"writes slots one by one while decoding ({self.merge!r})"
        if self.lower is not None:
            found |= dict.fromkeys((Fact.ONE_BY_ONE, Fact.FIRST_TOKENS), "moves slots to a second tier")
        if not self.phase.first_alike:
            found[Fact.WHOLE_PROMPTS] = f"rotates a prompt's keys otherwise for some queries ({self.phase!r})"
        if whole := _attends_to_all(self):
            found[Fact.DENSE_PROMPTS] = whole
        if self.restore is not None:
            found[Fact.GIVEN_WEIGHTS] = "reads with weights beside the model's"
        return found

    @property
    def breaks(self: Keep) -> Reasons:  # type: ignore[misc]
        found = {Fact.ALL_TOKENS: "evicts other tokens in each layer"}
        if self.lower is not None:
            found[Fact.ONE_TIER] = "moves slots to a second tier"
        if not self.phase.steady:
            anew = f"rotates keys anew whenever they are read ({self.phase!r})"
            found |= dict.fromkeys((Fact.ROTATED_KEYS, Fact.KEYS_BY_POSITION), anew)
        if self.restore is not None:
            found[Fact.PLAIN_READING] = f"reads {self.restore!r} with weights beside the model's"
        return found


def _attends_to_all(keep: Keep) -> str:
    """Why tokens of a prompt must attend to all that they see; empty if they need not."""
    if hiding_of(keep) is not None:
        return "says itself which tokens of a prompt are seen"
    if keep.narrow is not None:
        return f"leaves tokens out as a prompt is read ({keep.narrow!r})"
    return ""


def _observes_prompts(keep: Keep) -> bool:
    """Whether a keep records something while prompts are read, or reads more than their tokens."""
    parts = (keep.merge, keep.probe, keep.narrow, keep.restore, keep.lower)
    traces = frozenset() if keep.score is None else keep.score.traces
    whole = parts == (None,) * 5 and keep.phase.steady and keep.allocate.uniform and not keep.per_query_head
    return bool(observations(keep) or traces) or not whole


def _looked_at(keep: Keep) -> dict[Fact, str]:
    """Return the facts that a keep requires of stored keys and values."""
    found = {}
    if any(lacks_fit(word) or word.fitted is not None for word in fitted_words(keep)):
        found[Fact.KV_HEADS] = "was fitted to KV heads"
    return found | _met(keep)


def _met(keep: Keep) -> dict[Fact, str]:
    if keep.narrow is not None and keep.narrow.looks:
        return {Fact.STORED_KEYS: "chooses tokens by stored keys"}
    if not keep.phase.steady:
        return {Fact.STORED_KEYS: f"rotates stored keys anew ({keep.phase!r})"}
    if keep.merge is not None or keep.per_query_head:
        return {Fact.STORED_KEYS: "merges stored keys" if keep.merge is not None else "repeats stored keys"}
    if keep.score is None or not keep.score.looks:
        return {}
    # If only queries are observed, the scores of a prompt's keys are computed once.
    if compares_once(keep) and all(o.queries_alone for o in observations(keep)):
        return {}
    return {Fact.STORED_KEYS: "scores stored keys by what it observes of them"}


class StoreFacts(Stating):
    """The facts that a store requires and breaks."""

    @property
    def requires(self: Store) -> Reasons:  # type: ignore[misc]
        if not sees_below((self.keys, self.values)):
            return {}
        whole = [Fact.ALL_TOKENS, Fact.ALL_ATTENDED, Fact.OWN_SLOTS]
        # Maps from the layer below were fitted to the weights that were given.
        whole += [Fact.GIVEN_WEIGHTS] if _fitted(self) else []
        return dict.fromkeys(whole, "encodes a token relative to the layer below")

    @property
    def breaks(self: Store) -> Reasons:  # type: ignore[misc]
        found: dict[Fact, str] = {}
        if self.granule > 1 or self.residual > 0:
            found[Fact.ONE_BY_ONE] = (
                f"encodes {self.granule} tokens together after a residual of {self.residual}"
            )
        if self.sinks > 0:
            found[Fact.FIRST_TOKENS] = f"stores the first {self.sinks} tokens as computed"
        if self.unrotated:
            found[Fact.ROTATED_KEYS] = "stores keys unrotated"
        if any(word.fitted is not None or lacks_fit(word) for word in _fitted(self)):
            found[Fact.ONE_CODE] = "has codes that were fitted to each layer"
        if at_layer(self.keys, 0) != self.keys or at_layer(self.values, 0) != self.values:
            found[Fact.ONE_CODE] = "has other codes in other layers"
        if sees_below((self.keys, self.values)):
            found[Fact.SUMMARIES] = "decodes a layer only after the one below it"
        if learns((self.keys, self.values)):
            found[Fact.ONE_CODE] = "has codes that learn from each row's prompts"
        return found


def _fitted(store: Store) -> list[Any]:
    return [*fitted_words((store.keys, store.values))]
