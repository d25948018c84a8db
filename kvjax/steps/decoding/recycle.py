"""Steps of reads that keep what they select for later steps, by marks beside the slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.keys import key_of
from kvjax.state.cache import Paged
from kvjax.state.picked_pages import spread
from kvjax.steps.decoding.at_layer import AtLayer, Received
from kvjax.steps.decoding.attend import attend
from kvjax.steps.decoding.past import FoundPicks, Past, PickedPages
from kvjax.steps.decoding.picks import bring_picked, by_part, picked_from, select_pages


def attend_or_recycle(here: AtLayer) -> AtLayer:
    """Attend to the slots that an earlier token selected; rows that are due attend to all and select anew.

    What is selected is marked in a trace of the slots, so it stays selected wherever the slots move.
    """
    token, past = here.token, here.past
    read, pools, number = past.gm.read, here.pools, token.at + 1
    body, index = picked_from(past, pools)
    pos, marks = body.pos[index], body.traces[key_of(read.mark)][index]
    newest = past.tail.traces[key_of(read.mark)][past.index]
    last = jnp.maximum(marks.max((1, 2), initial=0), newest.max((1, 2), initial=0)).astype(jnp.int32)
    due = (last == 0) | (number <= last) | (number - last >= read.stride)
    since = _of_rows(last, pos)
    selected = (pos >= 0) & ((marks.astype(jnp.int32) == since) | (pos >= since))
    _, slots = jax.lax.top_k(selected.astype(jnp.int32), read.pages_visited(body.capacity))
    found = by_part(past, pools, PickedPages(slots, selected.sum(-1, dtype=jnp.int32)))

    def attended(
        past: Past, found: FoundPicks | None
    ) -> tuple[Float[Array, "B N 1 V"], tuple[Received, ...]]:
        now = attend(here._replace(past=past, found=found))
        assert now.out is not None
        return now.out, now.received

    def attended_by_turn() -> tuple[Float[Array, "B N 1 V"], tuple[Received, ...]]:
        whole = attended(past._replace(gm=past.gm.replaced(read=None)), None)
        return jax.tree.map(lambda all, few: jnp.where(_of_rows(due, all), all, few), whole, selection)

    def best_slots() -> Float[Array, "B K S"]:
        picks = select_pages(here.token.run, past, here.q, token.length, pools)
        mark = jnp.where(due, number, 0).astype(marks.dtype)
        every = jnp.broadcast_to(_of_rows(mark, picks.pages), picks.pages.shape)
        return spread(every, 1, picks.pages, picks.counts, body.capacity)

    selection = attended(past, found)
    out, received = jax.lax.cond(due.any(), attended_by_turn, lambda: selection)
    best = jax.lax.cond(due.any(), best_slots, lambda: jnp.zeros_like(marks))
    tail = past.tail.pos[past.index]
    tail = jnp.where((tail >= 0) & _of_rows(due, tail), _of_rows(number, tail), 0)
    return here._replace(out=out, received=_marked(here, received, best, tail.astype(marks.dtype)))


def attend_prefetched(here: AtLayer) -> AtLayer:
    """Attend to the slots that the token before selected, or to its own selection, and mark the latter.

    The slots of the tail are marked, too: one that has left it since is read as the token before read it.
    """
    token, past, pools, number = here.token, here.past, here.pools, here.token.at + 1
    read = past.gm.read
    body, index = picked_from(past, pools)
    pos, marks = body.pos[index], body.traces[key_of(read.mark)][index]
    own = select_pages(here.token.run, past, here.q, token.length, pools)
    last = marks.max((1, 2), initial=0).astype(jnp.int32)
    since = _of_rows(last, pos)
    selected = (pos >= 0) & (marks.astype(jnp.int32) == since)
    _, slots = jax.lax.top_k(selected.astype(jnp.int32), read.pages_visited(body.capacity))
    before = (last > 0) & (last == number - 1)
    found = PickedPages(
        jnp.where(_of_rows(before, slots), slots, own.pages),
        jnp.where(
            before[:, None], jnp.minimum(selected.sum(-1, dtype=jnp.int32), slots.shape[-1]), own.counts
        ),
    )
    now = here._replace(found=by_part(past, pools, found))
    now = now if past.gm.host is None else bring_picked(now)
    now = attend(now)
    every = jnp.broadcast_to(_of_rows(number, own.pages), own.pages.shape).astype(marks.dtype)
    best = spread(every, 1, own.pages, own.counts, body.capacity)
    tail = past.tail.pos[past.index]
    tail = jnp.where(tail >= 0, _of_rows(number, tail), 0).astype(marks.dtype)
    return now._replace(past=past, received=_marked(here, now.received, best, tail))


def _marked(
    here: AtLayer, received: tuple[Received, ...], body: Float[Array, "B K S"], tail: Float[Array, "B K T"]
) -> tuple[Received, ...]:
    """Return what slots received, with the marks of a new selection, sorted by the parts that hold them."""
    parts, marks, start = here.past.parts, [], 0
    for part in parts[:-1]:
        paged = isinstance(part, Paged)
        size = part.most * here.pools[part.pool].page_tokens if paged else part.capacity
        marks.append(body[..., start : start + size])
        start += size
    name = key_of(here.past.gm.read.mark)
    each = zip(received or ({},) * len(parts), [*marks, tail], strict=True)
    return tuple(got | {name: mark} for got, mark in each)


def _of_rows(x: Array, like: Array) -> Array:
    """Numbers of rows [B], shaped so that they broadcast over an array of these rows."""
    return x.reshape(-1, *(1,) * (like.ndim - 1))
