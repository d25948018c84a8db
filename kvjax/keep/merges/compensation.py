"""RazorAttention's compensation token: the mean key and value of all slots that a head has evicted."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Answering, Observed, View
from kvjax.keep.merges.merge import pick


@dataclasses.dataclass(frozen=True)
class Compensation(Answering):
    """The mean key and value of all evicted slots (RazorAttention, arXiv:2407.15891, section 3.2).

    After m evictions a query attends, beside the kept slots, to one more token with weight
    m exp(q mean(k) / sqrt(H)) and value mean(v). Kept slots are not changed.
    """

    writes = ()

    def start(self, view: View) -> dict[str, Array]:
        """Empty sums: of keys times their scale, of values, and the count."""
        lists = view.pos.shape[:2]
        return {
            "k": jnp.zeros((*lists, view.k.shape[-1]), jnp.float32),
            "v": jnp.zeros((*lists, view.v.shape[-1]), jnp.float32),
            "m": jnp.zeros(lists, jnp.float32),
        }

    def carry(
        self,
        carried: dict[str, Array],
        view: View,
        kept: Bool[Array, "B K S"],
        leaving: Int[Array, "B K E"],
        seen: Observed,
    ) -> dict[str, Array]:
        """Add the slots `leaving` to the sums; index S means no slot."""
        real, index = leaving < view.pos.shape[-1], jnp.minimum(leaving, view.pos.shape[-1] - 1)

        def total(x: Float[Array, "B K S H"]) -> Float[Array, "B K H"]:
            return jnp.where(real[..., None], pick(x, index).astype(jnp.float32), 0.0).sum(2)

        return {
            "k": carried["k"] + seen.attention.scale * total(view.k),
            "v": carried["v"] + total(view.v),
            "m": carried["m"] + real.sum(-1).astype(jnp.float32),
        }

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Return the view unchanged: evicted slots are not merged into kept ones."""
        return view

    def answer(
        self, carried: dict[str, Array], q: Float[Array, "B N T H"], fitted: dict[str, dict[str, Array]]
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """Return (out, lse) of rotated queries over all evicted slots; lse is -inf if there are none."""
        b, n, t, h = q.shape
        m = carried["m"][:, :, None, None]
        some, many = m > 0, jnp.maximum(m, 1.0)
        grouped = q.astype(jnp.float32).reshape(b, carried["m"].shape[1], -1, t, h)
        logit = jnp.einsum("bkgth,bkh->bkgt", grouped, carried["k"]) / many
        lse = jnp.where(some, logit + jnp.log(many), -jnp.inf).reshape(b, n, t)
        mean = carried["v"][:, :, None, None] / many[..., None]
        return jnp.broadcast_to(mean, (*logit.shape, mean.shape[-1])).reshape(b, n, t, -1), lse
