"""Pages: slots in a pool shared by layers, rows and heads, so that unequal budgets save real bytes.

The pages of a KV head are neighbours, so `kvjax.ops.decode.ragged_decode` reads a head at once if its kernel
can run. The reference walks the pages of a layer in order: its cost depends on the number of pages, not on
their owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.kinds import View
from kvjax.ops.attention.union import NEG_INF, attend
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.memory import there
from kvjax.ops.decode import ragged_decode as ragged
from kvjax.state.cache import Paged, Pages
from kvjax.state.code_forms import is_rows, meet
from kvjax.state.codes import Codec, CodecArrays, Codes, dense, encode, with_arrays
from kvjax.state.page_gather import gather_pages

FREE = np.iinfo(np.int32).max
# How many tokens of pages one pass of the walk takes: enough for the matrix unit, few enough for the cache.
WALK_TOKENS = 2048


def pool_pages(slots: int, lists: int, page: int, most: int | None = None) -> int:
    """Find the most pages that `slots` live slots need in `lists` KV heads of at most `most` slots each.

    >>> pool_pages(10, 2, 4), pool_pages(10, 2, 4, most=5)
    (4, 4)
    """
    spread = (slots + lists * (page - 1)) // page
    return spread if most is None else min(spread, lists * -(-most // page))


def build_pages(
    kept: tuple[Bool[Array, "_ B K S"], ...],
    views: tuple[View, ...],
    *,
    page: int,
    pages: int,
    codecs: tuple[Codec | None, Codec | None],
    number: int,
    shared: int | None = None,
    slots: int = 0,
    codec_arrays: tuple[CodecArrays | tuple[()], ...] = (),
) -> tuple[tuple[Paged, ...], Pages]:
    """Move the kept slots of some groups into pool `number`, in slot order; one Paged index per group.

    pages: how many pages the pool has. slots: the most slots of a KV head; 0 for as many as the views have.
    shared: as in `Pages`; values are then not stored. codec_arrays: what each group's codecs need (`Codes`).
    """
    counts = jnp.concatenate([m.sum(-1, dtype=jnp.int32) for m in kept])
    need = -(-counts.reshape(-1) // page)
    ends = jnp.cumsum(need, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, jnp.arange(pages, dtype=jnp.int32), side="right").astype(jnp.int32)
    owner = jnp.where(owner < counts.size, owner, -1)
    start = (ends - need).reshape(counts.shape)

    def move(xs: tuple[Array, ...], fill: int) -> Array:
        return _scatter(xs, kept, start, page, pages, fill)

    # As wide for a small pool as for a large one: layers that share a budget must have equal structure.
    most = -(-(slots or max(m.shape[-1] for m in kept)) // page)
    of = jnp.maximum(owner, 0)
    within = jnp.arange(pages, dtype=jnp.int32) - (ends - need)[of]
    source = of * most + jnp.clip(within, 0, most - 1)

    def rows(xs: tuple[Array, ...], codec: Codec | None) -> Array | Codes:
        if codec is None or not any(codec_arrays):
            return encode(move(xs, 0), codec)
        return _encoded_in_lists(xs, kept, codec_arrays, codec, source, page, most)

    pool = Pages(
        rows(tuple(v.k for v in views), codecs[0]),
        None if shared is not None else rows(tuple(v.v for v in views), codecs[1]),
        move(tuple(v.pos for v in views), -1),
        owner,
        None if views[0].bias is None else move(tuple(v.bias for v in views), 0),  # type: ignore[arg-type]
        {name: move(tuple(v.traces[name] for v in views), 0) for name in views[0].traces},
        layers=counts.shape[0],
        shared=shared or 0,
    )
    # An empty head after the last page has no page of its own.
    first = jnp.minimum(start, pages - 1)
    indices, at = [], 0
    for m in kept:
        indices.append(Paged(first[at : at + m.shape[0]], counts[at : at + m.shape[0]], number, at, most))
        at += m.shape[0]
    return tuple(indices), pool


def _encoded_in_lists(
    xs: tuple[Array, ...],
    kept: tuple[Array, ...],
    codec_arrays: tuple[CodecArrays | tuple[()], ...],
    codec: Codec,
    source: Int[Array, "P"],
    page: int,
    most: int,
) -> Codes:
    """Kept slots as codes [P, page / granule, ...] of arrays that are fitted to layers and their heads.

    They are encoded in lists of `most` pages, layer by layer, before these pages are moved. source: which of
    the pages of all lists a page of the pool is; that of a free one is never read.
    """
    lists = []
    for x, m, arrays in zip(xs, kept, codec_arrays, strict=True):
        first = jnp.arange(m[..., 0].size, dtype=jnp.int32).reshape(m.shape[:3]) * most
        alone = _scatter((x,), (m,), first, page, first.size * most, 0)
        codes = encode(alone.reshape(*m.shape[:3], most * page, -1), codec, arrays)
        assert isinstance(codes, Codes)
        granules = page // codec.granule
        lists.append({n: a.reshape(-1, granules, *a.shape[4:]) for n, a in codes.data.items()})
    data = {n: jnp.concatenate([one[n] for one in lists])[source] for n in lists[0]}
    return Codes(data, codec, codes.width, codes.dtype)


def _scatter(
    xs: tuple[Array, ...],
    kept: tuple[Array, ...],
    start: Int[Array, "L B K"],
    page: int,
    pages: int,
    fill: int,
) -> Array:
    """Return every kept slot of every group at its row of the pool [P, page, ...]."""
    out = jnp.full((pages * page, *xs[0].shape[4:]), fill, xs[0].dtype)
    at = 0
    for x, m in zip(xs, kept, strict=True):
        rank = jnp.cumsum(m, axis=-1, dtype=jnp.int32) - 1
        row = jnp.where(m, start[at : at + m.shape[0], ..., None] * page + rank, FREE)
        out = out.at[row.reshape(-1)].set(x.reshape(-1, *x.shape[4:]), mode="drop")
        at += m.shape[0]
    return out.reshape(pages, page, *out.shape[1:])


def put_traces(segment: Paged, pool: Pages, traces: dict[str, Float[Array, "Lg B K S"]]) -> Pages:
    """Put the traces of the slots in a group's pages into the pool, in the order of `gather_pages`."""
    page = pool.page_tokens
    slot = jnp.arange(segment.most * page, dtype=jnp.int32)[None, None, None]
    row = jnp.repeat(pool.table(segment), page, axis=3) * page + slot % page
    # Pages after a head's end may belong to another head.
    row = jnp.where(slot < segment.lengths[..., None], row, FREE).reshape(-1)

    def put(old: Array, new: Array) -> Array:
        return old.reshape(-1).at[row].set(new.reshape(-1), mode="drop").reshape(old.shape)

    return dataclasses.replace(pool, traces={name: put(x, traces[name]) for name, x in pool.traces.items()})


