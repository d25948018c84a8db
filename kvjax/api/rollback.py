"""Rollback: `rollback` removes the newest tokens of rows, if that restores the earlier cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from kvjax.base.errors import InputError
from kvjax.grammar.read_kinds import EstimatingRest, Learning
from kvjax.hosts.arrays import fetch
from kvjax.ops.base.memory import there
from kvjax.place.common import apart, copies_of, is_shared, own_tokens
from kvjax.place.host import forgotten
from kvjax.state.cache import Cache, GroupState, Paged, Slots, check_alive
from kvjax.state.write import write_rows


class Added(NamedTuple):
    """The host's note of the newest tokens of a cache.

    groups: the method of every group of layers (`kvjax.compress.group.GroupMethod`). tokens: per row, a lower
    bound of how many were added since slots were last selected.
    """

    groups: tuple[Any, ...]
    tokens: np.ndarray


def more_added(note: Added | None, tokens: np.ndarray | int) -> Added | None:
    """Update the note for `tokens` more tokens, for every row or per row."""
    return None if note is None else Added(note.groups, note.tokens + tokens)


def of_rows(note: Added | None, index: Any) -> Added | None:
    """Return the note of the rows `index`; None if the host cannot know which these are."""
    if note is None or isinstance(index, Tracer):
        return None
    return Added(note.groups, note.tokens[np.asarray(index)])


def rollback(cache: Cache, n: int | Array | np.ndarray | list[int]) -> Cache:
    """Remove each row's newest tokens.

    Tokens added by steps, `verify` and prefills with compress=False can be removed; if a method keeps
    everything, tokens of a prompt too. Whether groups of codes and windows allow it depends on how full they
    are, which is read from the device.

    Args:
        cache: a live cache; it is consumed (donated).
        n: how many tokens, for all rows or per row [B].

    Returns:
        The cache as it was before these tokens.

    Raises:
        InputError: if `n` is not a number of tokens in [0, next], or a step consumed the cache; if the tokens
            were in the cache at its last selection of slots; and if they changed what cannot be undone:
            recurrent states, traces and carried rows, encoded groups, or slots that were evicted for them.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]], room=8)
    >>> _, cache = kvjax.verify(model, cache, [[6, 7, 8], [9]])
    >>> rollback(cache, [2, 0]).next.tolist()
    [4, 3]
    """
    check_alive(cache)
    count = _checked(cache, n)
    if not count.any():
        return cache
    given, cache = cache, _apart_for(cache, count)
    note = cache.added
    if note is None:
        raise InputError(
            f"{count.tolist()} tokens were given, and nothing is known of how this cache came to be: give "
            "rollback what kvjax.prefill, step or verify returned"
        )
    for gm, group in zip(note.groups, cache.groups, strict=True):
        if why := _never(gm, group):
            _refuse(cache, count, why)
    _check_added(cache, note, count)
    held = fetch(_held(cache))
    length = fetch(cache.next)
    for gm, counts in zip(note.groups, held, strict=True):
        if gm.kind == "slots" and (why := _not_now(gm, counts, length, count)):
            _refuse(cache, count, why)
    # A width that is a power of two, so that similar numbers share a program.
    width = 1 << (int(count.max()) - 1).bit_length()
    kinds = tuple(gm.kind == "slots" for gm in note.groups)
    new = _forgotten(kinds, width, dataclasses.replace(cache, method=None, model=""), jnp.asarray(count))
    # This array marks a cache as consumed; the host may already have read it.
    cache.next.delete()
    given.next.delete()
    return dataclasses.replace(
        new,
        method=cache.method,
        model=cache.model,
        spare=cache.spare + int(count.min()),
        added=Added(note.groups, np.maximum(note.tokens - count, 0)),
        on_mesh=cache.on_mesh,
    )


def _apart_for(cache: Cache, count: Int[np.ndarray, "B"]) -> Cache:
    """Separate the cache's rows if one must give up more tokens than it has added since it was forked."""
    return apart(cache) if is_shared(cache) and (count > fetch(own_tokens(cache))).any() else cache


def _checked(cache: Cache, n: Any) -> Int[np.ndarray, "B"]:
    """`n` per row; InputError unless these are numbers of tokens that the rows have read."""
    rows, given = cache.next.shape[0], np.asarray(n)
    if given.dtype.kind not in "iu" or given.shape not in ((), (rows,)):
        raise InputError(
            f"n is {given.dtype}{list(given.shape)}, expected a whole number or int[{rows}]: how many of "
            "each row's newest tokens to take back"
        )
    count, length = np.broadcast_to(given, (rows,)).astype(np.int32), fetch(cache.next)
    if (count < 0).any() or (count > length).any():
        raise InputError(
            f"n is {given.tolist()}, expected at least 0 and at most the {length.tolist()} tokens that the "
            "rows have read: give fewer"
        )
    return count


def _refuse(cache: Cache, count: np.ndarray, why: str) -> None:
    name = "this cache" if cache.method is None else cache.method.id
    raise InputError(
        f"{name} cannot take back {count.tolist()} tokens: {why}; keep a kvjax.fork of the cache from before "
        "them, and go on from that"
    )


def _never(gm: Any, group: GroupState) -> str:
    """Why no token of a group can be removed, whatever its slots hold; empty if some can."""
    if jax.tree.leaves(group.state):
        return f"layer {gm.first} has a recurrent state, which includes them"
    if gm.kind != "slots":
        return ""
    if grown := [trace for trace in gm.traces if trace.needs]:
        return f"layer {gm.first} has a trace of its slots ({grown[0]!r}), which includes their queries"
    if gm.evicting and (gm.carried or gm.merge is not None):
        return f"the rows of layer {gm.first} carry statistics that include them"
    return ""


