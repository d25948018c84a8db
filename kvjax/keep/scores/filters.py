"""Q-Filters: one direction per head, in which its queries lie, says what a key will be asked for."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import IN_PREFILL
from kvjax.grammar.fitted import Fitted, ModelSizes, check_sizes
from kvjax.grammar.protocols import Inputs, Observation, Seen, View
from kvjax.keep.algebra import Word


@dataclasses.dataclass(frozen=True)
class QueryFilters:
    """The direction of the queries of every KV head (arXiv:2503.02812); an observation of what was fitted.

    fitted: "filters" [L, K, H], as `kvjax fit q-filters` writes it.
    """

    fitted: Fitted | None = None
    by = "q-filters"
    of_kv_heads = True
    phases = (IN_PREFILL,)

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        sizes = (model.layers, model.kv_heads, model.head_dim)
        check_sizes(self, "filters", "layers, KV heads, channels", "filters", sizes)

    def __call__(self, inputs: Inputs) -> Float[Array, "B K H"]:
        assert self.fitted is not None
        found = inputs.fitted[self.fitted.digest]["filters"]
        return jnp.broadcast_to(found[None], (inputs.pos.shape[0], *found.shape))


@dataclasses.dataclass(frozen=True)
class Filtered(Word):
    """score[j] = <k_j, f> for the filter f of its head: about the mean of the logits that it will get."""

    filters: QueryFilters

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.filters})

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        return jnp.einsum("bksh,bkh->bks", view.k.astype(jnp.float32), seen.of(self.filters))
