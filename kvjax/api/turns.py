"""Cache sizes in a conversation: they double, so that a handful of programs serve all of its turns.

A program is compiled for the shapes of a cache. Sizes that follow each turn's tokens would compile a decoder
for every turn; sizes that double compile one only when a conversation has doubled in length. Unused slots are
part of the arrays, and `kvjax.nbytes` counts them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax import steps
from kvjax.api.chunks import ChunkSize, bucket, tokens_that_fit
from kvjax.api.rows import nothing_carried
from kvjax.compat.max_length import last_position
from kvjax.compress.capacity import more_slots, widened
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import ChunkHint, slots_needed
from kvjax.grammar import Method
from kvjax.hosts.arrays import fetch
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.axes import placed
from kvjax.state.cache import Cache, Pages, Slots
from kvjax.state.write import pad_slots
from kvjax.steps import Run

# The least capacity of a conversation's cache, width of a turn as it is read, and tokens of an answer.
LEAST, LEAST_TURN, LEAST_ROOM = 512, 128, 64


def doubled(tokens: int, least: int) -> int:
    """Find the smallest of least, 2 least, 4 least, ... that holds `tokens`.

    >>> [doubled(n, 64) for n in (1, 64, 65, 1000)]
    [64, 64, 128, 1024]
    """
    size = least
    while size < tokens:
        size *= 2
    return size


def turn_width(tokens: int) -> int:
    """Choose the static length at which a turn's tokens are read: doubling, and finer for long turns.

    >>> [turn_width(n) for n in (5, 100, 500, 1030)]
    [128, 128, 512, 1152]
    """
    return doubled(tokens, LEAST_TURN) if tokens <= LEAST else bucket(tokens)


class Capacity(NamedTuple):
    """How many tokens need slots, the answer's included; the cache's capacity; tokens of an answer."""

    need: int
    held: int
    room: int


def capacity_of(method: Method, seen: int, tokens: int, room: int, most: int) -> Capacity:
    """Find the capacity for `seen` tokens, `tokens` new ones, and an answer of `room` tokens after these.

    `room` is rounded up (`doubled`). most: the model's last position, beyond which no slot could be used.
    """
    # How many of the new tokens are stored, if a method drops some as it reads them, or adds its own.
    new = tokens if method.reread is None else method.reread.most(tokens)
    new += 0 if method.restore is None else method.restore.tokens
    room = doubled(room, LEAST_ROOM)
    need = seen + new + room
    return Capacity(need, min(doubled(need, LEAST), max(need, most)), room)


def capacity_of_turn(method: Method, seen: int, tokens: int, room: int, config: Config) -> int:
    """Return the capacity of the cache for a turn of `tokens` tokens and an answer of `room` after these."""
    return capacity_of(method, seen, tokens, room, last_position(method, config)).held


def plan_turn(
    run: Run,
    params: Params,
    cache: Cache | None,
    batch: tuple[int, int],
    *,
    tokens: int,
    room: int,
    most: int,
) -> tuple[Cache | None, ChunkSize]:
    """Enlarge the cache that a turn is read into; return it, and the sizes for reading (`chunks.plan`).

    batch: rows, and columns of tokens with padding. tokens: of the longest row. A first turn is read over an
    empty cache, so that its programs serve later turns.
    """
    seen = 0 if cache is None else int(fetch(cache.next).max())
    need, held, room = capacity_of(run.method, seen, tokens, room, most)
    # Heads in pages have held - `room` slots, however many pages they had before.
    size = ChunkSize(held - room, room, ChunkHint(lists=held - room))
    if cache is None and begins_empty(run.method):
        cache = placed(empty_cache(run, params, *batch, size), run.on_mesh)
    return (None if cache is None else _grown(run, params, cache, need, size)), size


def _grown(run: Run, params: Params, cache: Cache, need: int, size: ChunkSize) -> Cache:
    """Add the empty slots that the cache has after the turn, so that turns of one width share programs.

    Groups that keep everything get enough for `need` tokens. Other groups are rebuilt by the turn; only their
    shape matters.
    """
    gms = run.groups(params)
    keep = [i for i, gm in enumerate(gms) if _keeps_all(run, gm)]
    groups = list(cache.groups)
    if keep:
        holds = _holds(run.method, gms, cache, keep)
        if holds < need:
            # At least by half: a group that holds a few tokens less than a size, as granules do, gets the
            # next size.
            more = doubled(max(need, holds * 3 // 2), LEAST) - holds
            for i in keep:
                groups[i] = widened(gms[i], groups[i], more_slots(gms[i], more, _width(run, gms[i])))
    for i, gm in enumerate(gms):
        tail = groups[i].tail
        if i not in keep and tail is not None and run.acts(gm, True) and not (gm.paged or gm.split):
            slots = slots_needed(gm, size.tokens_bound, size.room, _width(run, gm))
            groups[i] = groups[i].with_tail(pad_slots(tail, slots - tail.capacity))
    return dataclasses.replace(cache, groups=tuple(groups))


def _holds(method: Method, gms: tuple[GroupMethod, ...], cache: Cache, keep: list[int]) -> int:
    """How many tokens the groups `keep`, which hold every token, have slots for.

    Layers with equal arrays hold equally many, unless some read fewer tokens, so only a few are inspected.
    """
    narrow = any(map(_narrows, method.sentences))
    alike = {} if narrow else {str(jax.tree.map(jnp.shape, cache.groups[i])): i for i in keep}
    some = [*alike.values()] or keep
    few = dataclasses.replace(cache, groups=tuple(cache.groups[i] for i in some), pools=())
    free = fetch(tokens_that_fit(tuple(gms[i] for i in some), few))
    return int((free + fetch(cache.next)).min())


def _keeps_all(run: Run, gm: GroupMethod) -> bool:
    chooses = run.acts(gm, True) or gm.stack is not None or gm.evicting
    return bool(gm.grows) or (gm.kind == "slots" and not chooses)


def _width(run: Run, gm: GroupMethod) -> int:
    slots = mixer_of(run.config, gm.first).slots(run.config)
    return 0 if slots is None else slots.key


# --- the first turn ------------------------------------------------------------------------------------


def begins_empty(method: Method) -> bool:
    """Whether a conversation can begin with an empty cache, whose programs serve its later turns, too.

    It begins without a cache if words treat a first prompt differently (a prompt that is read over slots,
    empty ones too, attends to all of them), or slots are in host memory.
    """
    return not any(map(_treats_first_prompts, method.sentences))


def _treats_first_prompts(method: Method) -> bool:
    return _narrows(method) or any((method.reread, method.host, method.read_prompt))


def _narrows(method: Method) -> bool:
    return method.keep is not None and method.keep.narrow is not None


def empty_cache(run: Run, params: Params, rows: int, width: int, size: ChunkSize) -> Cache:
    """Build a cache without tokens, with the shapes that turns of `width` tokens leave."""
    given = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, width), (rows,))]
    call = partial(steps.prefill, run, cache=None, compress=True, **size._asdict())
    shapes = jax.eval_shape(call, params, *given)[1]
    empty = jax.tree.map(_emptied, shapes, is_leaf=_has_positions)
    carried = [jax.tree.map(lambda x: jnp.full_like(x, nothing_carried(x)), g.rows) for g in empty.groups]
    groups = (dataclasses.replace(g, rows=rows) for g, rows in zip(empty.groups, carried, strict=True))
    return dataclasses.replace(empty, groups=tuple(groups))


def _has_positions(x: Any) -> bool:
    return isinstance(x, Slots | Pages)


def _emptied(x: Any) -> Any:
    """Return zeros, but -1 as position of empty slots and owner of free pages, as in `kvjax.reset_rows`."""
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
    if not _has_positions(x):
        return zeros
    none = {"pos": jnp.full(x.pos.shape, -1, jnp.int32)}
    if isinstance(x, Pages):
        none["owner"] = jnp.full(x.owner.shape, -1, jnp.int32)
    return dataclasses.replace(zeros, **none)


def padded_to(tokens: Int[np.ndarray, "B T"], width: int) -> Int[np.ndarray, "B W"]:
    """Cut the tokens to `width` columns, or pad them with zeros."""
    cut = tokens[:, :width]
    return np.pad(cut, ((0, 0), (0, width - cut.shape[1])))
