"""Merging: evicted slots are folded into kept ones, whose `bias` counts the tokens they represent."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Merge, Observation, Observed, View
from kvjax.keep.observations.observe import Queries
from kvjax.ops.base.largest import first_largest


@dataclasses.dataclass(frozen=True)
class ZipMerge(Merge):
    """KeepKV's merge (arXiv:2504.09936, section 4), which preserves the current attention output.

    An evicted slot is merged into the kept slot c with the most similar key, or dropped if their cosine is
    below `threshold`. Slot i has p_i votes, the number of tokens it represents, and weight w_i = p_i s_i with
    s_i = exp(q k_i / sqrt(H)). c and all slots merged into it become one slot with p = sum p_i,
    v = sum w_i v_i / sum w_i and k = a * sum w_i k_i / sum w_i. The factor a is such that
    p exp(q k / sqrt(H)) = sum w_i, and log p is added to the logits, so the attention output of the query q
    does not change.

    Deviations: q is the newest query, where the paper predicts s_i by a moving average. With grouped queries,
    q is their mean. Where a lies outside [1/2, 2], the key is not scaled, and the bias takes the difference.
    """

    threshold: float = 0.8

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(1)})

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        b, heads, s = view.pos.shape
        k, v = view.k.astype(jnp.float32), view.v.astype(jnp.float32)
        bias = jnp.zeros(view.pos.shape, jnp.float32) if view.bias is None else view.bias
        real = leaving < s
        index = jnp.minimum(leaving, s - 1)
        target, similarity = nearest(pick(k, index), k, kept)
        target = jnp.where(real & (similarity >= self.threshold), target, s)

        query = seen.query if seen.query is not None else seen.of(Queries(1))[0]
        q = query[:, :, 0].astype(jnp.float32).reshape(b, heads, -1, k.shape[-1]).mean(2)
        scale = seen.attention.scale
        log_s = jnp.einsum("bkh,bksh->bks", q, k) * scale
        log_w = jnp.where(view.pos >= 0, log_s + bias, -jnp.inf)
        top = jnp.maximum(log_w.max(-1, keepdims=True), -1e30)
        w = jnp.exp(log_w - top)

        def gather(x: Array) -> Array:
            """Sum x over every slot and the slots merged into it."""
            joining = pick(x, index)
            rows = jax.vmap(jax.vmap(lambda y, t, z: y.at[t].add(z, mode="drop")))
            return rows(x, target, joining)

        grown = gather(jnp.ones_like(w)) > 1.5
        # Slots into which no other is merged are divided by 1, not by their weight, which may be 0: the
        # gradient of 0 / 0 is NaN.
        total = jnp.where(grown, jnp.maximum(gather(w), 1e-30), 1.0)
        votes = gather(jnp.exp(bias))
        mean_k = gather(w[..., None] * k) / total[..., None]
        mean_v = gather(w[..., None] * v) / total[..., None]
        wanted = jnp.log(total) + top - jnp.log(votes)
        have = jnp.einsum("bkh,bksh->bks", q, mean_k) * scale
        ratio = wanted / jnp.where(have == 0, 1.0, have)
        sound = (ratio >= 0.5) & (ratio <= 2.0)
        stretch = jnp.where(sound, ratio, 1.0)
        log_p = jnp.log(votes) + jnp.where(sound, 0.0, wanted - have)
        return view._replace(
            k=jnp.where(grown[..., None], mean_k * stretch[..., None], k).astype(view.k.dtype),
            v=jnp.where(grown[..., None], mean_v, v).astype(view.v.dtype),
            bias=jnp.where(grown, log_p, bias),
        )


def pick(x: Array, index: Int[Array, "B K E"]) -> Array:
    extra = (1,) * (x.ndim - 3)
    return jnp.take_along_axis(x, index.reshape(*index.shape, *extra), axis=2)


def nearest(
    e: Float[Array, "B K E H"], k: Float[Array, "B K S H"], kept: Bool[Array, "B K S"], strip: int = 128
) -> tuple[Int[Array, "B K E"], Float[Array, "B K E"]]:
    """For every evicted key, the kept slot with the largest cosine, and that cosine.

    It processes `strip` evicted keys at a time, so that no [S, S] array is ever formed.
    """

    def unit(x: Array) -> Array:
        # An empty slot's key is zero, where the gradient of a norm is not finite.
        return x * jax.lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), 1e-24))

    stay = unit(k)

    def best(part: Array) -> tuple[Array, Array]:
        cos = jnp.einsum("bksh,bkeh->bkse", stay, unit(part))
        return first_largest(jnp.where(kept[..., None], cos, -jnp.inf), 2)

    many = e.shape[2]
    if many <= strip:
        return best(e)
    # lax.map over strips: computed at once, their cosines would form the whole [S, S] array.
    padded = jnp.pad(e, ((0, 0), (0, 0), (0, -many % strip), (0, 0)))
    strips = padded.reshape(*e.shape[:2], -1, strip, e.shape[-1])
    index, cosine = jax.lax.map(best, jnp.moveaxis(strips, 2, 0))
    flat = (*e.shape[:2], padded.shape[2])
    index, cosine = (jnp.moveaxis(x, 0, 2).reshape(flat)[:, :, :many] for x in (index, cosine))
    return index, cosine
