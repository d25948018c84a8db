"""Pages: if KV heads keep unequal numbers of slots, these are stored in pages, followed by a dense tail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import (
    body_slots,
    empty_body,
    first_tokens,
    flush,
    placed_tail,
    take,
    whole_tiles,
)
from kvjax.grammar import Keep
from kvjax.grammar.calls import restored
from kvjax.grammar.kinds import View
from kvjax.grammar.phase import BY_POSITION
from kvjax.keep.patterns import Recent
from kvjax.models.stacking import Group, places
from kvjax.ops.base.dispatch import platform
from kvjax.place.host import in_its_memory, pool_in_its_memory
from kvjax.place.paged import build_pages, pool_pages
from kvjax.state.cache import GroupState, Paged, Pages, Slots
from kvjax.state.write import pad_slots

# The largest page size. Of a KV head's slots, at most one in _ONE_IN may be lost to its partly empty last
# page.
_LARGEST, _ONE_IN = 128, 64
# The fewest rows that a TPU kernel copies: of numbers, of codes, and of slots with scales or biases.
_TILE, _TILE_OF_CODES, _LANES = 16, 32, 128


class Tier(NamedTuple):
    """One tier of all groups: kept slots, the most per layer of a row and per KV head, and codecs."""

    kept: list[Bool[Array, "_ B K S"]]
    most: list[int]
    longest: int
    codecs: list[tuple[Any, Any]]


def build_group_pages(
    chosen: list[tuple[GroupMethod, View, Bool[Array, "_ B K S"]]],
    length: Int[Array, "B"],
    tokens: int,
    room: int,
    lists: int = 0,
) -> tuple[list[GroupState], tuple[Pages, ...]]:
    """Paged bodies of groups, each with a dense tail of `room` slots for new tokens.

    A keep with a second tier has a second body in pages of its own. If decode steps evict, the tail also
    holds the newest tokens, which may be evicted once they are older. First tokens are stored separately if
    the store keeps them unencoded. There is one pool per tier for all groups if the allocation moves slots
    between layers, else one per group. lists: as in `ChunkHint`.
    """
    gms, views, kept = (list(x) for x in zip(*chosen, strict=True))
    keep = gms[0].keep
    assert keep is not None
    layers = sum(v.pos.shape[0] for v in views)
    heads = views[0].pos.shape[2]
    slots = list_slots(keep, lists or max(view.pos.shape[3] for view in views), tokens)
    groups = zip(gms, views, kept, strict=True)
    sinks = [first_tokens(gm, view, stays) if gm.sinks else None for gm, view, stays in groups]
    kept = [stays & (view.pos >= gm.sinks) for gm, view, stays in zip(gms, views, kept, strict=True)]
    newest = [_newest(gm, view, stays, length) for gm, view, stays in zip(gms, views, kept, strict=True)]
    longest = longest_list(gms[0], slots, tokens)
    n = min(keep.budget.capacity(tokens), longest)
    pairs = zip(gms, views, strict=True)
    order = places([Group(gm.first, view.pos.shape[0], gm.stride) for gm, view in pairs])
    slots_of_layers = keep.allocate.layer_slots(n, longest, layers, heads)
    most = [slots_of_layers[place] for place in order]
    page = page_of(gms, slots, tokens)
    first = [stays & ~new for stays, new in zip(kept, newest, strict=True)]
    tiers = [Tier(first, most, longest, [gm.codecs for gm in gms])]
    if keep.lower is not None:
        leaving = [(view.pos >= 0) & ~stays for view, stays in zip(views, kept, strict=True)]
        codecs = [(keep.lower.keys, keep.lower.values)] * len(gms)
        left = most_left(keep, slots, layers, heads)
        tiers.append(Tier(leaving, [left[place] for place in order], slots, codecs))
    bodies: list[list[Paged]] = [[] for _ in gms]
    pools: list[Pages] = []
    for tier in tiers:
        for group, index in zip(bodies, _build_tier(gms, views, tier, page, pools), strict=True):
            group.append(index)
    groups = [
        dataclasses.replace(
            _before_tail(gm, body, _tail_of(gm, view, new, slots, room), room, slots), sinks=own
        )
        for gm, view, body, new, own in zip(gms, views, bodies, newest, sinks, strict=True)
    ]
    return groups, tuple(pools)


def _build_tier(
    gms: list[GroupMethod], views: list[View], tier: Tier, page: int, pools: list[Pages]
) -> list[Paged]:
    """One tier of every group in pages of `page` slots; its pools are appended to `pools`."""
    keep = gms[0].keep
    assert keep is not None
    sizes = [view.pos.shape[0] for view in views]
    shares = [sum(tier.most[sum(sizes[:i]) :][:size]) for i, size in enumerate(sizes)]
    out: dict[int, Paged] = {}
    for batch in _pools(keep, tier.codecs, views):
        _, rows, heads, _ = views[batch[0]].pos.shape
        count = sum(sizes[i] for i in batch) * rows * heads
        # Budgets that move between layers may all move to those of one pool.
        most = rows * sum(shares if keep.allocate.across_layers else [shares[i] for i in batch])
        indices, pool = build_pages(
            tuple(tier.kept[i] for i in batch),
            tuple(views[i] for i in batch),
            page=page,
            pages=max(pool_pages(most, count, page, tier.longest), 1),
            slots=max(tier.longest, 1),
            codecs=tier.codecs[batch[0]],
            number=len(pools),
            shared=gms[batch[0]].shared,
            codec_arrays=tuple(gms[i].codec_arrays for i in batch),
        )
        pools.append(pool_in_its_memory(gms[batch[0]].host, pool, _of_layer(keep, tier, batch, sizes, pool)))
        out |= dict(zip(batch, indices, strict=True))
    return [out[i] for i in range(len(gms))]


def _of_layer(keep: Keep, tier: Tier, batch: list[int], sizes: list[int], pool: Pages) -> int:
    """Return the largest number of pages that a layer of a pool of the groups `batch` needs, for all rows."""
    lists, page = pool.owner.shape[0], pool.page_tokens
    _, rows, heads, _ = tier.kept[batch[0]].shape
    if keep.allocate.across_layers:
        return min(lists, rows * heads * -(-max(tier.longest, 1) // page))
    layers = [i for n in batch for i in range(sum(sizes[:n]), sum(sizes[: n + 1]))]
    return max(pool_pages(rows * max(tier.most[i] for i in layers), rows * heads, page, tier.longest), 1)


def _pools(keep: Keep, codecs: list[tuple[Any, Any]], views: list[View]) -> list[list[int]]:
    """Which groups share a pool: if the budget moves between layers, all that are encoded alike.

    Slots of unequal widths, such as those of layers with an index of their own and without, lie apart.
    """
    numbers = range(len(codecs))
    if not keep.allocate.across_layers:
        return [[i] for i in numbers]
    forms = [(*own, v.k.shape[4:], v.v.shape[4:]) for own, v in zip(codecs, views, strict=True)]
    return [[i for i in numbers if forms[i] == own] for own in dict.fromkeys(forms)]


def list_slots(keep: Keep, slots: int, tokens: int) -> int:
    """Return the most slots from which a KV head's pages are chosen, for `slots` of at most `tokens` tokens.

    With two tiers nothing is dropped, so there is one slot per token, however many empty slots both tiers
    have.
    """
    return slots if keep.lower is None else min(slots, tokens + restored(keep))


def longest_list(gm: GroupMethod, slots: int, tokens: int) -> int:
    """Return the most slots of a KV head in pages; tokens that `Recent` protects are in the tail instead."""
    return max(min(slots, tokens - recent_tokens(gm)), 0) if gm.evicting else slots


def page_of(gms: Sequence[GroupMethod], slots: int, tokens: int) -> int:
    """Slots per page of all groups, for KV heads that choose among `slots` slots of at most `tokens` tokens.

    In a head's last page, all but one slot may be empty and still take memory. So a page is the largest power
    of two of which all but one slot are at most a 64th of the slots that heads keep on average; if scores
    alone decide how many stay, that average is taken as a quarter of the tokens. On a TPU a page has at least
    one tile, and, if slots have scales, biases or phases and heads keep four times as many, the 128 slots
    that the kernel needs.
    """
    keep, codecs = gms[0].keep, gms[0].codecs
    assert keep is not None
    if keep.page is not None:
        return _whole_granules(gms, keep.page)
    n = keep.allocate.mean(min(keep.budget.capacity(tokens), slots))
    n = n if keep.allocate.threshold is None else n // 4
    n = n if keep.lower is None else min(n, slots - n)
    page = min(2 ** ((n // _ONE_IN + 1).bit_length() - 1), _LARGEST) if n > 0 else 1
    if platform() != "tpu":
        return _whole_granules(gms, page)
    coded = codecs != (None, None)
    beside = coded or keep.merge is not None or keep.phase != BY_POSITION
    least = _LANES if beside and n >= 4 * _LANES else _TILE_OF_CODES if coded else _TILE
    return _whole_granules(gms, max(page, least))


def _whole_granules(gms: Sequence[GroupMethod], page: int) -> int:
    """Find the least page size of at least `page` slots that holds whole granules of all groups and tiers."""
    lower = [gm.keep.lower.granule for gm in gms if gm.keep is not None and gm.keep.lower is not None]
    granule = math.lcm(*(gm.granule for gm in gms), *lower)
    return -(-page // granule) * granule


def most_left(keep: Keep, tokens: int, layers: int, heads: int) -> list[int]:
    """Find the most slots in the second tier of all heads of a row of at most `tokens` tokens, per layer."""
    return keep.allocate.layer_rest(keep.budget, tokens, layers, heads)


def _newest(
    gm: GroupMethod, view: View, kept: Bool[Array, "Lg B K S"], length: Int[Array, "B"]
) -> Bool[Array, "Lg B K S"]:
    """Find the kept slots that stay out of pages: `Recent` protects them and a step may evict them later.

    If several tokens are encoded together, also those that do not fill a granule of the pages.
    """
    newest = kept & (view.pos >= (length - recent_tokens(gm))[None, :, None, None])
    if not gm.split:
        return newest
    held, may_leave = (x.sum(-1, keepdims=True, dtype=jnp.int32) for x in (kept, newest))
    count = jnp.maximum(held - jnp.maximum(may_leave, gm.residual), 0)
    return kept & (jnp.cumsum(kept, -1, dtype=jnp.int32) > count // gm.granule * gm.granule)


def recent_tokens(gm: GroupMethod) -> int:
    assert gm.keep is not None
    recent = [p.tokens for p in gm.keep.protect if isinstance(p, Recent)] if gm.evicting else []
    return int(max(recent, default=0))


def tail_slots(gm: GroupMethod, slots: int, room: int, width: int) -> int:
    """Capacity of the tail after pages chosen among `slots`: the newest tokens, and free slots."""
    if gm.split:
        return _new_granules(gm, room, slots) + gm.residual + gm.granule
    return whole_tiles(max(min(recent_tokens(gm), slots) + room, 1), width, gm.multiple)


def _before_tail(gm: GroupMethod, pages: list[Paged], tail: Slots, room: int, most: int) -> GroupState:
    """Pages and a tail; between them, granules for slots that may be evicted or that steps encode."""
    if not gm.split:
        return GroupState(tuple(pages), tail)
    body, tail = flush(gm, empty_body(gm, tail, _new_granules(gm, room, most)), tail)
    return GroupState((*pages, in_its_memory(gm.host, gm.read, body)), tail)


def _new_granules(gm: GroupMethod, room: int, most: int) -> int:
    """How many slots the newest and `room` more tokens need between pages and a full tail."""
    return body_slots(gm, max(gm.residual, min(recent_tokens(gm), most)) + room + gm.granule - 1)


def _tail_of(gm: GroupMethod, view: View, newest: Bool[Array, "Lg B K S"], most: int, room: int) -> Slots:
    """Return a tail with the newest slots, and empty ones for `room` more tokens."""
    if gm.split:
        return take(gm, view, newest, max(min(recent_tokens(gm), most), gm.residual) + gm.granule)
    slots = take(gm, view, newest, min(recent_tokens(gm), most))
    return placed_tail(gm, pad_slots(slots, tail_slots(gm, most, room, view.k.shape[-1]) - slots.capacity))
