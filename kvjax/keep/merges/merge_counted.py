"""Merges that count tokens: slots are averaged with the number of tokens that each represents as weight."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.base.kind import tell_shares_from_numbers
from kvjax.grammar.calls import scored
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Merge, Observed, Score, Trace, View
from kvjax.keep.algebra import Made, Word
from kvjax.keep.merges.merge import nearest, pick
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedDecayedMass, AccumulatedMass
from kvjax.keep.patterns import Recent
from kvjax.keep.select import ranks

# Larger than the score of any ranked slot, and less than the infinity of protected slots.
STAYS = 1e30


@dataclasses.dataclass(frozen=True)
class CountedMerge(Merge):
    """Merges an evicted slot into the most similar slot that may absorb others, as a mean weighted by counts.

    If the cosine of their keys is at least `threshold`, the keys and values x of a slot and of the slots
    merged into it become sum n_i x_i / sum n_i, where slot i represents n_i tokens, and `bonus` log sum n_i
    is added to its logits; otherwise the evicted slot is dropped.

    takers: the share of a head's budget whose slots absorb others, at least one slot: first slots that have
    done so before, then those with the least accumulated attention; 1 is all (ZeroMerge, arXiv:2503.10714;
    EMS, arXiv:2412.08521). newest: tokens that do not begin to absorb slots, as in `Recent`: few queries have
    seen them, so their accumulated attention is small. fading: factor on accumulated attention at every newer
    query, if few slots absorb others. largest: whether a slot that absorbs others takes over the largest
    accumulated attention among them.
    """

    threshold: float = -1.0
    takers: float = 1.0
    newest: int | float = 0
    fading: float = 1.0
    bonus: float = 1.0
    largest: bool = False

    @property
    def received(self) -> Trace:
        """The accumulated attention, plain or decayed, that decides which slots absorb others."""
        return AccumulatedMass(Mass("sum")) if self.fading == 1 else AccumulatedDecayedMass(self.fading)

    @property
    def traces(self) -> frozenset[Trace]:
        """The traces that slots carry: accumulated attention, if it decides which slots absorb others."""
        return frozenset() if self.takers == 1 and not self.largest else frozenset({self.received})

    @property
    def writes(self) -> tuple[str, ...]:
        return ("k", "v", "bias", "traces") if self.largest else ("k", "v", "bias")

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots, index = view.pos.shape[-1], jnp.minimum(leaving, view.pos.shape[-1] - 1)
        k = view.k.astype(jnp.float32)
        target, cosine = nearest(pick(k, index), k, self._takers(view, kept, seen))
        joins = (leaving < slots) & (cosine >= self.threshold)
        at = jnp.where(joins, target, slots)
        new = joined(view, index, at, jnp.ones_like(cosine), self.bonus)
        if not self.largest:
            return new
        mass = view.of(self.received)
        raised = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].max(y, mode="drop")))(mass, at, pick(mass, index))
        return new._replace(traces=view.traces | {key_of(self.received): raised})

    def _takers(self, view: View, kept: Bool[Array, "B K S"], seen: Observed) -> Bool[Array, "B K S"]:
        if self.takers == 1:
            return kept
        many = jnp.maximum(seen.n * round(self.takers * 1000) // 1000, 1)[:, None, None]
        mass = -view.of(self.received)
        taking = biases(view) > 0
        able = kept & (taking | ~Recent(self.newest)(view.pos, seen.length, seen.n))
        first = jnp.where(taking, jnp.inf, mass)
        return able & (ranks(jnp.where(able, first, -jnp.inf)) < many)


tell_shares_from_numbers("newest", CountedMerge)


@dataclasses.dataclass(frozen=True)
class MergedFirst(Made):
    """A score with slots that represent several tokens ranked above all others, so that they stay."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.where(biases(view) > 0, STAYS, scored(self.score, view, seen))


def biases(view: View) -> Float[Array, "B K S"]:
    """Return the biases of slots, which are added to their logits."""
    return jnp.zeros(view.pos.shape, jnp.float32) if view.bias is None else view.bias


