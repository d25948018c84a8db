"""Q-Filters: one direction per head, the main direction of its queries, predicts the logits of keys."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word


@dataclasses.dataclass(frozen=True)
class QueryFilters(Observation, FittedWord):
    """The main direction of the queries of every KV head (arXiv:2503.02812), fitted offline.

    fitted: "filters" [L, K, H], as `kvjax fit q-filters` writes it.
    """

    fitted: Fitted | None = None
    by = "q-filters"
    of_kv_heads = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.kv_heads, model.head_dim)
        check_sizes(self, "filters", "layers, KV heads, channels", "filters", sizes)

    def __call__(self, inputs: Inputs) -> Float[Array, "B K H"]:
        assert self.fitted is not None
        found = inputs.fitted[self.fitted.digest]["filters"]
        return jnp.broadcast_to(found[None], (inputs.pos.shape[0], *found.shape))


@dataclasses.dataclass(frozen=True)
class FilterProjection(Word):
    """score[j] = <k_j, f> for the filter f of its head, an estimate of the mean logit that key j will get."""

    filters: QueryFilters

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.filters})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.einsum("bksh,bkh->bks", view.k.astype(jnp.float32), seen.of(self.filters))
