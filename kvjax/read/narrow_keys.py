"""Reading by low-rank keys: slots are ranked in a few directions that are learnt from the prompt's keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.read_kinds import Learning, LearningFromQueries
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.solve import one_by_one
from kvjax.read.ranked import RankedSlots, summed
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class NarrowKeys(RankedSlots, Learning):
    """The base class of reads that rank slots by <q, k> in `rank` directions learnt from a head's keys."""

    rank: int = 32
    by_list = True

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Learn the directions [*b, H, r], in promote(float32, k)."""
        raise NotImplementedError

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Float[Array, "*b S r"]]:
        """Compute keys' coordinates in these directions, in their own dtype; 0 columns if none was learnt."""
        if learnt is None:
            return {"narrow": jnp.zeros((*k.shape[:-1], min(self.rank, k.shape[-1])), k.dtype)}
        narrow = jnp.einsum(
            "...sh,...hr->...sr", k.astype(wide(k)), learnt["directions"], precision="highest"
        )
        return {"narrow": narrow.astype(k.dtype)}

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        narrow, directions = body.summary["narrow"][layer], body.sums["directions"][layer]
        mine = jnp.einsum("bkh,bkhr->bkr", summed(q, narrow.shape[1]), directions, precision="highest")
        return jnp.einsum("bkr,bksr->bks", mine, narrow.astype(mine.dtype))


@dataclasses.dataclass(frozen=True)
class PrincipalKeys(NarrowKeys):
    """Loki (arXiv:2406.02542, section 4): the directions in which a head's keys vary most.

    They are the `rank` largest principal components: eigenvectors of the keys' covariance at the end of the
    last prefill.
    """

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        # Selecting slots has no gradient, and the gradient of eigenvectors need not be finite.
        x, live = jax.lax.stop_gradient(k.astype(wide(k))), (pos >= 0)[..., None]
        count = jnp.maximum(live.sum(-2, keepdims=True), 1).astype(x.dtype)
        apart = jnp.where(live, x - jnp.where(live, x, 0.0).sum(-2, keepdims=True) / count, 0.0)
        covariance = jnp.einsum("...sh,...si->...hi", apart, apart, precision="highest") / count
        vectors = one_by_one(lambda x: jnp.linalg.eigh(x)[1], covariance)
        return {"directions": vectors[..., ::-1][..., : min(self.rank, k.shape[-1])]}


@dataclasses.dataclass(frozen=True)
class HeavyChannels(NarrowKeys):
    """Double Sparsity (arXiv:2408.07092, section 3.1): the channels in which a head's keys are largest.

    They are the `rank` channels of the largest sums of squares over the keys at the end of the last prefill.
    """

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        x = jnp.where((pos >= 0)[..., None], jax.lax.stop_gradient(k.astype(wide(k))), 0.0)
        _, channels = jax.lax.top_k((x * x).sum(-2), min(self.rank, k.shape[-1]))
        return {"directions": jnp.swapaxes(jax.nn.one_hot(channels, k.shape[-1], dtype=x.dtype), -1, -2)}


@dataclasses.dataclass(frozen=True)
class HeavyProducts(NarrowKeys, LearningFromQueries):
    """TailorKV (arXiv:2505.19586): the channels in which queries and keys make the largest products.

    They are the `rank` channels of the largest sum |q_c| max |k_c|, over the prompt's `asks` newest queries
    of a group and over the keys at the end of the last prefill.
    """

    asks: int = 64

    def learn(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, k: Float[Array, "B K S H"], pos: Int[Array, "B K S"],
        asked: tuple[Float[Array, "B N W H"], Int[Array, "B W"]],
    ) -> dict[str, Array]:  # fmt: skip
        (q, at), x = asked, jnp.abs(jax.lax.stop_gradient(k.astype(wide(k))))
        largest = jnp.where((pos >= 0)[..., None], x, 0.0).max(-2)
        size = jnp.abs(jax.lax.stop_gradient(q.astype(wide(q))))
        size = jnp.where((at >= 0)[:, None, :, None], size, 0.0).sum(2)
        of_group = size.reshape(*largest.shape[:2], -1, largest.shape[-1]).sum(2)
        _, channels = jax.lax.top_k(of_group.astype(x.dtype) * largest, min(self.rank, k.shape[-1]))
        return {"directions": jnp.swapaxes(jax.nn.one_hot(channels, k.shape[-1], dtype=x.dtype), -1, -2)}
