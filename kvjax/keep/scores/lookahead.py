"""Lookahead: queries of tokens that the model would generate next score a prompt before it is compressed."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.observations.probe import Probe
from kvjax.keep.scores.score import probabilities
from kvjax.ops.attention.union import Keys, logits


@dataclasses.dataclass(frozen=True)
class Lookahead(Probe):
    """The `ahead` tokens that greedy decoding generates after a prompt (arXiv:2505.20334)."""

    ahead: int = 8

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.ahead)})

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> tuple[Float[Array, "Lg B N W H"], Int[Array, "Lg B W"]]:
        """Return the queries and their positions."""
        return observed[key_of(Queries(self.ahead))]


@dataclasses.dataclass(frozen=True)
class LookaheadAttention(Word):
    """score[j] = sum_i softmax_j(q_i k_j / sqrt(H)) over the queries i of a `Lookahead`.

    The softmax runs over the cached slots, without the generated tokens, and is averaged over a group's heads
    (Lookahead Q-Cache, arXiv:2505.20334).
    """

    probe: Lookahead

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        q, q_pos = seen.observed[key_of(self.probe)]
        keys, spec = Keys(view.k, view.v, view.pos, view.bias), seen.attention
        s = logits(q, keys, q_pos, scale=spec.scale, softcap=spec.softcap)
        return probabilities(s).sum(3).mean(2)
