"""Expected attention: scores keys by the distribution of future queries, in closed form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import QueryMoments
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class QueryStatistics(Observation, FittedWord):
    """The mean and covariance of a model's unrotated queries, fitted offline.

    fitted: "mean" [L, N, H] and "covariance" [L, N, H, H], as `kvjax fit expected-attention` writes them.
    """

    fitted: Fitted | None = None
    by = "expected-attention"
    # Unfitted, the statistics are those of the prompt's own queries.
    fit_first = False

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.heads, model.head_dim)
        check_sizes(self, "statistics", "layers, heads, channels", "mean", sizes)

    def __call__(self, inputs: Inputs) -> tuple[Float[Array, "B N H"], Float[Array, "B N H H"]]:
        assert self.fitted is not None
        arrays, rows = inputs.fitted[self.fitted.digest], inputs.pos.shape[0]
        mean, spread = (jnp.repeat(arrays[name][None], rows, 0) for name in ("mean", "covariance"))
        return mean, spread


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Word):
    """score[j] = (softmax_j(k_j m / sqrt(H) + k_j' C k_j / 2H) + epsilon) ||v_j|| (arXiv:2510.00636).

    Future queries are modelled as Gaussian. Before rotation, their mean and covariance are those of the
    prompt's queries without the first `sinks`, or those in `statistics` if fitted; m and C are both after the
    average rotation of the next `future` positions. The softmax runs over the slots that are not sinks, and
    the heads of a group are averaged.
    """

    future: int = 512
    sinks: int = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    statistics: QueryStatistics = QueryStatistics()

    def __post_init__(self):
        if self.future < 1 or self.sinks < 0 or not 0 <= self.epsilon < float("inf"):
            raise ValueError(
                "expected attention needs future >= 1 positions, sinks >= 0 and a finite epsilon >= 0, got "
                f"future={self.future}, sinks={self.sinks}, epsilon={self.epsilon}"
            )

    @property
    def moments(self) -> QueryMoments | QueryStatistics:
        if self.statistics.fitted is not None:
            return self.statistics
        return QueryMoments(self.sinks, self.covariance)

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({self.moments})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mean, cov = seen.of(self.moments)
        b, heads, s, h = view.k.shape
        turn = average_turn(seen, h, self.future)
        mean = turn(mean).reshape(b, heads, -1, h)
        k = view.k.astype(jnp.float32)
        scale = seen.attention.scale
        logit = jnp.einsum("bkgh,bksh->bkgs", mean, k) * scale
        if self.covariance:
            # C = R cov R' for the average rotation R, applied to one side and then to the other.
            cov = jnp.swapaxes(turn(jnp.swapaxes(turn(cov), -1, -2)), -1, -2)
            cov = cov.reshape(b, heads, -1, h, h)
            logit = logit + jnp.einsum("bksh,bkghj,bksj->bkgs", k, cov, k) * (scale**2 / 2)
        open_slots = (view.pos >= self.sinks)[:, :, None]
        p = jax.nn.softmax(jnp.where(open_slots, logit, -jnp.inf), axis=-1, where=open_slots).mean(2)
        if not self.value_norm:
            return p
        return (p + self.epsilon) * jnp.linalg.norm(view.v.astype(jnp.float32), axis=-1)


def average_turn(seen: Observed, head_dim: int, future: int) -> Callable[[Array], Array]:
    """Make the function x -> mean over a row's next `future` positions of RoPE(x), for x [B, N, ..., H]."""
    pos = seen.length[:, None] + jnp.arange(future, dtype=jnp.int32)[None]
    cos, sin = angles(seen.attention.rope, pos, head_dim, seen.length[:, None])
    cos, sin = cos.mean(1), sin.mean(1)

    def turn(x: Array) -> Array:
        at = (x.shape[0], *(1,) * (x.ndim - 2), -1)
        return rotate(x.astype(jnp.float32), cos.reshape(at), sin.reshape(at), seen.attention.rope.start)

    return turn
