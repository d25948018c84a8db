"""Attention of a prompt whose tokens are split, in order, over several devices (sequence parallelism).

Keys, values or queries are exchanged between devices (Ring Attention, arXiv:2310.01889), in the way that
`kvjax.ops.attention.ways` chooses:

* "whole": every device holds the set, so nothing is sent;
* "gather": keys and values of all devices are gathered on each, and attended to in one pass;
* "keys": keys and values go from device to device, and each merges attention of its queries to them;
* "helped": the same over half of the ring, and devices with early tokens, which see fewer keys, attend on
  behalf of those with late tokens;
* "queries": the set stays in place; queries go round and return with their (out, lse) (for a long past).

No device holds a whole attention map, or queries and outputs of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import axes_of_queries, each_device, specs_of
from kvjax.ops.attention.prompt_attention import attention_over, received
from kvjax.ops.attention.strips import STRIP
from kvjax.ops.attention.union import Keys, Masses, Reduction, merge
from kvjax.ops.attention.ways import GATHER, HELPED, KEYS, QUERIES, WHOLE, Way, ways_of
from kvjax.ops.base.dtypes import wide

# From the stored keys and values of a set to those that queries attend to.
Expanding = Callable[[Keys], Keys]


class _Asking(NamedTuple):
    """The static arguments of every device.

    names: the mesh axes of tokens, over `parts` devices. shared: how many channels of the keys are the
    values, if these are not sent separately. skips: whether a device may skip keys that none of its queries
    sees; not if the compiler splits its work over more devices, which would wait for it. rest: options of
    `attention_over`.
    """

    names: tuple[str, ...]
    parts: int
    ways: tuple[Way, ...]
    mass: tuple[Reduction, ...]
    clip: tuple[float, float] | None
    expand: Expanding | None
    shared: int
    skips: bool
    rest: dict[str, Any]

    def met(self, keys: Keys) -> Keys:
        """Prepare a stored set as attention reads it: values sliced from shared keys, latents expanded."""
        keys = keys._replace(v=keys.k[..., : self.shared]) if self.shared else keys
        return keys if self.expand is None else self.expand(keys)

    def handed_on(self, x: Any, by: int = 1, round_: bool = True) -> Any:
        """Receive x from the device `by` places before; zeros if there is none and the ring is open."""
        n = self.parts
        pairs = [(i, (i + by) % n) for i in range(n) if round_ or 0 <= i + by < n]
        return jax.tree.map(lambda y: jax.lax.ppermute(y, self.names, pairs), x)

    def gathered(self, keys: Keys) -> Keys:
        """Gather the slots of all devices."""
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.names, axis=2, tiled=True), keys)


def split_attention(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    on: OnMesh,
    extra: Sequence[Keys] = (),
    expand: Expanding | None = None,
    shared: int = 0,
    window: int | None = None,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
    **rest: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """`causal_attention` of T tokens that the mesh's rules split, over `extra`, `past` and themselves.

    extra: sets that every query sees, without masses. past: sets whose slots may be split over the same
    devices. expand: from a stored set to the attended one. shared: how many channels of the keys are the
    values. clip: sets are then gathered, because parts cannot be merged. rest: scale, softcap and
    implementation.

    >>> from kvjax.mesh.on_mesh import as_mesh
    >>> from kvjax.mesh.rules import Rules
    >>> on, pos = OnMesh(as_mesh("seq=1"), Rules(tokens="seq")), jnp.arange(4)[None]
    >>> x = jnp.ones((1, 1, 4, 8))
    >>> split_attention(x, Keys(x, x, pos[:, None]), (), pos, on=on, scale=1.0)[0].shape
    (1, 1, 4, 8)
    """
    names = on.rules.mesh_axes("tokens")
    given, sets = [*extra, *past, new], [*past, new]
    axes = _axes(on, q, given, names, expand, bool(mass))
    made = sets if expand is None else [jax.eval_shape(expand, s) for s in sets]
    ways = ways_of(on, q, sets, made, window, clip, bool(shared))
    parts, options = on.devices("tokens"), rest | dict(window=window)
    skips = axes is not None or on.mesh.size == parts
    asking = _Asking(names, parts, ways, mass, clip, expand, shared, skips, options)
    sets = [s._replace(v=None) for s in sets] if shared else sets
    lie = [("batch", "kv_heads", None if way.kind == WHOLE else "slots") for way in ways[:-1]]
    lie = [*lie, ("batch", "kv_heads", "tokens")]
    asked = (*(axes or ("batch", None)), "tokens")
    specs = [
        specs_of(on, asked, q),
        specs_of(on, ("batch", "tokens"), q_pos),
        [specs_of(on, ("batch", "kv_heads"), s) for s in extra],
        [specs_of(on, of, s) for of, s in zip(lie, sets, strict=True)],
    ]
    found = tuple(tuple(on.spec(of, s.k.shape[:3]) for _ in mass) for of, s in zip(lie, made, strict=True))
    out = on.spec(asked, q.shape[:3])
    outs = out, out, found if mass else ()
    here = each_device(on, partial(_of_one_device, asking), specs, outs, None if axes else names)
    return here(q, q_pos, list(extra), sets)


def _axes(
    on: OnMesh, q: Array, sets: Sequence[Keys], names: tuple[str, ...], expand: Expanding | None, mass: bool
) -> Axes | None:
    """Return the first axes of queries, if a device has everything they attend to except the split tokens.

    None: the compiler splits rows and heads, and no kernel runs.
    """
    if expand is not None:
        return None
    found = {axes_of_queries(on, keys.k.shape[1], names, mass=mass) for keys in sets}
    return found.pop() if len(found) == 1 else None


# --- on one device -------------------------------------------------------------------------------------


def _of_one_device(
    asking: _Asking, q: Array, q_pos: Array, extra: list[Keys], sets: list[Keys]
) -> tuple[Array, Array, tuple[Masses, ...]]:
    """Attend to all sets with one device's queries; also return what its slots received from all queries."""
    ways, mass, new = asking.ways, asking.mass, len(sets) - 1
    # Sets on this device, to be attended to at once; its own new keys always are.
    here = {
        i: asking.met(asking.gathered(keys) if way.kind == GATHER else keys)
        for i, (keys, way) in enumerate(zip(sets, ways, strict=True))
        if way.kind in (WHOLE, GATHER) or i == new
    }
    afar = [i for i in range(len(sets)) if i not in here or ways[i].kind in (KEYS, HELPED)]
    strip = min(_strip(q, keys) for keys in here.values())
    out, lse, found = attention_over(
        q, (*extra, *here.values()), q_pos, mass=() if afar else mass, clip=asking.clip, strip=strip,
        **asking.rest,
    )  # fmt: skip
    part = out.astype(wide(out)), lse
    for i in afar:
        part = _joined_part(asking, part, q, q_pos, sets[i], ways[i], i == new)
    out, lse = part[0].astype(out.dtype), part[1]
    if not mass:
        return out, lse, ()
    later = _later(asking, q_pos)
    if afar:
        seen = {i: _received(asking, q, keys, lse, q_pos, later) for i, keys in here.items()}
    else:
        each = found[len(extra) :]
        seen = {
            i: tuple(_faded(r, m, later) for r, m in zip(mass, of, strict=True))
            for i, of in zip(here, each, strict=True)
        }
    masses = []
    for i, (keys, way) in enumerate(zip(sets, ways, strict=True)):
        if i not in afar:
            masses.append(_over_devices(asking, seen[i], way))
            continue
        others = _gone_round(asking, q, q_pos, keys, lse, later, way, i == new)
        masses.append(_join(mass, others, seen[i]) if i == new else others)
    return out, lse, tuple(masses)


