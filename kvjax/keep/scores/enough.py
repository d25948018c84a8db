"""Scores that decide how many slots stay, from the attention of a text."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class NormPreserving(Word):
    """1 for slots that a layer needs to preserve the norm of its attention, -1 for the others.

    Tokens are taken in the order: the first `sinks` ones, then from the newest to the oldest. They are needed
    until those taken hold the share 1 - `loss` of the Frobenius norm of the attention matrix of all queries
    and heads of the layer (DBudgetKV, arXiv:2502.16886).
    """

    looks = False

    sinks: int = 4
    loss: float = 0.01

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("squares"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = view.pos >= 0
        squares = jnp.where(live, view.of(AccumulatedMass(Mass("squares"))), 0.0)
        first = live & (view.pos < self.sinks)
        sinks = jnp.where(first, squares, 0.0).sum((1, 2))[:, None, None]
        # All heads of the layer hold the same tokens, so their slots are aligned.
        layer = jnp.where(first, 0.0, squares).sum(1, keepdims=True)
        newer = jnp.cumsum(layer[..., ::-1], -1)[..., ::-1] - layer
        total = jnp.maximum(squares.sum((1, 2)), 1e-30)[:, None, None]
        enough = jnp.sqrt((sinks + newer) / total) >= 1 - self.loss
        return jnp.where(first | ~enough, 1.0, -1.0)


@dataclasses.dataclass(frozen=True)
class TopP(Word):
    """1 for the fewest slots that hold the share `share` of a head's accumulated attention, else -1.

    These are the slots with the most attention (LeanKV, arXiv:2412.03131).
    """

    looks = False

    share: float = 0.95

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mass = jnp.where(view.pos >= 0, view.of(AccumulatedMass(Mass("sum"))), 0.0)
        order = jnp.argsort(-mass, axis=-1, stable=True)
        ranked = jnp.take_along_axis(mass, order, -1)
        before = jnp.cumsum(ranked, -1) - ranked
        needed = before < self.share * mass.sum(-1, keepdims=True)
        return jnp.put_along_axis(mass, order, jnp.where(needed, 1.0, -1.0), axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class LayerTopP(Word):
    """1 for as many tokens of a layer as hold the share `share` of its attention, -1 for the others.

    The number is the fewest tokens with that share of the attention that all heads' queries gave; the tokens
    are those with the most attention per query that could see them (ZipVL, arXiv:2410.08584, section 3.2).
    """

    looks = False

    share: float = 0.975

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = (view.pos >= 0).any(1, keepdims=True)
        # All heads of the layer hold the same tokens, so their slots are aligned.
        mass = jnp.where(view.pos >= 0, view.of(AccumulatedMass(Mass("sum"))), 0.0).sum(1, keepdims=True)
        ranked = -jnp.sort(-mass, axis=-1)
        short = jnp.cumsum(ranked, -1) < self.share * mass.sum(-1, keepdims=True)
        needed = jnp.minimum(
            short.sum(-1, keepdims=True, dtype=jnp.int32) + 1, live.sum(-1, keepdims=True, dtype=jnp.int32)
        )
        viewers = jnp.maximum(seen.length[:, None, None] - view.pos.max(1, keepdims=True), 1)
        each = jnp.where(live, mass / viewers.astype(jnp.float32), -jnp.inf)
        return jnp.broadcast_to(jnp.where(ranks(each) < needed, 1.0, -1.0), view.pos.shape)
