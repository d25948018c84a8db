"""Attention Matching: fits biases and values of kept slots to preserve attention of reference queries."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Merge, Observation, Observed, View
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.matched import reference_logits
from kvjax.ops.base.solve import one_by_one

# The weight of a slot is between e^-3 and e^3 tokens.
_MOST = 3.0
# Directions whose squared singular value is below this share of the largest are rounding errors, and left
# out.
_CUT = 1e-4
# Inverting squares loses half of the digits, so solutions are refined once with the remaining error.
_TWICE = 2


@dataclasses.dataclass(frozen=True)
class AttentionMatching(Merge):
    """Biases and values of kept slots by least squares over the last `last` queries (arXiv:2602.16284).

    With e_ij = exp(q_i k_j / sqrt(H)) for the queries i of a KV head's group and all slots j, the bias of a
    kept slot is log w_j, where sum_kept e_ij w_j is nearest to sum_j e_ij for all i, and w is held between
    e^-3 and e^3: least squares cut to these bounds, then `turns` steps of projected gradient descent. Values
    c are those by which softmax_kept(q_i k_j / sqrt(H) + log w_j) c is nearest to the attention of i over all
    slots. Of several solutions, w is the one nearest to 1 and c the one nearest to the slots' own values, and
    directions with a singular value below a hundredth of the largest are not changed. Queries see all slots,
    those of later tokens too. A KV head without evictions is unchanged.
    """

    last: int = 64
    turns: int = 2
    writes = ("v", "bias")

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Change biases and values in the view's `kept` slots; `leaving` are those that are not kept."""
        s, real = reference_logits(view, seen, self.last)
        s, live = jax.lax.stop_gradient(s), view.pos >= 0
        top = jnp.maximum(s.max(-1, keepdims=True), -1e30)
        all_of_it = jnp.where(real[..., None] & live[:, :, None], jnp.exp(s - top), 0.0)
        of_kept = jnp.where(kept[:, :, None], all_of_it, 0.0)
        total = all_of_it.sum(-1)
        weight = self._weights(of_kept, total)
        near = of_kept * weight[:, :, None]
        near = near / jnp.maximum(near.sum(-1, keepdims=True), 1e-30)
        v = jnp.where(live[..., None], view.v, jnp.zeros((), view.v.dtype)).astype(jnp.float32)
        far = all_of_it / jnp.maximum(total, 1e-30)[..., None]
        back, c = inverse(near)[0], v
        for _ in range(_TWICE):
            missing = _times(far, v) - _times(near, c)
            c = c + _times(back, missing)
        changes = kept & (live & ~kept).any(-1, keepdims=True)
        bias = jnp.zeros(view.pos.shape, jnp.float32) if view.bias is None else view.bias
        return view._replace(
            v=jnp.where(changes[..., None], c.astype(view.v.dtype), view.v),
            bias=jnp.where(changes, bias + jnp.log(weight), bias),
        )

    def _weights(self, of_kept: Float[Array, "B K R S"], total: Float[Array, "B K R"]) -> Array:
        """Compute w [B, K, S] of kept slots; 1 elsewhere."""
        low, high = math.exp(-_MOST), math.exp(_MOST)
        back, square = inverse(of_kept)
        w = jnp.ones_like(of_kept[:, :, 0])[..., None]
        missing = lambda w: total[..., None] - _times(of_kept, w)  # noqa: E731
        for _ in range(_TWICE):
            w = w + _times(back, missing(w))
        w = jnp.clip(w, low, high)
        for _ in range(self.turns):
            gradient = _times(jnp.swapaxes(of_kept, -1, -2), missing(w))
            w = jnp.clip(w + gradient / jnp.maximum(square, 1e-12)[..., None, None], low, high)
        return w[..., 0]


def inverse(x: Float[Array, "*b R S"]) -> tuple[Float[Array, "*b S R"], Float[Array, "*b"]]:
    """Compute x's pseudo-inverse without directions that are rounding, and its largest singular value^2.

    >>> inverse(jnp.array([[2.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))[0].tolist()
    [[0.5, 0.0], [0.0, 0.25], [0.0, 0.0]]
    """
    turned = jnp.swapaxes(x, -1, -2)
    gram = _times(x, turned)
    vectors = one_by_one(lambda a: jnp.linalg.eigh(a)[1], gram)
    squares = jnp.square(_times(turned, vectors)).sum(-2)
    most = squares.max(-1)
    stands = squares > _CUT * most[..., None]
    over = jnp.where(stands, 1.0 / jnp.where(stands, squares, 1.0), 0.0)
    return _times(_times(turned, vectors) * over[..., None, :], jnp.swapaxes(vectors, -1, -2)), most


def _times(a: Float[Array, "*b I J"], b: Float[Array, "*b J K"]) -> Float[Array, "*b I K"]:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