def joined(
    view: View, index: Int[Array, "B K E"], target: Int[Array, "B K E"], weight: Float[Array, "B K E"],
    bonus: float = 1.0,
) -> View:  # fmt: skip
    """Merge a view's slots at `index` into those at `target` (S: none), weighted by counts.

    `weight` is the weight of the merged slots; targets have weight 1. A slot that represents w tokens has
    `bonus` log w added to its logits.
    """
    add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
    votes = jnp.exp(biases(view) / bonus)
    mine = pick(votes, index)
    total, count = add(votes, target, mine * weight), add(votes, target, mine)
    grown = count > votes

    def mean(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
        own = x.astype(jnp.float32)
        new = add(votes[..., None] * own, target, (mine * weight)[..., None] * pick(own, index))
        return jnp.where(grown[..., None], new / total[..., None], own).astype(x.dtype)

    bias = jnp.where(grown, bonus * jnp.log(count), biases(view))
    return view._replace(k=mean(view.k), v=mean(view.v), bias=bias)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens with similar keys (KVMerger, arXiv:2407.08454, section 4.1).

    Neighbours are in one run if the cosine of their keys is above `threshold`. Each of the first `sinks` and
    of the newest `window` tokens is a run of its own.
    """

    threshold: float = 0.75
    sinks: int = 4
    window: int = 32

    def of(self, view: View, seen: Observed) -> tuple[Int[Array, "B K S"], Int[Array, "B K S"]]:
        """Find the run of every slot (in position order), and its pivot, the slot with the most attention."""
        slots = view.pos.shape[-1]
        k = view.k.astype(jnp.float32)
        unit = k * jax.lax.rsqrt(jnp.maximum((k * k).sum(-1, keepdims=True), 1e-24))
        cosine = jnp.pad((unit[:, :, 1:] * unit[:, :, :-1]).sum(-1), ((0, 0), (0, 0), (1, 0)))
        free = (view.pos >= self.sinks) & (view.pos < (seen.length - self.window)[:, None, None])
        before = jnp.pad(free[..., :-1], ((0, 0), (0, 0), (1, 0)))
        which = jnp.cumsum(~(free & before & (cosine > self.threshold)), -1, dtype=jnp.int32) - 1
        mass = view.of(AccumulatedMass(Mass("sum")))
        slot = jax.lax.broadcasted_iota(jnp.int32, view.pos.shape, 2)
        most = jax.vmap(jax.vmap(lambda x, at: jnp.full(slots, -jnp.inf, x.dtype).at[at].max(x)))(mass, which)
        pivots = jnp.where(mass == jnp.take_along_axis(most, which, -1), slot, slots - 1)
        least = jax.vmap(jax.vmap(lambda x, at: jnp.full(slots, slots - 1, x.dtype).at[at].min(x)))(
            pivots, which
        )
        return which, jnp.take_along_axis(least, which, -1)


@dataclasses.dataclass(frozen=True)
class Pivots(Word):
    """Ranks the pivots of runs first, then all other slots; both by accumulated attention."""

    ordered = True

    runs: Runs = Runs()

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        slot = jax.lax.broadcasted_iota(jnp.int32, view.pos.shape, 2)
        is_pivot = self.runs.of(view, seen)[1] == slot
        mass = jnp.where(view.pos >= 0, view.of(AccumulatedMass(Mass("sum"))), -jnp.inf)
        return (jnp.where(is_pivot, view.pos.shape[-1], 0) - ranks(mass)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class GaussianMerge(Merge):
    """Merges an evicted slot into the pivot p of its run with weight exp(-|k_p - k_i|^2 / 2 sigma^2).

    The pivot's own weight is 1; sigma is the mean of |k_p - k_i| over the slots merged into p, divided by
    sqrt(2). A pivot becomes the weighted mean, and the log of the number of its tokens is added to its
    logits. If the pivot is evicted, too, the slot is dropped (KVMerger, arXiv:2407.08454, section 4.2).
    """

    ordered = True
    traces = frozenset({AccumulatedMass(Mass("sum"))})

    runs: Runs = Runs()

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving`, in position order, into their pivots."""
        slots, index = view.pos.shape[-1], jnp.minimum(leaving, view.pos.shape[-1] - 1)
        target = pick(self.runs.of(view, seen)[1], index)
        joins = (leaving < slots) & pick(kept, target)
        k = view.k.astype(jnp.float32)
        # sqrt has no finite gradient at 0.
        apart = jnp.square(pick(k, target) - pick(k, index)).sum(-1)
        distance = jnp.where(joins, jnp.sqrt(jnp.maximum(apart, 1e-24)), 0.0)
        at = jnp.where(joins, target, slots)
        add = jax.vmap(jax.vmap(lambda x, t: jnp.zeros(slots, jnp.float32).at[t].add(x, mode="drop")))
        many = jnp.maximum(add(joins.astype(jnp.float32), at), 1.0)
        sigma = jnp.maximum(pick(add(distance, at) / many, target) / jnp.sqrt(2.0), 1e-12)
        return joined(view, index, at, jnp.exp(-jnp.square(distance / sigma) / 2))
