"""Views: what a method sees: a layer's slots, what is known of their row, and what the layer computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Array, Float, Int

from kvjax.grammar.keys import key_of
from kvjax.ops.base.rope import Rope

if TYPE_CHECKING:
    from kvjax.grammar.kinds import CarryingMerge, Observation, Trace


class View(NamedTuple):
    """One layer's slots as a method sees them, decoded and in position order, the empty ones last.

    In a token's own step slots are in any order, unless the score needs position order (`ordered`).

    Args:
        k: keys.
        v: values.
        pos: the position of each slot's token, -1 if the slot is empty.
        bias: added to the logits of a slot.
        traces: the traces of slots, by key (see `of`).
        received: attention of the new queries to each slot, as the observed masses record it.

    >>> View._fields[:3]
    ('k', 'v', 'pos')
    """

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    pos: Int[Array, "B K S"]
    bias: Float[Array, "B K S"] | None
    traces: dict[str, Float[Array, "B K S"]]
    received: dict[str, Float[Array, "B K S"]] = {}  # noqa: RUF012 (never written to)

    def of(self, trace: Trace) -> Float[Array, "B K S"]:
        """Return a trace's numbers; ValueError if the score's `traces` does not name it."""
        try:
            return self.traces[key_of(trace)]
        except KeyError:
            raise ValueError(f"{trace!r} is not remembered: name it in the score's `traces`") from None


class Inputs(NamedTuple):
    """What a layer computed for its new tokens; observations are functions of it.

    Args:
        q: queries, rotated.
        q_raw: queries before the rotation.
        k_raw: keys before the rotation.
        hidden: the normalised input of the layer.
        pos: positions, -1 on padding.
        length: tokens of each row so far, these included.
        fitted: the layer's fitted arrays (`kvjax.grammar.fitted`), by digest and name.
        tokens: token ids; None if vectors were given instead.
        k: keys, rotated.
        v: values; None if a layer has none of its own.

    >>> Inputs._fields[:3]
    ('q', 'q_raw', 'k_raw')
    """

    q: Float[Array, "B N T H"]
    q_raw: Float[Array, "B N T H"]
    k_raw: Float[Array, "B K T H"]
    hidden: Float[Array, "B T D"]
    pos: Int[Array, "B T"]
    length: Int[Array, "B"]
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)
    tokens: Int[Array, "B T"] | None = None
    k: Float[Array, "B K T H"] | None = None
    v: Float[Array, "B K T V"] | None = None


class Observed(NamedTuple):
    """What a score may use besides the slots.

    Args:
        observed: results of the observations that the score needs, by their key (see `of`), and, for a merge,
            what rows carry for it.
        mass: in a token's own step, the attention of its query to each slot, summed over the heads of a
            group.
        length: tokens seen.
        n: slots to keep per head.
        layer: index in the stack.
        attention: the model's constants.
        query: the current query of such a step, rotated.
        weights: the layer's matrices by name, if the score needs them (`Word.weights`).
        fitted: as in `Inputs`, for a merge.
        protect: the keep's patterns of slots that stay whatever their score (`kvjax.grammar.calls.spared`).

    >>> Observed._fields[:3]
    ('observed', 'mass', 'length')
    """

    observed: dict[str, Any]
    mass: Float[Array, "B K S"] | None
    length: Int[Array, "B"]
    n: Int[Array, "B"]
    layer: int | Array
    attention: AttentionSpec
    query: Float[Array, "B N 1 H"] | None = None
    weights: dict[str, Array] | None = None
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)
    protect: tuple[Any, ...] = ()

    def of(self, observation: Observation | CarryingMerge) -> Any:
        """Return what an observation recorded; ValueError if the score's `needs` does not name it."""
        try:
            return self.observed[key_of(observation)]
        except KeyError:
            raise ValueError(f"{observation!r} was not recorded: name it in the score's `needs`") from None


class AttentionSpec(NamedTuple):
    """The model's attention constants that scores need.

    Args:
        scale: of the logits.
        softcap: the bound of the logits; None for none.
        rope: the rotation of the layers that are scored.

    >>> AttentionSpec._fields
    ('scale', 'softcap', 'rope')
    """

    scale: float
    softcap: float | None
    rope: Rope
