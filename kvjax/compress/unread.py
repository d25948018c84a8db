"""How many bytes of a cache a decode step leaves unread, because a read method visits some of the slots."""

from __future__ import annotations

from kvjax.compress.group import GroupMethod
from kvjax.grammar.read_kinds import Recycling
from kvjax.state.cache import GroupState, Paged, Pages, Slots, nbytes
from kvjax.state.codes import Codes, width_of


def unread_bytes(gm: GroupMethod, group: GroupState, pools: tuple[Pages, ...] = ()) -> int:
    """Bytes of keys and values that a decode step leaves unread because a read method visits some slots.

    Channels that a selection looks at in every key count as read, and are read again in the selected slots;
    codes are decoded whole to look at any part of them, and granules whole for any of their slots. Heads in
    pages count with the share that the longest one leaves unread.
    """
    if gm.read is None or gm.picks:
        return 0
    *pages, body = group.bodies
    assert isinstance(body, Slots)
    whole = [isinstance(x, Codes) and gm.read.granule % x.codec.granule for x in (body.k, body.v)]
    if all(whole):
        return 0
    slots, width = body.capacity, width_of(body.k)
    held, found = nbytes(body.k), nbytes(body.v)
    for one in pages:
        assert isinstance(one, Paged)
        pool = pools[one.pool]
        slots += one.most * pool.page_tokens
        held += nbytes(pool.k) * one.lengths.shape[0] // pool.layers
        found += nbytes(pool.v) * one.lengths.shape[0] // pool.layers
    left = slots - gm.read.pages_visited(slots) * gm.read.granule
    looked = gm.read.looks_at(width)
    looked = width if looked and isinstance(body.k, Codes) else looked
    held, found = (0 if one else x for x, one in zip((held, found), whole, strict=True))
    keys, values = held * max(left * width - slots * looked, 0) // (slots * width), found * left // slots
    if isinstance(gm.read, Recycling):
        # Of `stride` steps, one reads everything.
        keys, values = (x * (gm.read.stride - 1) // gm.read.stride for x in (keys, values))
    # A step reads the device's copies of a body in host memory, and what those copies do not include.
    copies = 0 if body.near is None else nbytes((body.near.slots.k, body.near.slots.v))
    return keys + values + copies
