"""The state that hooks of a decode step receive and return: one layer in the step of one token per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.kinds import Inputs
from kvjax.grammar.phase import PairRotation
from kvjax.models.attending import rotated
from kvjax.models.layers import Params
from kvjax.models.mixer import AttentionLogits, Layer, Left, Projected
from kvjax.state.cache import Cache, GroupState, Pages
from kvjax.steps.decoding.past import FoundPicks, Past
from kvjax.steps.shared.run import Run

# What the slots of one part received from a query, by the key of the observed mass.
Received = dict[str, Float[Array, "*_"]]
# (out, lse) of one query over some slots, to be merged with those of other parts.
Part = tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]


class StepInputs(NamedTuple):
    """What all layers of a step share.

    at: the position of each row's token. length: how many tokens each row has, this one included. append: the
    rows that store their token. ids: None if vectors were given instead of ids. gms: the method of every
    group.
    """

    run: Run
    params: Params
    cache: Cache
    gms: tuple[GroupMethod, ...]
    ids: Int[Array, "B 1"] | None
    at: Int[Array, "B"]
    length: Int[Array, "B"]
    append: Bool[Array, "B"]


class AtLayer(NamedTuple):
    """One layer in a step: its inputs, the slots it attends to, and its results.

    q: the queries, rotated once the hooks before attention have run (x.q are unrotated). state: what its
    group holds. past: the slots it attends to. pools: those of its pages. others: further rotations in which
    queries attend to slots. found: the pages that a read method picked. parts: attention over things that are
    not slots. received: the attention that slots of each part of the past received from the query. rows: what
    rows carry to the next step. left: what other layers, and the end of the step, take from this one.
    """

    token: StepInputs
    gm: GroupMethod
    layer: Layer
    x: Projected
    q: Float[Array, "B N 1 H"]
    state: GroupState
    past: Past
    pools: tuple[Pages, ...]
    others: tuple[PairRotation, ...] = ()
    found: FoundPicks | None = None
    parts: tuple[Part, ...] = ()
    out: Float[Array, "B N 1 V"] | None = None
    logits: AttentionLogits = ()
    received: tuple[Received, ...] = ()
    rows: dict[str, Any] = {}  # noqa: RUF012 (never written to)
    left: Left = {}  # noqa: RUF012 (never written to)

    def holding(self, state: GroupState) -> AtLayer:
        """Copy, with a group that holds `state` and attends to it."""
        return self._replace(state=state, past=self.past._replace(parts=state.parts))

    def leaving(self, **things: Any) -> AtLayer:
        """Copy, and also leave `things` to other layers and the end of the step."""
        return self._replace(left=self.left | things)

    def inputs(self) -> Inputs:
        """Collect the inputs of observations, without keys if the layer reads another layer's slots."""
        token, x = self.token, self.x
        raw, pos = x.q if x.k is None else x.k, jnp.where(token.append, token.at, -1)[:, None]
        k = raw if x.k is None else rotated(self.layer.rope, x.k, token.at[:, None], token.length)
        fitted = of_layer(token.params, self.layer.number)
        return Inputs(self.q, x.q, raw, x.hidden, pos, token.length, fitted, token.ids, k=k, v=x.v)


# A change to a layer's step before or after attention, for one mechanism of a method.
Hook = Callable[[AtLayer], AtLayer]
