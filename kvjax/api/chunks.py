"""Cache sizes while a prompt is read in chunks, chosen so that three programs read all chunks.

If every chunk left free slots for the next one, as turns of a conversation do, the cache would grow every
time, and every chunk would need a program of its own. Chunks leave the same cache at the end, to the byte,
but what the whole prompt needs is allocated from the first chunk on: the first chunk makes the cache, those
in the middle do not change its size, and the last leaves `room` free slots.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.compress.capacity import PLENTY, free_by_group, more_slots, reserve, tokens_in, widened
from kvjax.compress.group import GroupMethod
from kvjax.compress.pages import list_slots, longest_list, page_of, recent_tokens, tail_slots
from kvjax.compress.segments import AT_ONCE, ChunkHint, capacity_of, slots_needed
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.cache import Cache, Paged, Segment, Slots
from kvjax.steps import Run

tokens_that_fit = jax.jit(free_by_group, static_argnums=0)


def bucket(tokens: int) -> int:
    """Smallest static length that holds `tokens`: exact to 16 below 64, to an eighth of the size above.

    >>> [bucket(n) for n in (5, 100, 512, 513, 4096)]
    [16, 104, 512, 576, 4096]
    """
    if tokens <= 64:
        return max(16, -(-tokens // 16) * 16)
    unit = 2 ** ((tokens - 1).bit_length() - 4)
    return -(-tokens // unit) * unit


def bound(seen: int, width: int) -> int:
    """Return a static bound on the tokens of any row after reading `width` more than `seen`."""
    return bucket(seen + width) if seen else width


class ChunkSize(NamedTuple):
    """The static sizes that a chunk is read with, as `steps.prefill` takes them."""

    tokens_bound: int
    room: int
    ahead: ChunkHint = AT_ONCE


def plan(
    run: Run,
    params: Params,
    cache: Cache | None,
    lengths: Int[np.ndarray, "B"],
    *,
    width: int,
    room: int,
    compress: bool,
) -> tuple[Cache | None, list[ChunkSize]]:
    """Return the cache with free slots for a prompt, and the size of each of its chunks of `width` tokens."""
    seen = 0 if cache is None else int(fetch(cache.next).max())
    chunks = -(-int(lengths.max()) // width)
    # How many of the new tokens are stored, if a method drops some as it reads them, or adds its own.
    word = run.method.reread if compress else None
    more = run.method.restore.tokens if compress and run.method.restore is not None else 0
    new = (width if word is None else word.most(width)) + more
    if chunks == 1:
        cache = None if cache is None else with_room(run.groups(params), cache, new + room)
        return cache, [ChunkSize(bound(seen, width), room)]
    turns = _Turns(run, params, cache, lengths.shape[0], compress)
    slots = np.zeros(len(turns.gms), int)
    for at in range(chunks):
        taken = np.clip(lengths - at * width, 0, width)
        taken = taken if word is None else fetch(word.count(jnp.asarray(taken)))
        taken = taken + more * (taken > 0)
        slots += turns.read(taken, new, room if at == chunks - 1 else new)
    middle = ChunkSize(turns.bound, new, ChunkHint(lists=turns.bound))
    first = middle
    if cache is None:
        first = middle._replace(ahead=ChunkHint(tuple(slots.tolist()), turns.bound))
    else:
        each = zip(turns.gms, cache.groups, slots.tolist(), strict=True)
        groups = tuple(widened(gm, group, more) if more else group for gm, group, more in each)
        cache = dataclasses.replace(cache, groups=groups)
    last = ChunkSize(turns.bound, room, ChunkHint(lists=turns.listed))
    return cache, [first, *[middle] * (chunks - 2), last]


def with_room(gms: tuple[GroupMethod, ...], cache: Cache, tokens: int) -> Cache:
    """Return the cache with free slots for `tokens` more tokens in every row; it grows by whole buckets."""
    short = tokens - int(fetch(tokens_that_fit(gms, cache)).min())
    return cache if short <= 0 else reserve(gms, cache, bucket(short))


class _Turns:
    """Computes, on the host, the sizes of a cache while chunks are read.

    bound: the most tokens of a row. listed: how many slots per KV head the last chunk's pages were selected
    from. free: per group and row how many tokens fit; None before there is a cache.
    """

    def __init__(self, run: Run, params: Params, cache: Cache | None, rows: int, compress: bool):
        self.gms = run.groups(params)
        slots = [mixer_of(run.config, gm.first).slots(run.config) for gm in self.gms]
        self.widths = [0 if s is None else s.key for s in slots]
        self.acting = [run.acts(gm, compress) or (compress and gm.stack is not None) for gm in self.gms]
        self.bound = self.listed = self.seen = self.held = 0
        self.next = np.zeros(rows, np.int64)
        self.free: np.ndarray | None = None
        if cache is not None:
            self.next = np.array(fetch(cache.next), np.int64)
            self.seen = int(self.next.max())
            self.free = np.array(fetch(tokens_that_fit(self.gms, cache)), np.int64)
            self.held = max((_slots(cache, cache.groups[i].parts) for i in self.paged), default=0)

    @property
    def paged(self) -> list[int]:
        return [i for i, gm in enumerate(self.gms) if self.acting[i] and gm.paged]

    def read(self, taken: Int[np.ndarray, "B"], width: int, room: int) -> Int[np.ndarray, "groups"]:
        """Compute the sizes after one more chunk: `width` tokens, of which `taken` of each row are real.

        Returns for every group that keeps everything how many slots it gets in addition.
        """
        added, past = np.zeros(len(self.gms), int), self.free is not None
        short = 0 if self.free is None else width + room - int(self.free.min())
        whole = [self.keeps_all(i) for i in range(len(self.gms))]
        if short > 0:
            for i, gm in enumerate(self.gms):
                added[i] = more_slots(gm, bucket(short), self.widths[i]) if whole[i] else 0
            more = (more_slots(self.gms[i], bucket(short), self.widths[i]) for i in self.paged)
            self.held += max(more, default=0)
        self.next += taken
        self.bound = bound(self.seen, width)
        self.seen += width
        self.listed = self.held + width
        for keep in {self.gms[i].keep for i in self.paged}:
            assert keep is not None
            self.listed = list_slots(keep, self.listed, self.bound)
        before = np.full((len(self.gms), len(taken)), PLENTY) if self.free is None else self.free
        self.free = np.stack(
            [
                before[i] + added[i] - taken if past and whole[i] else self.left(i, room)
                for i in range(len(self.gms))
            ]
        )
        if paged := self.paged:
            gm = self.gms[paged[0]]
            assert gm.keep is not None
            page = page_of([self.gms[i] for i in paged], self.listed, self.bound)
            pages = -(-max(longest_list(gm, self.listed, self.bound), 1) // page)
            pages += 0 if gm.keep.lower is None else -(-self.listed // page)
            tails = (tail_slots(self.gms[i], self.listed, room, self.widths[i]) for i in paged)
            self.held = pages * page + max(tails)
        return added

    def keeps_all(self, i: int) -> bool:
        gm = self.gms[i]
        return bool(gm.grows) or (gm.kind == "slots" and not (self.acting[i] or gm.evicting))

    def left(self, i: int, room: int) -> Int[np.ndarray, "B"]:
        """Per row, how many tokens fit in a group after this chunk, as `free_by_group` counts them."""
        gm, width = self.gms[i], self.widths[i]
        if gm.grows:
            return self.seen + room - self.next
        if gm.kind != "slots":
            return np.full(self.next.shape, PLENTY)
        if self.acting[i] and gm.paged:
            newest = np.minimum(self.next, min(recent_tokens(gm), self.listed))
            # A tail before codes of several tokens may hold all but one of the tokens it can.
            newest = np.maximum(newest, gm.residual) + gm.granule if gm.split else newest
            return tail_slots(gm, self.listed, room, width) - newest
        built = gm if self.acting[i] else gm.replaced(keep=None, stack=None)
        slots = slots_needed(built, self.bound, room, width)
        held = self.next
        if built.budget is not None:
            held = np.array([min(built.budget.capacity(int(n)), n) for n in self.next])
        if gm.rated:
            assert gm.keep is not None
            # A granule may consist of holes.
            holes = gm.granule if gm.split and self.acting[i] else 0
            due = tokens_in(gm.keep, capacity_of(built, slots) - holes) - self.next
            return due if gm.split else np.where(slots > held, np.maximum(due, slots - held), 0)
        return capacity_of(built, slots) - held - int(gm.split)


def _slots(cache: Cache, group: tuple[Segment, ...]) -> int:
    """How many slots a KV head of a group has, those in pages included."""
    pages = [s.most * cache.pools[s.pool].page_tokens for s in group if isinstance(s, Paged)]
    return sum(pages) + sum(s.capacity for s in group if isinstance(s, Slots))
