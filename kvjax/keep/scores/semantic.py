"""CompressKV: tokens are ranked by the heads that attend to what answers need (arXiv:2508.02401)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import attention_to_older
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class SemanticHeads(Observation, FittedWord):
    """How much every query head attends to the tokens that answers need, fitted offline.

    fitted: "attention" [L, N], as `kvjax fit compresskv` writes it; only its order in a layer matters.
    """

    fitted: Fitted | None = None
    by = "compresskv"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "heads", "layers, heads", "attention", (model.layers, model.heads))

    def __call__(self, inputs: Inputs) -> Float[Array, "B N"]:
        assert self.fitted is not None
        found = inputs.fitted[self.fitted.digest]["attention"]
        return jnp.broadcast_to(found[None], (inputs.pos.shape[0], *found.shape))


@dataclasses.dataclass(frozen=True)
class SemanticAttention(Word):
    """score[j] = mean over the layer's `heads` best heads of the summed attention of the last `last` queries.

    The best heads are those with the largest `SemanticHeads`; all heads of a layer share the score. The
    softmax runs over all visible slots; the window's own slots score 0 (protect them).
    """

    semantic: SemanticHeads
    heads: int
    last: int

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.semantic, Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        each = attention_to_older(view, seen, self.last).sum(3)
        best = ranks(seen.of(self.semantic)) < self.heads
        best = best.reshape(each.shape[:3])[..., None]
        many = jnp.maximum(best.sum((1, 2, 3)), 1).astype(each.dtype)[:, None]
        score = jnp.where(best, each, 0.0).sum((1, 2)) / many
        return jnp.broadcast_to(score[:, None], view.pos.shape)
