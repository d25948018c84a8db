"""Token types: which tokens, by their ids, separate the parts of a text."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.base.errors import InputError
from kvjax.grammar.kinds import Inputs, Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.score import probabilities, window_logits
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class IsTokenType(Trace):
    """A trace of token types: 1 for a token whose id is one of `ids`, 0 for others.

    If `ids` is None, it is filled in from the model's tokenizer: all tokens whose text contains one of
    `characters`, and no letter or digit.
    """

    ids: tuple[int, ...] | None = None
    characters: str = ".,?!;:\n\t"
    by_ids = True

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        if inputs.tokens is None:
            raise InputError(f"{self!r} asks for token ids, and vectors were given: give token ids")
        if self.ids is None:
            raise InputError(f"{self!r} has no ids yet: bind the method to a model by kvjax.pure.static")
        found = jnp.isin(inputs.tokens, jnp.asarray(self.ids, jnp.int32)).astype(jnp.float32)
        return jnp.broadcast_to(found[:, None], (found.shape[0], heads, found.shape[1]))

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old


@dataclasses.dataclass(frozen=True)
class SeparatorsFirst(Word):
    """Separators before all other tokens; newer ones first within each kind (SepLLM, arXiv:2412.12094)."""

    looks = False

    separators: IsTokenType = IsTokenType()

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({self.separators})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        pos = view.pos.astype(jnp.float32)
        return jnp.where(view.of(self.separators) > 0, pos, -1 / (1 + jnp.maximum(pos, 0)))


@dataclasses.dataclass(frozen=True)
class CheapestPolicy(Word):
    """1 for the slots of the cheapest policy that suffices for their head, -1 for the head's other slots.

    Each policy adds slots to the one before: the first `sinks` tokens; separators; the floor(frequent * t) of
    a prompt's t tokens with the most accumulated attention; the floor(local * t) newest; all. A head takes
    the first policy whose slots get at least the share `recover` of the attention of the last `last` queries,
    averaged over these and a group's heads (FastGen, arXiv:2310.01801).
    """

    separators: IsTokenType = IsTokenType()
    sinks: int = 4
    frequent: float = 0.3
    local: float = 0.3
    recover: float = 0.95
    last: int = 32

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({self.separators, AccumulatedMass(Mass("sum"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        q_pos, live = seen.of(Queries(self.last))[1], view.pos >= 0
        p = probabilities(window_logits(view, seen, self.last)).sum(3).mean(2)
        p = p / jnp.maximum((q_pos >= 0).sum(-1), 1).astype(p.dtype)[:, None, None]
        mass = jnp.where(live, view.of(AccumulatedMass(Mass("sum"))), -jnp.inf)
        many, newest = (
            (seen.length * round(share * 1000) // 1000)[:, None, None]
            for share in (self.frequent, self.local)
        )
        added = (
            view.pos < self.sinks,
            view.of(self.separators) > 0,
            ranks(mass) < many,
            view.pos >= seen.length[:, None, None] - newest,
        )
        # The index of the first policy that includes a slot, and of the first one that suffices.
        first = jnp.full(view.pos.shape, len(added), jnp.int32)
        for i, slots in reversed([*enumerate(added)]):
            first = jnp.where(slots, i, first)
        enough = jnp.full(view.pos.shape[:2], len(added), jnp.int32)
        for i in reversed(range(len(added))):
            found = jnp.where(live & (first <= i), p, 0.0).sum(-1)
            enough = jnp.where(found >= self.recover, i, enough)
        return jnp.where(first <= enough[..., None], 1.0, -1.0)
