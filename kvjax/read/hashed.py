"""Reading by sampling: a query attends to slots whose hash codes collide with its own, and reweights them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.grammar import Budget
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.read_kinds import Learning, Sampling
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.lsh import collisions, hash_codes, hyperplanes, log_chance_of_two
from kvjax.state.cache import Slots
from kvjax.state.codes import layer_of
from kvjax.state.picked_pages import visited


@dataclasses.dataclass(frozen=True)
class HashSampling(Sampling, Learning):
    """MagicPIG (arXiv:2410.16179): slots are sampled by hash tables, and weighted by 1 / probability.

    Keys are hashed by `tables` of `planes` hyperplanes each (`kvjax.ops.base.lsh`), relative to their centre:
    the mean of the keys in the body at the end of the last prefill, without the sinks. A query head draws the
    slots that have its code in two tables or more, slot j with probability u_j, and their logits become s_j -
    log u_j. Sinks, the first `sinks` tokens, are always read, with unchanged logits.

    The budget, a share of the slots before the `newest` tokens, is the most drawn slots that a group of heads
    reads, beside the sinks. If its heads together draw n slots and the budget is m < n, they read m of these,
    chosen by random numbers that depend on the position, the head and the token alone, and each weighs n / m
    times as much: that is a smaller sample. With a budget of 1.0 nothing is ever cut. Hyperplanes are drawn
    from `seed`, the same for all layers and heads; they are not stored in the cache.

    Raises ValueError for `planes` outside 1 to 32, or fewer than two `tables`.

    >>> word = HashSampling(Budget(1.0), planes=2, tables=3, sinks=1, newest=1)
    >>> k, pos = jnp.asarray([[8.0, 0.0], [3.0, 4.0], [5.0, 0.0]]), jnp.arange(3)
    >>> word.learn(k, pos)["centre"].tolist()
    [4.0, 2.0]
    >>> word.summarise(k, word.learn(k, pos))["codes"].shape
    (3, 1)
    """

    budget: Budget
    planes: int = 10
    tables: int = 150
    sinks: int = 4
    newest: int = 64
    skip_layers: int = 1
    seed: int = 0
    granule = 1

    @property
    def breaks(self) -> Reasons:
        return {**super().breaks, Fact.SUMMARIES: "draws slots for every query head"}

    def __post_init__(self):
        if not 1 <= self.planes <= 32 or self.tables < 2:
            raise ValueError(
                f"{self.tables} tables of {self.planes} hyperplanes were given, expected two tables or more, "
                "since a slot is drawn where two have it, of 1 to 32 hyperplanes"
            )

    def learn(self, k: Float[Array, "*b S H"], pos: Int[Array, "*b S"]) -> dict[str, Array]:
        """Learn the centre of the keys that are hashed, [*b, H] in promote(float32, k); 0 without any."""
        hashed = (pos >= self.sinks)[..., None]
        total = jnp.where(hashed, k.astype(wide(k)), 0.0).sum(-2)
        return {"centre": total / jnp.maximum(hashed.sum(-2), 1).astype(total.dtype)}

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, UInt32[Array, "*b S W"]]:
        """Hash keys relative to their centre, or to 0 if none was learnt."""
        k = k.astype(wide(k))
        return {"codes": self._codes(k if learnt is None else k - learnt["centre"][..., None, :])}

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of slots of a body of `slots` that a query visits (static)."""
        return min(slots, self.budget.capacity(slots) + self.sinks)

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the sinks and the slots that any head of a group draws, and say how many of them count."""
        return self.sample(q, body, layer, length)[:2]

    def sample(
        self, q: Float[Array, "B N 1 H"], body: Slots, layer: int | Array, length: Int[Array, "B"]
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"], Float[Array, "B N M"]]:
        """Compute the result of `select`, and -log of the probability that each head visits each slot."""
        pos = body.pos[layer]
        b, heads, _ = pos.shape
        rows = q.reshape(b, heads, -1, q.shape[-1]).astype(wide(q))
        met = collisions(self._codes(rows), layer_of(body.summary["codes"], layer), self.planes, self.tables)
        drawn = (met >= 2) & (pos >= self.sinks)[:, :, None]
        by_any, sinks = drawn.any(2), (pos >= 0) & (pos < self.sinks)
        turn = (
            length[:, None].astype(jnp.uint32) * jnp.uint32(heads) + jnp.arange(heads, dtype=jnp.uint32)[None]
        )
        order = jnp.where(sinks, jnp.inf, jnp.where(by_any, _shuffled(pos, turn), -1.0))
        _, slots = jax.lax.top_k(order, self.pages_visited(body.capacity))
        found, held = (x.sum(-1, dtype=jnp.int32) for x in (by_any, pos >= 0))
        room = jnp.minimum(found, self.budget.count(held))
        counts = room + sinks.sum(-1, dtype=jnp.int32)

        there = jnp.arange(slots.shape[-1], dtype=jnp.int32)[None, None] < counts[..., None]
        keys = visited(body, layer, 1, slots, counts).keys().k.astype(rows.dtype)
        keys = jnp.where(there[..., None], keys - body.sums["centre"][layer][:, :, None], 0.0)
        share = jnp.log(jnp.maximum(room, 1).astype(keys.dtype) / jnp.maximum(found, 1).astype(keys.dtype))
        chance = log_chance_of_two(_cosine(rows, keys), self.planes, self.tables) + share[..., None, None]
        mine, free = (jnp.take_along_axis(x, slots[:, :, None], -1) for x in (drawn, sinks[:, :, None]))
        bias = jnp.where(free, 0.0, jnp.where(mine, -chance, -jnp.inf))
        return slots, counts, bias.reshape(b, q.shape[1], -1)

    def _codes(self, x: Float[Array, "*b S H"]) -> UInt32[Array, "*b S W"]:
        return hash_codes(x, hyperplanes(x.shape[-1], self.planes, self.tables, self.seed), self.planes)


def _cosine(q: Float[Array, "*b R H"], k: Float[Array, "*b M H"]) -> Float[Array, "*b R M"]:
    """Compute the cosine of each query and each key; 0 if one of them is 0."""
    sizes = (q * q).sum(-1)[..., :, None] * (k * k).sum(-1)[..., None, :]
    size = jnp.sqrt(jnp.where(sizes == 0, 1, sizes))
    return jnp.einsum("...rh,...mh->...rm", q, k) / size


def _shuffled(pos: Int[Array, "B K S"], turn: UInt32[Array, "B K"]) -> Float[Array, "B K S"]:
    """Draw a pseudo-random integer in [0, 2^24) for every position, different for every turn."""
    mixed = _mixed(pos.astype(jnp.uint32) ^ _mixed(turn)[..., None])
    return (mixed >> jnp.uint32(8)).astype(jnp.float32)


def _mixed(x: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Apply the finaliser of MurmurHash3 (Appleby, 2011), which scrambles 32-bit integers."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