def attend_pages(
    q: Float[Array, "B N T H"],
    segment: Paged,
    layer: int | Array,
    pool: Pages,
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """Attention of a few queries over one layer's pages; returns (out, lse).

    implementation: as of `kvjax.ops.decode.ragged_decode`; None takes the kernel if it can run. The kernel
    takes every live slot as visible to each query, as in a decode step, and reads no positions. Raises
    NotImplementedError if a forced one cannot run.
    """
    k, v = with_arrays((pool.k, pool.v), jax.tree.map(lambda x: x[None], segment.codec_arrays))
    met = meet(q, k, v)
    if met.turned:
        turned = dataclasses.replace(pool, **with_arrays(dict(k=met.k, v=met.v), ()))
        out, lse = attend_pages(
            met.q, segment, layer, turned, q_pos, scale=scale, softcap=softcap, implementation=implementation
        )
        return met.back(out), lse
    chosen = form("attention over pages", implementation, q, segment, pool, **refusals(q, segment, pool))
    if chosen == "reference":
        return _attend_walking(q, segment, layer, pool, q_pos, scale=scale, softcap=softcap)
    page = pool.page_tokens

    def listed(x: Array) -> Array:
        """Return [P, page] of a layer's KV heads, as [B, K, S]."""
        return x[pool.table(segment)].reshape(*segment.lengths.shape, -1)

    def rows(x: Array | Codes) -> Array | ragged.CodedRows:
        numbers = x.data["codes"] if isinstance(x, Codes) else x
        flat = numbers.reshape(-1, numbers.shape[-1])
        return ragged.CodedRows(flat, listed(x.data["scale_zero"])) if isinstance(x, Codes) else flat

    return ragged.ragged_decode(
        q, rows(pool.k), None if pool.v is None else rows(pool.v),
        segment.first * page, segment.lengths,
        most=segment.most * page, aligned=page, scale=scale, values=pool.shared or None,
        bias=None if pool.bias is None else listed(pool.bias), softcap=softcap, implementation=chosen,
    )  # fmt: skip


def refusals(q: Array, segment: Paged, pool: Pages) -> dict[str, str]:
    """Why the kernel of each platform cannot read these pages."""
    codes = [x for x in (pool.k, pool.v) if isinstance(x, Codes)]
    if not all(map(is_rows, codes)):
        why = "they hold such codes, expected float32, bfloat16 or 8 bits with a scale and a zero per slot"
        return dict(tpu=why, gpu=why)
    page, heads = pool.page_tokens, segment.lengths.shape[-1]
    k, v = (x.data["codes"] if isinstance(x, Codes) else x for x in (pool.k, pool.v))
    assert k is not None
    return ragged.refusals(q, k, v, page, (len(codes) + (pool.bias is not None), heads, segment.most * page))


def _attend_walking(
    q: Array,
    segment: Paged,
    layer: int | Array,
    pool: Pages,
    q_pos: Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array]:
    """Attend by the reference, for any queries and pages.

    A pool of one layer is read at once. In a pool of several layers, the layer's pages are walked in blocks
    with an online softmax: the trip count is data, so a layer with fewer pages costs less.
    """
    if any(isinstance(x, Codes) and any(fitted_words(x.codec)) for x in (pool.k, pool.v)):
        # Codes with arrays fitted to a layer's heads are decoded for this layer alone, so its pages are
        # gathered.
        return attend(q, gather_pages(segment, pool), q_pos, scale=scale, softcap=softcap)[:2]
    b, n, t, h = q.shape
    kv_heads = segment.lengths.shape[-1]
    lists, rows = b * kv_heads, n // kv_heads * t
    queries = q.reshape(lists, rows, h)
    # Queries of one KV head share their positions across the group.
    pos = jnp.broadcast_to(q_pos[:, None, None, :], (b, kv_heads, n // kv_heads, t)).reshape(lists, rows)
    visit = partial(_visit_block, queries=queries, q_pos=pos, scale=scale, softcap=softcap)
    width = jax.eval_shape(pool.values).shape[-1]
    carry = (jnp.full((lists, rows), NEG_INF), jnp.zeros((lists, rows)), jnp.zeros((lists, rows, width)))
    if pool.layers == 1:
        top, weight, out = visit(carry, pool, jnp.where(pool.owner < 0, lists, pool.owner))
    else:
        top, weight, out = _walk(visit, carry, pool, (segment.first_layer + layer) * lists, lists)
    safe = jnp.where(weight == 0, 1.0, weight)
    lse = jnp.where(weight == 0, NEG_INF, top + jnp.log(safe))
    out = (out / safe[..., None]).astype(q.dtype)
    return out.reshape(b, n, t, width), lse.reshape(b, n, t)


Carry = tuple[Array, Array, Array]


def _walk(
    visit: Callable[[Carry, Pages, Array], Carry], carry: Carry, pool: Pages, base: int | Array, lists: int
) -> Carry:
    """Apply `visit` to the pages of KV heads base .. base + lists - 1, block by block."""
    owners = jnp.where(pool.owner < 0, FREE, pool.owner)
    bounds = jnp.stack([jnp.asarray(base, jnp.int32), jnp.asarray(base + lists, jnp.int32)])
    ends = jnp.searchsorted(owners, bounds).astype(jnp.int32)
    total = pool.owner.shape[0]
    block = min(total, max(1, WALK_TOKENS // pool.page_tokens))

    def body(i: int | Array, carry: Carry) -> Carry:
        # The last block is shifted back to stay inside the pool; pages visited before are masked.
        first = ends[0] + i * block
        at = jnp.minimum(first, total - block)
        pages = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, block), pool)
        number = at + jnp.arange(block, dtype=jnp.int32)
        mine = (number >= first) & (number < ends[1])
        return visit(carry, pages, jnp.where(mine, pages.owner - base, lists).astype(jnp.int32))

    return jax.lax.fori_loop(0, -(-(ends[1] - ends[0]) // block), body, carry)


def _visit_block(
    carry: Carry,
    pages: Pages,
    who: Int[Array, "P"],
    *,
    queries: Float[Array, "L R H"],
    q_pos: Int[Array, "L R"],
    scale: float,
    softcap: float | None,
) -> Carry:
    """Fold pages into the running (max, weight, values) of their KV heads; who = lists means no head."""
    top, weight, out = carry
    lists = queries.shape[0]
    mine = jnp.minimum(who, lists - 1)
    k, v = dense(pages.k), pages.values()
    s = jnp.einsum("prh,pjh->prj", queries[mine], k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    if pages.bias is not None:
        s = s + pages.bias[:, None, :]
    key = pages.pos[:, None, :]
    seen = (key >= 0) & (key <= q_pos[mine][..., None]) & (who < lists)[:, None, None]
    s = jnp.where(seen, s, NEG_INF)
    new_top = jnp.maximum(top, jax.ops.segment_max(s.max(-1), who, lists, mode="drop"))
    safe_top = jnp.where(new_top == NEG_INF, 0.0, new_top)
    p = jnp.exp(s - safe_top[mine][..., None])
    add = jnp.einsum("prj,pjv->prv", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    fade = jnp.exp(top - safe_top)
    weight = weight * fade + jax.ops.segment_sum(p.sum(-1), who, lists, mode="drop")
    out = out * fade[..., None] + jax.ops.segment_sum(add, who, lists, mode="drop")
    return new_top, weight, out


def take_pages(
    tables: tuple[Paged, ...], pool: Pages, index: Int[Array, "R"], pages: int | None = None
) -> tuple[tuple[Paged, ...], Pages]:
    """Take the pages of rows `index` as rows 0 .. R - 1, in owner order still; tables are all of the pool's.

    pages: how many the new pool has (static), at least as many as these rows own; by default R / B times as
    many as before, since a pool is sized for the most that each of its rows can need, unless it was cut.
    """
    _, rows, heads = tables[0].lengths.shape
    # Rows of a pool that was cut own unequal parts of it.
    far = -(-pool.far * len(index) // rows) if pages is None else len(index) * heads * tables[0].most
    pages = pool.owner.shape[0] * index.shape[0] // rows if pages is None else pages
    lists = pool.layers * rows * heads
    owned = jnp.where(pool.owner < 0, lists, pool.owner)
    need = jnp.zeros(lists, jnp.int32).at[owned].add(1, mode="drop")
    first = _starts(need).reshape(pool.layers, rows, heads)[:, index]
    need = need.reshape(first.shape[0], rows, heads)[:, index]
    start, page = _starts(need.reshape(-1)), jnp.arange(pages, dtype=jnp.int32)
    owner = jnp.searchsorted(start + need.reshape(-1), page, side="right").astype(jnp.int32)
    safe = jnp.minimum(owner, need.size - 1)
    free = owner >= need.size
    source = jnp.where(free, pool.owner.shape[0] - 1, first.reshape(-1)[safe] + page - start[safe])
    moved = jax.tree.map(lambda x: there(lambda y: y[source], x), pool)
    moved = dataclasses.replace(
        moved,
        owner=jnp.where(free, -1, owner),
        pos=jnp.where(free[:, None], -1, moved.pos),
        far=min(far, pages) if pool.far else 0,
    )
    start = jnp.minimum(start.reshape(need.shape), pages - 1)

    def follow(segment: Paged) -> Paged:
        at = slice(segment.first_layer, segment.first_layer + segment.lengths.shape[0])
        return dataclasses.replace(segment, first=start[at], lengths=segment.lengths[:, index])

    return tuple(follow(t) for t in tables), moved


def _starts(need: Int[Array, "L"]) -> Int[Array, "L"]:
    """Find the first page of each KV head, if heads are stored one after the other."""
    return jnp.cumsum(need, dtype=jnp.int32) - need
