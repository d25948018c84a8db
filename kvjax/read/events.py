"""Reading by events: a text is cut where it surprises, and events are read with their neighbours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Trace
from kvjax.grammar.read_kinds import Tracing
from kvjax.ops.base.dtypes import wide
from kvjax.read.blocks import LocalScore
from kvjax.read.ranked import RankedSlots, summed
from kvjax.read.spans import each_list, in_order, numbered, span_of, summed_up
from kvjax.state.cache import Slots


def surprising(s: Float[Array, "S"], gamma: float) -> Bool[Array, "S"]:
    """Whether a surprisal exceeds mean + gamma * deviation of those that are known, which are not 0."""
    known = s > 0
    many = known.sum(dtype=s.dtype)
    mean = jnp.where(known, s, 0).sum() / jnp.maximum(many, 1)
    spread = jnp.where(known, (s - mean) ** 2, 0).sum() / jnp.maximum(many - 1, 1)
    return known & (s > mean + gamma * jnp.sqrt(spread))


def refined(
    begins: Bool[Array, "S"], x: Float[Array, "S F"], live: Bool[Array, "S"], least: int
) -> Bool[Array, "S"]:
    """Borders of events, moved to where the keys on both sides belong together most.

    One after the other, border b goes to the t of (a + least, b], a the border before it, at which cutting
    the window from a - (b - a) // 2 to b + (b - a) // 2 in two has the largest modularity, similarities being
    products of keys. With L the sum of the keys of the left part and W that of the window, this is where the
    part of L at a right angle to W is longest. A border closer than `least` to the one before is left out.

    >>> x = jnp.asarray([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    >>> refined(jnp.arange(6) == 4, x, jnp.arange(6) < 6, 1).tolist()
    [False, False, False, True, False, False]
    """
    slots = x.shape[0]
    total = jnp.pad(jnp.cumsum(jnp.where(live[:, None], x, 0), axis=0), [(1, 0), (0, 0)])
    t, end = jnp.arange(slots + 1, dtype=jnp.int32), live.sum(dtype=jnp.int32)
    begins = begins & live & (t[:-1] > 0)
    (borders,) = jnp.nonzero(begins, size=slots, fill_value=slots)

    def move(i: int | Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        before, found = carry
        b = borders[i].astype(jnp.int32)
        half = (b - before) // 2
        low, high = jnp.maximum(before - half, 0), jnp.minimum(b + half, end)
        left, window = total - total[low][None], total[high] - total[low]
        along = left @ window
        apart = (left * left).sum(-1) - along**2 / jnp.maximum(window @ window, 1e-30)
        able = (t >= before + least) & (t <= b) & (t > before)
        there = b - before >= least
        best = jnp.argmax(jnp.where(able, apart, -jnp.inf)).astype(jnp.int32)
        return jnp.where(there, best, before), found.at[jnp.where(there, best, slots)].set(True, mode="drop")

    start = jnp.zeros((), jnp.int32), jnp.zeros(slots, bool)
    return jax.lax.fori_loop(0, begins.sum(dtype=jnp.int32), move, start)[1]


@dataclasses.dataclass(frozen=True)
class SurprisingEvents(RankedSlots, Tracing):
    """EM-LLM (arXiv:2407.09450, section 3): reads events of a text, and the events beside them.

    An event begins where a token's surprisal exceeds mean + `gamma` standard deviations of the prompt's,
    after its border has moved (`refined`, by the keys of all heads of a layer). It is represented in each KV
    head by the mean of its `keys` keys with the largest `LocalScore`, and ranks by sum <q, mean> over queries
    and heads. Events are read in that order until all but the share `beside` of the budget is filled, then
    the neighbours of those that are, then the others; of an event that fits only in part, the older slots.
    The first `sinks` tokens are always read. What begins where is found at the end of the last prefill; later
    tokens belong to the last event, and of more than `most` events neighbours are joined. by_head: every KV
    head has events of its own, as after a keep, where KV heads hold different tokens. surprisal: the trace of
    surprisals, 0 where they are unknown (`kvjax.keep.observations.trace.Surprisal`).
    """

    surprisal: Trace = dataclasses.field(kw_only=True)
    sinks: int = 128
    gamma: float = 1.0
    keys: int = 4
    beside: float = 0.3
    least: int = 8
    most: int = 512
    by_head: bool = False

    @property
    def requires(self) -> Reasons:
        why = "asks how likely a prompt's tokens were"
        return {**super().requires, Fact.PLAIN_READING: why, Fact.WHOLE_PROMPTS: why}

    @property
    def marks(self) -> frozenset[Trace]:
        return frozenset({self.surprisal, LocalScore(self.newest)})

    def summarise(
        self, k: Float[Array, "*b S H"], learnt: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Nothing: events are known by positions."""
        return {}

    def learn(
        self, k: Float[Array, "*b K S H"], pos: Int[Array, "*b K S"],
        traces: dict[str, Float[Array, "*b K S"]],
    ) -> dict[str, Array]:  # fmt: skip
        """Where events begin [*b, K, C], and their mean keys [*b, K, C, H] in promote(float32, k)."""
        k = jax.lax.stop_gradient(k.astype(wide(k)))
        marks = self.surprisal, LocalScore(self.newest)
        surprise, local = (jax.lax.stop_gradient(traces[key_of(t)]) for t in marks)
        if not self.by_head:
            starts, keys = each_list(self._events, k.ndim - 3, k, pos, surprise, local)
            return {"starts": starts, "keys": keys}
        alone = [x[..., None, :] for x in (pos, surprise, local)]
        starts, keys = each_list(self._events, k.ndim - 2, k[..., None, :, :], *alone)
        return {"starts": starts[..., 0, :], "keys": keys[..., 0, :, :]}

    def _events(
        self, k: Float[Array, "K S H"], pos: Int[Array, "K S"], surprise: Float[Array, "K S"],
        local: Float[Array, "K S"],
    ) -> tuple[Int[Array, "K C"], Float[Array, "K C H"]]:  # fmt: skip
        """Form the events of heads that hold the same tokens, and their mean keys in each head."""
        pos, k, surprise, local = jax.vmap(in_order)(pos, k, surprise, local)
        live = pos[0] < 2**30
        borders = surprising(jnp.where(live, surprise[0], 0), self.gamma)
        all_keys = jnp.moveaxis(k, 0, 1).reshape(k.shape[1], -1)
        number = numbered(refined(borders, all_keys, live, self.least), live, self.most)

        def one(k: Array, pos: Array, local: Array) -> tuple[Array, Array]:
            order = jnp.lexsort((-local, number))
            first = jnp.searchsorted(number, number).astype(jnp.int32)
            place = jnp.zeros_like(number).at[order].set(jnp.arange(len(number), dtype=jnp.int32)) - first
            return summed_up(number, pos, k, live & (place < self.keys), self.most)

        return jax.vmap(one)(k, pos, local)

    def score(self, q: Float[Array, "B N T H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        starts, keys, pos = body.sums["starts"][layer], body.sums["keys"][layer], body.pos[layer]
        met = jnp.einsum("bkh,bkch->bkc", summed(q, keys.shape[1]), keys, precision="highest")
        if not self.by_head:
            met = jnp.broadcast_to(met.sum(1, keepdims=True), met.shape)
        event, live, first = span_of(starts, pos), pos >= 0, (pos >= 0) & (pos < self.sinks)
        many, of_sinks = (x.sum(-1, dtype=jnp.int32) for x in (live, first))
        ones = (live & ~first).astype(jnp.int32)
        sizes = each_list(lambda e, x: jnp.zeros(self.most, jnp.int32).at[e].add(x), 2, event, ones)
        value = self._order(met, sizes, self.budget.count(many) - of_sinks)
        return jnp.where(first, jnp.inf, jnp.take_along_axis(value, event, -1).astype(met.dtype))

    def _order(
        self, met: Float[Array, "B K C"], sizes: Int[Array, "B K C"], room: Int[Array, "B K"]
    ) -> Int[Array, "B K C"]:
        """How early events are read: those that match, then their neighbours, then the others."""
        count = met.shape[-1]
        order = jnp.argsort(jnp.where(sizes > 0, -met, jnp.inf), -1, stable=True)
        rank = jnp.argsort(order, -1).astype(jnp.int32)
        in_turn = jnp.take_along_axis(sizes, order, -1)
        before = jnp.take_along_axis(jnp.cumsum(in_turn, -1, dtype=jnp.int32) - in_turn, rank, -1)
        kept_free = jnp.floor(self.beside * room.astype(met.dtype) + 1e-4).astype(jnp.int32)
        similar = (sizes > 0) & (before < (room - kept_free)[..., None])
        by = jnp.pad(jnp.where(similar, rank, count), [(0, 0), (0, 0), (1, 1)], constant_values=count)
        nearest = jnp.minimum(by[..., :-2], by[..., 2:])
        return jnp.where(similar, 2 * count - rank, jnp.where(nearest < count, count - nearest, -rank))
