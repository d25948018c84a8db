"""D2O's merge: an evicted slot is merged into the most similar kept one if they are unusually similar."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import CarryingMerge, Observed, View
from kvjax.keep.merges.merge import nearest, pick


@dataclasses.dataclass(frozen=True)
class SimilarMerge(CarryingMerge):
    """D2O's merge of keys and values (arXiv:2406.13035).

    u_i is the cosine of an evicted key i and the nearest kept key c. If u_i >= tau, slot i is merged into c,
    which becomes (e x_c + sum_i exp(u_i) x_i) / (e + sum_i exp(u_i)), where x are keys and values and the
    sums run over all slots merged into c; otherwise slot i is dropped. tau is carried per row and layer: it
    is the mean u of all slots evicted together, in all heads; later evictions first set it to beta mean(u) +
    (1 - beta) tau and then compare with it.
    """

    writes = ("k", "v")

    beta: float = 0.7

    def start(self, view: View) -> Float[Array, "B"]:
        """Return the initial threshold, 0."""
        return jnp.zeros(view.pos.shape[:1], jnp.float32)

    def carry(
        self,
        carried: Float[Array, "B"],
        view: View,
        kept: Bool[Array, "B K S"],
        leaving: Int[Array, "B K E"],
        seen: Observed,
    ) -> Float[Array, "B"]:
        """Return the threshold for these slots; unchanged in rows that evict none."""
        _, cosine = self._matched(view, kept, leaving)
        real = leaving < view.pos.shape[-1]
        count = real.sum((1, 2))
        mean = jnp.where(real, cosine, 0.0).sum((1, 2)) / jnp.maximum(count, 1).astype(jnp.float32)
        later = self.beta * mean + (1 - self.beta) * carried
        return jnp.where(count == 0, carried, jnp.where(carried == 0, mean, later))

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots = view.pos.shape[-1]
        target, cosine = self._matched(view, kept, leaving)
        joins = (leaving < slots) & (cosine >= seen.of(self)[:, None, None])
        weight = jnp.exp(jnp.where(joins, cosine, 0.0))
        target = jnp.where(joins, target, slots)
        index = jnp.minimum(leaving, slots - 1)
        add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
        total = add(jnp.full(view.pos.shape, jnp.e, jnp.float32), target, weight)

        def mean(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
            own = x.astype(jnp.float32)
            joined = add(jnp.e * own, target, weight[..., None] * pick(own, index)) / total[..., None]
            return jnp.where((total > jnp.e)[..., None], joined, own).astype(x.dtype)

        return view._replace(k=mean(view.k), v=mean(view.v))

    def _matched(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"]
    ) -> tuple[Int[Array, "B K E"], Float[Array, "B K E"]]:
        k = view.k.astype(jnp.float32)
        return nearest(pick(k, jnp.minimum(leaving, view.pos.shape[-1] - 1)), k, kept)