def _strip(q: Array, keys: Keys) -> int:
    """How many queries run at a time, so that the reference's maps are no larger than over as many keys."""
    return min(STRIP, max(STRIP * q.shape[2] // keys.k.shape[2], 16))


def _joined_part(
    asking: _Asking, part: tuple[Array, Array], q: Array, q_pos: Array, keys: Keys, way: Way, new: bool
) -> tuple[Array, Array]:
    """(out, lse) merged with those over a set. new: whether its keys are those of the tokens, in order."""

    def over(q: Array, q_pos: Array, keys: Keys) -> tuple[Array, Array]:
        met = asking.met(keys)
        return attention_over(q, [met], q_pos, strip=_strip(q, met), **asking.rest)[:2]

    if way.kind == QUERIES:

        def visit(at: tuple[Any, ...]) -> tuple[Any, ...]:
            q, q_pos, out, lse = at
            return q, q_pos, *merge([(out, lse), over(q, q_pos, keys)])

        at = _turns(asking.parts, lambda at: asking.handed_on(visit(at)), (q, q_pos, *part))
        return at[2], at[3]

    skips = new and asking.skips
    if way.kind == HELPED and skips:
        return _helped(asking, part, q, q_pos, keys, over)

    def join(i: int | Array, part: tuple[Array, Array], keys: Keys) -> tuple[Array, Array]:
        def both() -> tuple[Array, Array]:
            return merge([part, over(q, q_pos, keys)])

        # Keys that wrapped around from the end of the prompt are later than all queries here.
        return jax.lax.cond(jax.lax.axis_index(asking.names) >= i, both, lambda: part) if skips else both()

    def hop(i: int | Array, at: tuple[Any, Any]) -> tuple[Any, Any]:
        part, keys = at
        # The next keys are sent while these are attended to.
        return join(i, part, keys), asking.handed_on(keys, round_=not skips)

    part = part if new else join(0, part, keys)
    if not way.hops:
        return part
    first = asking.handed_on(keys, round_=not skips)
    part, keys = jax.lax.fori_loop(1, way.hops, hop, (part, first))
    return join(way.hops, part, keys)


def _helped(
    asking: _Asking, part: tuple[Array, Array], q: Array, q_pos: Array, keys: Keys,
    over: Callable[[Array, Array, Keys], tuple[Array, Array]],
) -> tuple[Array, Array]:  # fmt: skip
    """(out, lse) merged with those over the keys of all earlier devices, with equal work on each device.

    At hop i a device has the keys of the i-th device before it and, as guests, that device's queries. The
    first i devices have keys that wrapped around, which they do not see; their guests, also from the end, see
    theirs.
    """
    half, here = asking.parts // 2, jax.lax.axis_index(asking.names)
    nothing = jnp.zeros_like(part[0]), jnp.full_like(part[1], -jnp.inf)

    def meet(i: int | Array, at: tuple[Any, ...]) -> tuple[Any, ...]:
        part, found, came, guests = at

        def own() -> tuple[Any, Any]:
            return merge([part, over(q, q_pos, came)]), found

        def theirs() -> tuple[Any, Any]:
            return part, merge([found, over(guests[0], guests[1], keys)])

        # Half way round an even ring, a device and its guests' own device would do the same work.
        turn = jnp.where(here >= i, 0, jnp.where(2 * i < asking.parts, 1, 2))
        return *jax.lax.switch(turn, [own, theirs, lambda: (part, found)]), came, guests

    def hop(i: int | Array, at: tuple[Any, ...]) -> tuple[Any, ...]:
        part, found, *_ = meet(i, at)
        return part, *asking.handed_on((found, *at[2:]))

    start = part, nothing, *asking.handed_on((keys, (q, q_pos)))
    part, found, *_ = meet(half, jax.lax.fori_loop(1, half, hop, start))
    return merge([part, asking.handed_on(found, -half)])


def _turns(count: int, one: Callable[[Any], Any], start: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, at: one(at), start)


# --- what slots receive --------------------------------------------------------------------------------


def _later(asking: _Asking, q_pos: Int[Array, "B T"]) -> Int[Array, "B"] | None:
    """How many queries of a row are on later devices; None if nothing decays."""
    if all(r.fade == 1.0 for r in asking.mass):
        return None
    live = (q_pos >= 0).sum(-1, dtype=jnp.int32)
    all_of = jax.lax.all_gather(live, asking.names)
    after = jnp.arange(asking.parts) > jax.lax.axis_index(asking.names)
    return jnp.where(after[:, None], all_of, 0).sum(0)


def _faded(r: Reduction, m: Float[Array, "B K S"], later: Array | None) -> Float[Array, "B K S"]:
    """Fade what slots received from one device's queries as of the last query of all."""
    if later is None or r.fade == 1.0:
        return m
    return m * jnp.power(jnp.asarray(r.fade, m.dtype), later.astype(m.dtype))[:, None, None]


def _received(asking: _Asking, q: Array, keys: Keys, lse: Array, q_pos: Array, later: Array | None) -> Masses:
    """Return what every slot of a set, as attended to, received from one device's queries."""
    found = received(q, keys, lse, q_pos, asking.mass, strip=_strip(q, keys), **asking.rest)
    return tuple(_faded(r, m, later) for r, m in zip(asking.mass, found, strict=True))


def _join(mass: tuple[Reduction, ...], a: Masses, b: Masses) -> Masses:
    return tuple(r.join(x, y) for r, x, y in zip(mass, a, b, strict=True))


def _over_devices(asking: _Asking, masses: Masses, way: Way) -> Masses:
    """Sum what slots received from each device's queries, on the devices that hold the slots."""

    def whole(r: Reduction, m: Array) -> Array:
        return (jax.lax.pmax if r.kind == "max" else jax.lax.psum)(m, asking.names)

    def owned(r: Reduction, m: Array) -> Array:
        apart = m.reshape(*m.shape[:2], asking.parts, -1)
        return r.over(jax.lax.all_to_all(apart, asking.names, 2, 2, tiled=True), 2)

    one = whole if way.kind == WHOLE else owned
    return tuple(one(r, m) for r, m in zip(asking.mass, masses, strict=True))


def _gone_round(
    asking: _Asking, q: Array, q_pos: Array, keys: Keys, lse: Array, later: Array | None, way: Way,
    new: bool,
) -> Masses:  # fmt: skip
    """Return what the slots of this device received from all queries, when keys or queries go round.

    new: whether keys are new; then only the queries of other devices count.
    """

    def of(asked: tuple[Any, ...], keys: Keys) -> Masses:
        q, q_pos, lse, later = asked
        return _received(asking, q, asking.met(keys), lse, q_pos, later)

    asked = q, q_pos, lse, later
    shapes = jax.eval_shape(of, asked, keys)
    none = tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)
    if way.kind == QUERIES:

        def visit(at: tuple[Masses, Any]) -> tuple[Masses, Any]:
            found, asked = at
            return _join(asking.mass, found, of(asked, keys)), asking.handed_on(asked)

        return _turns(asking.parts, visit, (none, asked))[0]

    def hop(i: int | Array, at: tuple[Masses, Keys]) -> tuple[Masses, Keys]:
        found, keys = asking.handed_on(at)

        def more() -> Masses:
            return _join(asking.mass, found, of(asked, keys))

        sees = jax.lax.axis_index(asking.names) >= i
        return jax.lax.cond(sees, more, lambda: found) if new and asking.skips else more(), keys

    start = none if new else of(asked, keys)
    found, _ = jax.lax.fori_loop(1, way.hops + 1, hop, (start, keys))
    return asking.handed_on(found, -way.hops) if way.hops else found
