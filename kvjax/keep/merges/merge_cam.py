"""CaM's merge: the value of an evicted slot is distributed over the kept slots that follow it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Merge, Observation, Observed, Trace, View
from kvjax.keep.merges.merge import pick
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.score import RandomScore


@dataclasses.dataclass(frozen=True)
class ValueMerge(Merge):
    """CaM's merge of values (Zhang et al., ICML 2024): with probability p_i, v_j += v_i / m.

    j runs over the next `following` kept slots in position order, m of them. A is the accumulated attention,
    and p_i = A_i / (the mean A of these slots), at most 1. The key of i is dropped, and so is its value if
    the uniform draw for (seed, layer, head, position) is not below p_i. newest=True: A is the attention of
    the newest query alone, p_i compares it with its mean over all kept slots that follow, and each of the
    next `following` gets v_i / `following`, even if there are fewer. Slots evicted from a prompt are dropped:
    as in the authors' code, only decode steps merge.
    """

    at_prompts = False
    writes = ("v",)

    following: int = 32
    seed: int = 0
    newest: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Mass("sum")}) if self.newest else frozenset()

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset() if self.newest else frozenset({AccumulatedMass(Mass("sum"))})

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots = view.pos.shape[-1]
        index = jnp.minimum(leaving, slots - 1)
        # Kept slots by position, then all others; the kept slots that follow slot i start at gap[i].
        order = jnp.argsort(jnp.where(kept, view.pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)
        place = jnp.argsort(order, axis=-1, stable=True)
        count = kept.sum(-1, keepdims=True, dtype=jnp.int32)
        sorted_pos = jnp.where(_places(slots) < count, pick(view.pos, order), jnp.iinfo(jnp.int32).max)
        gap = jax.vmap(jax.vmap(jnp.searchsorted))(sorted_pos, pick(view.pos, index)).astype(jnp.int32)
        m = jnp.clip(count - gap, 0, self.following)

        received = seen.of(Mass("sum")) if self.newest else view.of(AccumulatedMass(Mass("sum")))
        mass = jnp.where(_places(slots) < count, pick(received, order), 0.0)
        later = count - gap if self.newest else m
        ahead = jax.lax.cumsum(mass, axis=2, reverse=True) if self.newest else self._ahead(mass)
        mean = pick(ahead, jnp.minimum(gap, slots - 1)) / jnp.maximum(later, 1).astype(jnp.float32)
        mine = pick(received, index)
        # A comparison with p_i itself could divide by 0: no slot may have received any attention.
        draw = RandomScore(self.seed)(view._replace(pos=pick(view.pos, index)), seen)
        merges = (leaving < slots) & (m > 0) & (mine > 0) & (draw * mean < mine)

        takers = jnp.full_like(m, self.following) if self.newest else jnp.maximum(m, 1)
        share = pick(view.v.astype(jnp.float32), index) / takers.astype(jnp.float32)[..., None]
        at = jnp.where(merges, gap, slots)
        add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
        given = add(jnp.zeros(view.v.shape, jnp.float32), at, share)
        given = pick(_windows(given, self.following, forward=False), place)
        v = jnp.where(kept[..., None], view.v.astype(jnp.float32) + given, view.v.astype(jnp.float32))
        return view._replace(v=v.astype(view.v.dtype))

    def _ahead(self, mass: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
        """Compute the accumulated attention of each slot and the slots after it, `following` in all."""
        return _windows(mass[..., None], self.following, forward=True)[..., 0]


def _places(slots: int) -> Int[Array, "1 1 S"]:
    return jnp.arange(slots, dtype=jnp.int32)[None, None]


def _windows(x: Float[Array, "B K S H"], size: int, forward: bool) -> Float[Array, "B K S H"]:
    """Sum over `size` neighbours: a slot and those after it (forward), or a slot and those before it."""
    size = min(size, x.shape[2])
    pad = (0, size - 1) if forward else (size - 1, 0)
    return jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 1, size, 1), (1, 1, 1, 1), ((0, 0), (0, 0), pad, (0, 0))
    )
