"""Keys and values that are computed from what is stored, before attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.ops.attention.union import Keys, Products


class Expand(NamedTuple):
    """How a layer attends if its stored slots are not its keys and values.

    queries: maps rotated queries to those for the computed keys. keys: maps stored keys and values to the
    computed ones; they may have fewer rows than the queries, if copies share slots. outputs: if given, a
    single query may attend to the stored slots instead, and `outputs` maps its result to the output; None if
    stored slots cannot be attended to. rows: if given, `keys` takes rows(stored keys, stored values) of every
    token concatenated with those of the token before it. rotate: if given, computed keys are rotated by
    rotate(keys, positions of their slots). products: if given, the products of a single query with stored
    slots.
    """

    queries: Callable[[Array], Array]
    keys: Callable[[Array, Array], tuple[Array, Array]]
    outputs: Callable[[Array], Array] | None
    rows: Callable[[Array, Array], tuple[Array, Array]] | None = None
    rotate: Callable[[Array, Array], Array] | None = None
    products: Products | None = None

    def sets(self, stored: Sequence[Keys]) -> list[Keys]:
        """Compute the keys and values of every stored set."""
        if self.rows is not None:
            stored = with_previous([s._replace(**_named(self.rows(s.k, s.v))) for s in stored])
        return [self._computed(s) for s in stored]

    def _computed(self, stored: Keys) -> Keys:
        """Compute the heads of one set; the heads computed from a KV head's slots have its positions."""
        made = stored._replace(**_named(self.keys(stored.k, stored.v)))
        each = made.k.shape[1] // stored.k.shape[1]
        if each > 1:
            beside = {n: _of_heads(getattr(made, n), each) for n in ("pos", "bias", "until")}
            made = made._replace(**beside)
        if self.rotate is None or made.pos is None:
            return made
        return made._replace(k=self.rotate(made.k, made.pos))


def _of_heads(x: Array | None, each: int) -> Array | None:
    """Repeat a per-KV-head array for each of the `each` heads computed from it; size-1 axes stay."""
    return x if x is None or x.shape[1] == 1 else jnp.repeat(x, each, axis=1)


def _named(pair: tuple[Array, Array]) -> dict[str, Array]:
    return dict(zip("kv", pair, strict=True))


def with_previous(sets: Sequence[Keys]) -> list[Keys]:
    """Every slot's k and v concatenated with those of the previous token, from any set; zeros for token 0.

    No token may be missing: positions index a table that has as many places as there are slots.
    """
    k, v = (jnp.concatenate([getattr(s, n) for s in sets], 2) for n in "kv")
    pos = jnp.concatenate([s.pos for s in sets if s.pos is not None], -1)
    slot = jax.lax.broadcasted_iota(jnp.int32, pos.shape, 2)

    def place(pos: Array, slot: Array) -> Array:
        return jnp.zeros_like(slot).at[jnp.where(pos >= 0, pos, pos.size)].set(slot, mode="drop")

    slot_of = jax.vmap(jax.vmap(place))(pos, slot)
    before = jnp.take_along_axis(slot_of, jnp.maximum(pos - 1, 0), axis=-1)[..., None]

    def beside(x: Array) -> Array:
        previous = jnp.take_along_axis(x, before, axis=2)
        return jnp.concatenate([x, jnp.where((pos > 0)[..., None], previous, jnp.zeros((), x.dtype))], -1)

    ends = np.cumsum([s.k.shape[2] for s in sets])[:-1]
    both = zip(jnp.split(beside(k), ends, 2), jnp.split(beside(v), ends, 2), strict=True)
    return [s._replace(**_named(pair)) for s, pair in zip(sets, both, strict=True)]
