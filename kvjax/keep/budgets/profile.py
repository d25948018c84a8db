"""Profiles: the fitted importance of each head of a model, and budgets computed from it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, Preferring, View
from kvjax.grammar.when import Count
from kvjax.keep.budgets.budget import rest_of_mean
from kvjax.keep.budgets.preference import apportioned


@dataclasses.dataclass(frozen=True)
class Profile(Observation, FittedWord):
    """How strongly every KV head retrieves (HeadKV, arXiv:2410.19258); fitted offline.

    fitted: "importance" [L, K], as `kvjax fit headkv` writes it; only its proportions matter.
    """

    fitted: Fitted | None = None
    by = "headkv"
    of_kv_heads = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "profile", "layers, KV heads", "importance", (model.layers, model.kv_heads))

    def __call__(self, inputs: Inputs) -> Float[Array, "B K"]:
        assert self.fitted is not None
        found = inputs.fitted[self.fitted.digest]["importance"]
        return jnp.broadcast_to(found[None], (inputs.pos.shape[0], *found.shape))


@dataclasses.dataclass(frozen=True)
class CopyProfile(Profile):
    """How often every KV head copies the next token from the context (Retrieval Head, arXiv:2404.15574).

    fitted: "importance" [L, K], as `kvjax fit retrieval-head` writes it.
    """

    by = "retrieval-head"


@dataclasses.dataclass(frozen=True)
class SearchedProfile(Profile):
    """How much every layer should keep, found by a search (EvolKV, arXiv:2509.08315).

    fitted: "importance" [L, K], the same for all heads of a layer, as `kvjax fit evolkv` writes it.
    """

    by = "evolkv"


@dataclasses.dataclass(frozen=True)
class DriftProfile(Profile):
    """How far the keys of every layer drift when a text is read in blocks (EpiCache, arXiv:2509.17396).

    fitted: "importance" [L, K], the same for all heads of a layer, as `kvjax fit epicache` writes it.
    """

    by = "epicache"
    # Unfitted, all layers keep equally many slots.
    fit_first = False

    def __call__(self, inputs: Inputs) -> Float[Array, "B K"]:
        if self.fitted is None:
            return jnp.ones((inputs.pos.shape[0], inputs.k_raw.shape[1]), jnp.float32)
        return super().__call__(inputs)


@dataclasses.dataclass(frozen=True)
class CurveProfile(Profile):
    """The share that every head should keep at a budget, from loss curves (LU-KV, arXiv:2602.08585).

    fitted: "kept" [L, K, 99], the shares of each head when 1 to 99 percent of all slots are evicted, as
    `kvjax fit lukv` writes them; the percentage nearest to the budget is used.
    """

    budget: Budget = Budget(1.0)
    by = "lukv"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "curves", "layers, KV heads", "kept", (model.layers, model.kv_heads))

    def __call__(self, inputs: Inputs) -> Float[Array, "B K"]:
        assert self.fitted is not None
        kept = inputs.fitted[self.fitted.digest]["kept"]
        length = jnp.maximum(inputs.length, 1)
        leaves = jnp.rint(100 - 100 * self.budget.count(length) / length).astype(jnp.int32)
        return jnp.take(kept, jnp.clip(leaves - 1, 0, kept.shape[-1] - 1), axis=-1).T


@dataclasses.dataclass(frozen=True)
class ByProfile(Preferring):
    """HeadKV (arXiv:2410.19258, section 4.2): heads get a base budget and a share of a pool by importance.

    Every head keeps `window` slots. Of the rest of its budget, m = n - window, it gives floor(m / beta) to a
    pool of all layers, which is shared in proportion to the profile. A share that exceeds the length of the
    prompt goes to the other heads, or is unused if `lost`; shares are then rounded to the nearest integer.
    beta is rounded to thousandths.
    """

    profile: Profile
    window: int
    beta: float = 1.2
    lost: bool = False
    across_layers = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.profile})

    def preference(self, view: View, seen: Observed) -> Float[Array, "B K"]:
        return seen.of(self.profile)

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * (tokens - 1)] * layers if self.lost else rest_of_mean(budget, tokens, layers, heads)

    def holding(self, tokens: int) -> ByProfile:
        """Return the allocation in which every head keeps at least so many slots."""
        return dataclasses.replace(self, window=max(self.window, tokens))

    def fewest(self, n: int, tokens: int) -> int:
        """Count the slots of a head with importance 0."""
        return n - self._given(max(n - self.window, 0))

    def counts(
        self,
        scores: Float[Array, "L B K S"],
        n: Int[Array, "B"],
        preferences: Float[Array, "L B K"] | None = None,
    ) -> Int[Array, "L B K"]:
        assert preferences is not None
        layers, b, heads, _ = scores.shape
        live = (scores > -jnp.inf).sum(-1, dtype=jnp.int32)
        given = self._given(jnp.maximum(n - self.window, 0))
        base = (n - given)[None, :, None]

        def of_stack(x: Array) -> Array:
            return jnp.moveaxis(x, 1, 2).reshape(layers * heads, b)

        prefer, most = of_stack(preferences), of_stack(jnp.maximum(live - base, 0))
        if self.lost:
            part = prefer / jnp.maximum(prefer.sum(0, keepdims=True), 1e-30)
            shares = jnp.minimum(
                jnp.rint(part * (layers * heads * given).astype(jnp.float32)[None]).astype(jnp.int32), most
            )
        else:
            shares = apportioned(prefer, layers * heads * given, most)
        return base + jnp.moveaxis(shares.reshape(layers, heads, b), 2, 1)

    def _given(self, spare: Count) -> Count:
        """floor(spare / beta), in thousandths so that the product fits in int32."""
        unit = round(self.beta * 1000)
        return spare // unit * 1000 + spare % unit * 1000 // unit
