"""Reads of whole blocks, which are ranked by those of their keys that later tokens attend to most."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import (
    IN_PREFILL,
    IN_STEP,
    AccumulatingObservation,
    Inputs,
    Observation,
    Observed,
    SlotObservation,
    Trace,
)
from kvjax.grammar.read_kinds import Read, Remembering
from kvjax.ops.base.dtypes import wide
from kvjax.read.ranked import summed
from kvjax.state.cache import Slots


@dataclasses.dataclass(frozen=True)
class LocalLogits(SlotObservation, AccumulatingObservation):
    """sum_j <q_(m+j), k_m> over the `within` tokens after slot m's own, and over the heads of its group."""

    within: int
    phases = (IN_PREFILL, IN_STEP)

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """Compute what new queries add to it, for slots in any order; queries are consecutive.

        >>> q, k = jnp.ones((1, 1, 3, 1)), jnp.asarray([[[[1.0], [2.0], [3.0]]]])
        >>> LocalLogits(2).of(q, jnp.arange(3)[None], k, jnp.asarray([[[0, 1, -1]]])).tolist()
        [[[2.0, 2.0, 0.0]]]
        """
        (b, n, t, h), heads, kind = q.shape, k.shape[1], wide(q)
        together = q.reshape(b, heads, n // heads, t, h).astype(kind).sum(2)
        together = jnp.where((q_pos >= 0)[:, None, :, None], together, 0.0)
        offset = jnp.where(pos < 0, 2**30, pos) + 1 - q_pos[:, :1, None]
        if t == 1:
            asks = (offset <= 0) & (offset > -self.within)
            return jnp.where(asks, jnp.einsum("bkh,bksh->bks", together[:, :, 0], k.astype(kind)), 0.0)
        # The sum over any interval is the difference of two cumulative sums.
        sums = jnp.pad(jnp.cumsum(together, axis=2), [(0, 0), (0, 0), (1, 0), (0, 0)])

        def until(end: Int[Array, "B #K S"]) -> Float[Array, "B K S H"]:
            at = jnp.broadcast_to(jnp.clip(end, 0, t), (b, heads, k.shape[2]))
            return jnp.take_along_axis(sums, at[..., None], axis=2)

        return ((until(offset + self.within) - until(offset)) * k.astype(kind)).sum(-1)

    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        """Combine the values from earlier and from new queries."""
        return old + new


@dataclasses.dataclass(frozen=True)
class LocalScore(Trace):
    """How much the `within` tokens after a slot's own have attended to it: their `LocalLogits`."""

    within: int

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({LocalLogits(self.within)})

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old + seen.of(LocalLogits(self.within)).astype(old.dtype)


class BlocksAndSinks(Read):
    """The base class of reads of blocks of `page` slots: those of the first `sinks` tokens, and the best.

    `budget` is for the best blocks alone. A subclass scores blocks, and selects them with `best`.
    """

    budget: Budget
    page: int
    sinks: int

    @property
    def granule(self) -> int:
        return self.page

    def pages_visited(self, slots: int) -> int:
        """Return the largest number of blocks of a body of `slots` that a query visits (static)."""
        return min(slots // self.page, self._of_sinks + -(-self.budget.capacity(slots) // self.page))

    @property
    def _of_sinks(self) -> int:
        return -(-self.sinks // self.page)

    def best(
        self, score: Float[Array, "B #K P"], pos: Int[Array, "B K S"]
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:
        """Choose the blocks of the first tokens and those with the largest scores, and say how many count."""
        held = pos.reshape(*pos.shape[:2], -1, self.page)
        live, first = (held >= 0).any(-1), jnp.where(held < 0, 2**30, held).min(-1)
        score = jnp.where(first < self._of_sinks * self.page, jnp.inf, jnp.broadcast_to(score, live.shape))
        _, pages = jax.lax.top_k(jnp.where(live, score, -jnp.inf), self.pages_visited(pos.shape[-1]))
        full = live.sum(-1, dtype=jnp.int32)
        return pages, jnp.minimum(full, self._of_sinks - (-self.budget.count(full * self.page) // self.page))


@dataclasses.dataclass(frozen=True)
class RepresentativeKeys(BlocksAndSinks, Remembering):
    """InfLLM (arXiv:2402.04617, section 3): reads the blocks whose representative keys match best.

    A block's representatives are, in each KV head, its `keys` keys with the largest `LocalScore` at the time
    when the block is no longer among the `newest` tokens. Its score is sum <q, k> over queries, heads and
    representatives, so all heads of a layer read the same blocks; the mean of the representatives is kept,
    which ranks blocks as their sum. The budget is a share of the body; the blocks of the first `sinks` tokens
    are read beside it. by_head: every KV head ranks its own blocks, as after a keep, where KV heads hold
    different tokens.

    >>> word = RepresentativeKeys(Budget(4), page=4, newest=8, sinks=2)
    >>> word.pages_visited(64), word.granule
    (2, 4)
    """

    budget: Budget
    page: int = 128
    newest: int = 4096
    sinks: int = 128
    keys: int = 4
    skip_layers: int = 0
    by_head: bool = False

    @property
    def requires(self) -> Reasons:
        return {
            **super().requires,
            Fact.PLAIN_READING: "records how later tokens of a prompt attend to each slot",
        }

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({LocalScore(self.newest)})

    def summarise(
        self, k: Float[Array, "*b S H"], traces: dict[str, Float[Array, "*b S"]]
    ) -> dict[str, Float[Array, "*b P H"]]:
        """Compute the mean of the representative keys of every block, in the dtype of the keys."""
        score = traces[key_of(LocalScore(self.newest))]
        score = score.reshape(*score.shape[:-1], -1, self.page)
        pages = k.reshape(*score.shape, k.shape[-1])
        _, best = jax.lax.top_k(score, min(self.keys, self.page))
        return {
            "keys": jnp.take_along_axis(pages, best[..., None], axis=-2)
            .astype(wide(k))
            .mean(-2)
            .astype(k.dtype)
        }

    def select(
        self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array, length: Int[Array, "B"],
        implementation: str | None = None,
    ) -> tuple[Int[Array, "B K M"], Int[Array, "B K"]]:  # fmt: skip
        """Choose the blocks of the first tokens and those with the largest scores, and say how many count."""
        return self.best(self.score(q, body.summary["keys"][layer]), body.pos[layer])

    def score(self, q: Float[Array, "B N T H"], keys: Float[Array, "B K P H"]) -> Float[Array, "B #K P"]:
        """Compute the sum over queries and heads of <q, the mean of a block's representatives>."""
        met = jnp.einsum("bkh,bkph->bkp", summed(q, keys.shape[1]), keys.astype(wide(q)))
        return met if self.by_head else met.sum(1, keepdims=True)
