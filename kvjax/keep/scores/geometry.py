"""Scores by the position of a key or value in the distribution of its head, independent of queries."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import QueryMoments
from kvjax.keep.scores.expected import average_turn
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class KeyDistinctness(Word):
    """score[j] = -cos(k_j, mean_i k_i / ||k_i||): keys that point away from the mean (arXiv:2504.15364)."""

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        k = view.k.astype(jnp.float32)
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        # The sum replaces the mean: only its direction matters.
        anchor = jnp.where((view.pos >= 0)[..., None], unit, 0.0).sum(2)
        anchor = anchor / jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.einsum("bksh,bkh->bks", unit, anchor)


@dataclasses.dataclass(frozen=True)
class LocalNorms(Word):
    """score[j] = a_j b_j / sum_i a_i b_i: a slot's share of the squared norms in its window.

    a_j = ||k_j||^2 / sum ||k_i||^2 and b_j likewise of values, where the sums run over the `window` slots of
    j's window; windows are consecutive from a row's first slot on (CurDKV, arXiv:2509.15038).
    """

    ordered = True

    window: int = 16

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        score = self._shares(view.k, view.pos >= 0) * self._shares(view.v, view.pos >= 0)
        return score / jnp.maximum(score.sum(-1, keepdims=True), 1e-30)

    def _shares(self, x: Float[Array, "B K S H"], live: Bool[Array, "B K S"]) -> Float[Array, "B K S"]:
        squares = jnp.where(live, jnp.square(x.astype(jnp.float32)).sum(-1), 0.0)
        slots = squares.shape[-1]
        parts = jnp.pad(squares, ((0, 0), (0, 0), (0, -slots % self.window)))
        parts = parts.reshape(*squares.shape[:2], -1, self.window)
        shares = parts / jnp.maximum(parts.sum(-1, keepdims=True), 1e-30)
        return shares.reshape(*squares.shape[:2], -1)[..., :slots]


@dataclasses.dataclass(frozen=True)
class Leverage(Word):
    """score[j] = x_j' (X'X + ridge I)^-1 x_j of sketched keys: how poorly the other keys span key j.

    x_j = (k_j - mean_i k_i) Phi of keys before rotation; Phi [H, rank] is Gaussian with variance
    1 / rank, drawn from `seed`, the same for all heads, layers and rows (Compactor, arXiv:2507.08143).
    """

    rank: int = 48
    ridge: float = 1e-2
    seed: int = 0

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = (view.pos >= 0)[..., None]
        k = jnp.where(live, unrotated(view, seen), 0.0)
        mean = k.sum(2, keepdims=True) / jnp.maximum(live.sum(2, keepdims=True), 1).astype(k.dtype)
        sketch = jnp.broadcast_to(self.sketch(seen, k.shape[-1]), (k.shape[1], k.shape[-1], self.rank))
        x = jnp.where(live, jnp.einsum("bksh,khr->bksr", k - mean, sketch, precision="highest"), 0.0)
        return leverage(x, jnp.ones(x.shape[:3], jnp.float32), self.ridge)

    def sketch(self, seen: Observed, width: int) -> Float[Array, "*_ H R"]:
        """Phi for keys of `width` channels."""
        return jax.random.normal(jax.random.key(self.seed), (width, self.rank), jnp.float32) / math.sqrt(
            self.rank
        )


@dataclasses.dataclass(frozen=True)
class ValueLeverage(Word):
    """score[j] = w_j v_j' (I + sum_i (w_i + 1e-6) v_i v_i')^-1 v_j: weighted leverage of values.

    w_j = exp(tau (cos(k_j, m) - max_i cos(k_i, m))) where m is the mean of the unrotated queries after the
    first `sinks`, rotated by the average rotation of the next `future` positions. Sums run over the slots
    that are not sinks; the query heads of a group are averaged (CapKV, arXiv:2604.25975).
    """

    tau: float = 5.0
    future: int = 512
    sinks: int = 4

    @property
    def moments(self) -> QueryMoments:
        return QueryMoments(self.sinks, covariance=False)

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.moments})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        b, heads, slots, h = view.k.shape
        mean = average_turn(seen, h, self.future)(seen.of(self.moments)[0]).reshape(b, heads, -1, h)
        open_slots = (view.pos >= self.sinks)[:, :, None]
        cosine = jnp.einsum("bkgh,bksh->bkgs", _unit(mean), _unit(view.k.astype(jnp.float32)))
        top = jnp.max(cosine, -1, keepdims=True, where=open_slots, initial=-1.0)
        w = jnp.where(open_slots, jnp.exp(self.tau * (cosine - top)), 0.0)
        v = jnp.where(open_slots[:, :, 0, :, None], view.v.astype(jnp.float32), 0.0)

        def of_query_head(w: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            # The sum is over (w + 1e-6) v v', but the score itself is weighted by w alone.
            return w * leverage(v, w + 1e-6, 1.0)

        return jnp.stack([of_query_head(w[:, :, i]) for i in range(w.shape[2])]).mean(0)


def leverage(
    x: Float[Array, "B K S R"], weights: Float[Array, "B K S"], ridge: float
) -> Float[Array, "B K S"]:
    """x_j' (ridge I + sum_i weights_i x_i x_i')^-1 x_j; rows that do not count are zeros.

    The ridge enters the sum as further rows, sqrt(ridge) I. All rows are transformed to coordinates in which
    the sum is I; there, a row's squared length is its leverage. If the ridge is smaller than the rounding
    error of the sum, as after long texts, a Cholesky factorisation of the sum itself breaks down. So there
    are three rounds, and the first two add a share of the trace, which leaves a better conditioned sum for
    the next (shifted CholeskyQR, Fukaya et al., 2018, arXiv:1809.11085).
    """
    eye = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=jnp.float32), (*x.shape[:2], x.shape[-1], x.shape[-1]))
    rows, least = math.sqrt(ridge) * eye, jnp.full(x.shape[:2], ridge, jnp.float32)
    for share in (1e-5, 1e-5, 0.0):
        gram = jnp.einsum("bksr,bks,bksq->bkrq", x, weights, x, precision="highest")
        gram += jnp.einsum("bksr,bksq->bkrq", rows, rows, precision="highest")
        shift = share * jnp.trace(gram, axis1=-2, axis2=-1)
        back = _whitening(gram + shift[..., None, None] * eye, least + shift)
        x, rows = (jnp.einsum("bksr,bkrq->bksq", y, back, precision="highest") for y in (x, rows))
        least = least / (least + shift)
    return jnp.square(x).sum(-1)


def _whitening(gram: Float[Array, "B K R R"], least: Float[Array, "B K"]) -> Float[Array, "B K R R"]:
    """W with W' gram W = I, upper triangular. least: a lower bound of `gram`'s eigenvalues, up to rounding.

    Computed column by column in plain operations: on CPUs the library's Cholesky can wait forever for threads
    that another program holds.
    """
    rank, at = gram.shape[-1], jnp.arange(gram.shape[-1])

    def eliminate(r: int | Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        left, rest, found = state
        root = jnp.sqrt(jnp.maximum(left[..., r, r], least))[..., None]
        column = jnp.where((at >= r)[None, None], left[..., r] / root, 0.0)
        solved = rest[..., r] / root
        left = left - column[..., :, None] * column[..., None, :]
        rest = rest - solved[..., None] * column[..., None, :]
        return left, rest, found.at[..., r].set(solved)

    eye = jnp.broadcast_to(jnp.eye(rank, dtype=gram.dtype), gram.shape)
    return jax.lax.fori_loop(0, rank, eliminate, (gram, eye, jnp.zeros_like(gram)))[2]


def unrotated(view: View, seen: Observed) -> Float[Array, "B K S H"]:
    """Undo the rotation of a view's keys."""
    rope = seen.attention.rope
    cos, sin = angles(rope, jnp.maximum(view.pos, 0), view.k.shape[-1], seen.length[:, None, None])
    size = rope.amplitude**2
    return rotate(view.k.astype(jnp.float32), cos / size, -sin / size, rope.start)


def _unit(x: Float[Array, "*b H"]) -> Float[Array, "*b H"]:
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
