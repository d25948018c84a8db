"""DefensiveKV: scores slots by the attention that they may receive in the worst case, and by their output."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Pool, Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import attention_to_older, output_norms, probabilities, window_logits


@dataclasses.dataclass(frozen=True)
class Defensive(Word):
    """max(w_j, mean w) n_j / sum_k n_j, where w_j is the largest smoothed attention of one query to token j.

    w_j is the maximum over the last `last` queries and the heads of a group, each smoothed over `kernel`
    neighbours with its sum preserved. No token counts less than the mean of w over a head's older tokens,
    since a token that received no attention so far may receive some later (DefensiveKV, arXiv:2510.13334,
    section 4). n_j = mean_h ||W_O[h]' v_j||_1 over a group's heads, and it is divided by its sum over the
    layer's KV heads k, as in the authors' code. The tokens with the most mean attention score infinity, up to
    the share `mass` of it, minus what the `last` tokens before the window receive, and at most as many as the
    budget leaves beside the window.
    """

    last: int
    kernel: int = 5
    mass: float = 0.9

    weights = True
    ordered = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        older = (view.pos >= 0) & (view.pos < (seen.length - self.last)[:, None, None])
        p = attention_to_older(view, seen, self.last)
        worst = self._smoothed(p, older).max((2, 3))
        count = jnp.maximum(older.sum(-1, keepdims=True), 1).astype(jnp.float32)
        mean = jnp.where(older, worst, 0.0).sum(-1, keepdims=True) / count
        norms = jnp.where(older, output_norms(view, seen, order=1).mean(2), 0.0)
        written = norms / jnp.maximum(norms.sum(1, keepdims=True), 1e-30)
        score = jnp.maximum(worst, mean) * written
        return jnp.where(self._first(p, view, seen), jnp.inf, score)

    def _smoothed(
        self, p: Float[Array, "B K G W S"], older: Bool[Array, "B K S"]
    ) -> Float[Array, "B K G W S"]:
        flat = p.reshape(-1, p.shape[-2], p.shape[-1])
        smooth = jnp.where(older[:, :, None, None], Pool(self.kernel, "mean")(flat).reshape(p.shape), 0.0)
        return smooth * p.sum(-1, keepdims=True) / jnp.maximum(smooth.sum(-1, keepdims=True), 1e-30)

    def _first(self, p: Float[Array, "B K G W S"], view: View, seen: Observed) -> Array:
        """Choose the tokens with the most attention, as many as are needed to reach the share."""
        _, at = seen.of(Queries(self.last))
        real = jnp.maximum((at >= 0).sum(-1), 1).astype(jnp.float32)[:, None, None]
        mean = p.sum(3).mean(2) / real
        # Attention to the `last` tokens before the window, over queries and heads.
        whole = probabilities(window_logits(view, seen, self.last))
        start = (seen.length - 2 * self.last)[:, None, None]
        near = (view.pos >= start) & (view.pos < start + self.last)
        beside = jnp.where(near[:, :, None, None], whole, 0.0).sum(-1)
        share = self.mass - beside.sum((1, 2, 3)) / (beside.shape[1] * beside.shape[2] * real[:, 0, 0])
        order = jnp.argsort(-mean, axis=-1, stable=True)
        ranked = jnp.take_along_axis(mean, order, -1)
        ranked = ranked / jnp.maximum(mean.sum(-1, keepdims=True), 1e-30)
        reached = jnp.cumsum(ranked, -1) >= share[:, None, None]
        count = jnp.minimum(reached.argmax(-1), jnp.maximum(seen.n - self.last, 0)[:, None])
        taken = jnp.arange(order.shape[-1]).reshape(1, 1, -1) < count[..., None]
        return jnp.put_along_axis(jnp.zeros_like(taken), order, taken, axis=-1, inplace=False)