def _check_added(cache: Cache, note: Added, count: np.ndarray) -> None:
    """Raise InputError if a method has, or may have, selected among slots after these tokens were added."""
    rereads = cache.method is not None and cache.method.reread is not None
    chooses = any(gm.kind == "slots" and gm.budget is not None and not gm.evicting for gm in note.groups)
    if any(gm.learns for gm in note.groups) and (count > note.tokens).any():
        _refuse(
            cache,
            count,
            f"{note.tokens.tolist()} were surely added since its codecs learnt from a prompt, and that "
            "cannot be undone",
        )
    if (chooses or rereads) and (count > note.tokens).any():
        _refuse(
            cache,
            count,
            f"{note.tokens.tolist()} were surely added since slots were last selected, and a selection "
            "cannot be undone",
        )


@jax.jit
def _held(cache: Cache) -> list[tuple[Array, ...]]:
    """Per group the fewest and the most live slots of a row's KV heads [2, B]: in bodies, tail and both."""
    rows = cache.next.shape[0]
    nothing = jnp.zeros((1, rows, 1), jnp.int32)

    def ends(counts: list[Array]) -> Array:
        total = sum(counts, nothing) if all(x.size for x in counts) else nothing
        return jnp.stack([total.min((0, 2)), total.max((0, 2))])

    def live(segment: Slots | Paged) -> Array:
        paged = isinstance(segment, Paged)
        counts = segment.lengths if paged else (segment.pos >= 0).sum(-1, dtype=jnp.int32)
        return jnp.repeat(counts, copies_of(segment, rows), axis=1)

    found = []
    for group in cache.groups:
        bodies, tail = [live(s) for s in group.bodies], [live(s) for s in (group.tail,) if s is not None]
        found.append((ends(bodies), ends(tail), ends([*bodies, *tail])))
    return found


def _not_now(gm: Any, held: tuple[np.ndarray, ...], length: np.ndarray, count: np.ndarray) -> str:
    """Why the newest tokens of a group's slots cannot be removed now; empty if they can."""
    bodies, tail, both = held
    forgets = count > 0
    if gm.evicting and (forgets & (both[0] < length)).any():
        return f"older slots of layer {gm.first} were evicted, which would still be there without them"
    if gm.paged and (count > tail[0]).any():
        return f"in layer {gm.first} some of them are stored in pages, which are written once"
    if not gm.split:
        return ""
    if gm.paged and (forgets & (bodies[1] > 0) & (tail[0] - count < gm.residual)).any():
        return f"the KV heads of layer {gm.first} have encoded different numbers of tokens"
    # Steps leave granules * g tokens in the body and `residual` or a few more in the tail.
    in_body = np.clip(count - tail, 0, bodies)
    whole = np.maximum(bodies + tail - count - gm.residual, 0) // gm.granule * gm.granule
    if isinstance(gm.read, EstimatingRest | Learning) and (in_body > 0).any():
        return f"layer {gm.first} has sums over the slots of its body, which include some of them"
    if not gm.paged and (forgets & ((bodies - in_body != whole) | (in_body % gm.granule != 0))).any():
        return (
            f"layer {gm.first} encodes {gm.granule} tokens together, and has encoded some that would not "
            "be encoded without them"
        )
    return ""


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _forgotten(slots: tuple[bool, ...], width: int, cache: Cache, count: Int[Array, "B"]) -> Cache:
    """Remove each row's newest tokens, at most `width`, from the cache; slots: which groups hold the text."""
    start = cache.next - count
    pairs = zip(slots, cache.groups, strict=True)
    groups = tuple(_without(group, start, width) if mine else group for mine, group in pairs)
    return dataclasses.replace(cache, groups=groups, next=start)


def _without(group: GroupState, start: Int[Array, "B"], width: int) -> GroupState:
    def left(s: Slots | Paged) -> Slots | Paged:
        common = copies_of(s, start.shape[0]) > 1
        return s if isinstance(s, Paged) or common else _emptied(s, start, width)

    return group.with_parts([left(s) for s in group.parts])


def _emptied(slots: Slots, start: Int[Array, "B"], width: int) -> Slots:
    """Empty the slots of tokens at `start` or later, at most `width` in every KV head."""
    gone = slots.pos >= start[None, :, None, None]
    slot = jax.lax.broadcasted_iota(jnp.int32, gone.shape, 3)
    # The padding index after the last slot writes nothing.
    where = jnp.sort(jnp.where(gone, slot, slots.capacity), axis=-1)[..., :width]

    def clear(x: Array) -> Array:
        # A granule's rows are removed with its first token.
        granule = slots.capacity // x.shape[3]
        at = where if granule == 1 else jnp.where(where % granule == 0, where // granule, -1)
        return there(lambda y: write_rows(y, at, jnp.zeros((*at.shape, *y.shape[4:]), y.dtype)), x)

    def zero(x: Array) -> Array:
        return jnp.where(gone, jnp.zeros((), x.dtype), x)

    # Keys may stay, since empty slots are masked. Values are multiplied by zero, so NaN must be removed.
    return dataclasses.replace(
        slots,
        k=jax.tree.map(clear, slots.k) if slots.v is None else slots.k,
        v=jax.tree.map(clear, slots.v),
        pos=jnp.where(gone, -1, slots.pos),
        bias=None if slots.bias is None else zero(slots.bias),
        traces={name: zero(x) for name, x in slots.traces.items()},
        summary={name: clear(x) for name, x in slots.summary.items()},
        near=None if slots.near is None else forgotten(slots.near),
    )
