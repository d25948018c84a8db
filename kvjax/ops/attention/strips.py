"""Attention of many queries in plain jnp, in strips of queries, so that no map of all queries exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.union import Keys, Masses, Reduction, attend, newer_queries
from kvjax.ops.base.dispatch import platform

# Queries per strip, and the number of key prefixes into which a long prompt is cut: each prefix is compiled
# separately and its strips run in a loop, so more prefixes skip more of the causal half and take longer to
# compile.
STRIP = 128
PREFIXES = 8
REMAT_FROM = 1024
# Above this many bytes of scores, a CPU computes one KV head at a time, which stays in its cache. Other
# devices take all heads at once, since these may be split over several devices.
CACHED_BYTES = 2**24
# Queries, their positions, and how many queries of their row are newer, if needed.
Strip = tuple[Array, Array, Array | None]


def causal_in_strips(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Attention of T new tokens over `past` sets and over themselves; returns (out, lse, masses).

    Works in strips of queries, so no [T, T] map exists, and a strip hardly reads new keys after its last row:
    the causal half is skipped. Masses come as (one per past set ..., the new set). The new keys must be in
    the order of the queries.
    """
    whole = partial(_in_strips, window=window, mass=mass, scale=scale, softcap=softcap, clip=clip)
    b, n, t, _ = q.shape
    heads, slots = new.k.shape[1], t + sum(s.k.shape[2] for s in past)
    if heads == 1 or platform() != "cpu" or 4 * b * n * min(t, STRIP) * slots < CACHED_BYTES:
        return whole(q, new, past, q_pos)

    def split(x: Array) -> Array:
        per_head = x.reshape(b, heads, -1, *x.shape[2:]) if x.shape[1] >= heads else x[:, None]
        return jnp.moveaxis(jnp.broadcast_to(per_head, (b, heads, *per_head.shape[2:])), 1, 0)

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(b, -1, *x.shape[3:])

    def one(part: tuple[Array, Keys, tuple[Keys, ...]]) -> tuple[Array, Array, tuple[Masses, ...]]:
        return whole(part[0], part[1], part[2], q_pos)

    parts = jax.tree.map(split, (q, new, tuple(past)))
    return jax.tree.map(join, jax.lax.map(one, parts))


def _in_strips(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    window: int | None,
    mass: tuple[Reduction, ...],
    **options: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """`causal_in_strips` for all heads at once; `options` are those of `attend`."""
    t = q.shape[2]
    part = -(-t // (PREFIXES * STRIP)) * STRIP
    outs, lses, total = [], [], None
    newer = newer_queries(q_pos, mass)
    for start in range(0, t, part):
        stop = min(start + part, t)
        # Padding is on the right, so positions increase along a row, and older strips contain nothing newer.
        first = 0 if window is None else max(0, start - window + 1)
        seen = jax.tree.map(lambda x, a=first, z=stop: x[:, :, a:z], new)

        # The gradient recomputes the probabilities, or a long prompt would store its whole [T, T] map.
        @(jax.checkpoint if t >= REMAT_FROM else lambda f: f)
        def strip(at: Strip, seen: Keys = seen) -> tuple[Array, Array, tuple[Masses, ...]]:
            return attend(at[0], (*past, seen), at[1], window=window, mass=mass, newer=at[2], **options)

        later = None if newer is None else newer[:, start:stop]
        out, lse, masses = _by_strips(strip, q[:, :, start:stop], q_pos[:, start:stop], mass, later)
        outs.append(out)
        lses.append(lse)
        if mass:
            wide = jnp.zeros((*new.k.shape[:2], t), masses[-1][0].dtype)
            masses = (*masses[:-1], tuple(wide.at[:, :, first:stop].set(m) for m in masses[-1]))
            total = masses if total is None else _joined(mass, total, masses)
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=2), total or ()


def _joined(mass: tuple[Reduction, ...], a: tuple[Masses, ...], b: tuple[Masses, ...]) -> tuple[Masses, ...]:
    """Join the masses of every set over both groups of queries."""
    return tuple(
        tuple(one.join(x, y) for one, x, y in zip(mass, *pair, strict=True))
        for pair in zip(a, b, strict=True)
    )


def _by_strips(
    strip: Callable[[Strip], tuple[Array, Array, tuple[Masses, ...]]],
    q: Float[Array, "B N T H"],
    q_pos: Int[Array, "B T"],
    mass: tuple[Reduction, ...] = (),
    newer: Int[Array, "B T"] | None = None,
    size: int = STRIP,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Run `strip` on every `size` queries and join masses; with less than two strips, all at once."""
    b, n, t, h = q.shape
    if t <= size or (t % size and t < 2 * size):
        return strip((q, q_pos, newer))
    if rest := t % size:
        cuts = (slice(0, t - rest), slice(t - rest, t))
        parts = [
            _by_strips(strip, q[:, :, at], q_pos[:, at], mass, None if newer is None else newer[:, at], size)
            for at in cuts
        ]
        out, lse = (jnp.concatenate(x, axis=2) for x in ([p[0] for p in parts], [p[1] for p in parts]))
        return out, lse, _joined(mass, parts[0][2], parts[1][2])
    rows = jnp.moveaxis(q.reshape(b, n, t // size, size, h), 2, 0)
    cut = lambda x: jnp.moveaxis(x.reshape(b, t // size, size), 1, 0)  # noqa: E731
    strips = (rows, cut(q_pos), None if newer is None else cut(newer))
    shapes = jax.eval_shape(strip, jax.tree.map(lambda x: x[0], strips))[2]

    def body(masses: tuple[Masses, ...], at: Strip) -> tuple[tuple[Masses, ...], Any]:
        out, lse, new = strip(at)
        return _joined(mass, masses, new), (out, lse)

    # Masses are never negative, so zero starts a sum and a maximum alike.
    zero = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), shapes)
    masses, (outs, lses) = jax.lax.scan(body, zero, strips)
    return jnp.moveaxis(outs, 0, 2).reshape(b, n, t, -1), jnp.moveaxis(lses, 0, 2).reshape(b, n, t), masses


def attend_in_strips(
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    mass: tuple[Reduction, ...] = (),
    size: int = STRIP,
    **options: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Return (out, lse, masses) of T queries over `sets` in any order, `size` of them at a time.

    If masses decay, queries must be in token order; options: of `attend`.
    """
    t, newer = q.shape[2], newer_queries(q_pos, mass)

    @(jax.checkpoint if t >= REMAT_FROM else lambda f: f)
    def strip(at: Strip) -> tuple[Array, Array, tuple[Masses, ...]]:
        return attend(at[0], sets, at[1], mass=mass, newer=at[2], **options)

    return _by_strips(strip, q, q_pos, mass, newer, size)


def attend_to_all(
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B N T V"]:
    """Non-causal attention of T tokens over every live key of `sets`; 0 if there is none.

    Works in strips of queries, so no [T, S] map exists. Queries with position -1 see nothing.
    """
    # A key at position 0 is in no query's future.
    sets = [s if s.pos is None else s._replace(pos=jnp.minimum(s.pos, 0)) for s in sets]
    return attend_in_strips(q, sets, q_pos, scale=scale, softcap=softcap)[0]
