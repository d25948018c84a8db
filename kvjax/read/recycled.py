"""A read that ranks all slots in some steps, and reads only the best of them in the steps between."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation, Observed, Trace
from kvjax.grammar.read_kinds import Recycling
from kvjax.read.ranked import RankedSlots, votes_of
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class SelectedBy(Trace):
    """A trace of selections: 1 + the position of the last token that selected a slot; 0 if none did."""

    needs: frozenset[Observation] = frozenset()

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        """Take the maximum: later tokens have larger positions, so it is the last selection."""
        return jnp.maximum(old, seen.observed.get(key_of(self), jnp.zeros((), old.dtype)).astype(old.dtype))


@dataclasses.dataclass(frozen=True)
class RecycledSlots(RankedSlots, Recycling):
    """Recycled Attention (arXiv:2411.05787, section 3): steps reuse the selection of an earlier token.

    The first token after a prompt and every `stride`-th token after it attend to all slots and select those
    with the most attention: softmax(q k_j / sqrt(H)) over the slots older than the `newest` tokens, summed
    over the heads of a group. The tokens between two selections attend to the selected slots, to the `newest`
    tokens at the time of the selection, and to all later tokens. The budget is a share of the slots older
    than the `newest` tokens. Raises ValueError for a stride below 1.

    >>> from kvjax.words import Budget
    >>> RecycledSlots(Budget(8), stride=4).pages_visited(64)
    12
    """

    stride: int = 50
    by_list = True

    @property
    def mark(self) -> SelectedBy:
        return SelectedBy()

    @property
    def breaks(self) -> Reasons:
        return {**super().breaks, Fact.SUMMARIES: "has steps that read all slots"}

    def __post_init__(self):
        if isinstance(self.stride, bool) or not isinstance(self.stride, int) or self.stride < 1:
            raise ValueError(f"stride is a number of tokens, at least 1, got {self.stride!r}")

    def pages_visited(self, slots: int) -> int:
        """Return the most slots of a body of `slots` that a query between two selections visits (static)."""
        return min(slots, self.budget.capacity(slots) + self.stride)

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        return votes_of(q, body, layer)
