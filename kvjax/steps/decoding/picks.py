"""Pages of a body that a read method visits: chosen, taken from a layer below, or copied to the device."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.summaries import as_ranked
from kvjax.grammar.calls import shaped
from kvjax.grammar.read_kinds import Foreseeing, Placing, Sampling
from kvjax.models.attending import rotated
from kvjax.models.mixers.attention import Attention
from kvjax.models.stacking import layers_of_groups
from kvjax.place.host import fetched
from kvjax.state.cache import Pages, Slots
from kvjax.state.codes import dense
from kvjax.state.page_gather import gather_pages, gather_summary, gather_traces
from kvjax.state.picked_pages import positions
from kvjax.steps.decoding.at_layer import AtLayer
from kvjax.steps.decoding.past import FoundPicks, Past, PickedPages
from kvjax.steps.decoding.per_device import picked_on_each, split_of
from kvjax.steps.shared.run import Run


def pick(here: AtLayer) -> AtLayer:
    """Choose the pages that this layer's query reads."""
    token, past = here.token, here.past
    q = here.q
    if isinstance(past.gm.read, Foreseeing):
        q = foreseen(here)
    elif isinstance(past.gm.read, Placing):
        apart = jnp.full((q.shape[0], 1), past.gm.read.apart, jnp.int32)
        q = rotated(here.layer.rope, here.x.q, apart, token.length) if past.gm.read.apart else here.x.q
    found = select_pages(here.token.run, past, q, token.length, here.pools)
    return here._replace(found=by_part(past, here.pools, found))


def foreseen(here: AtLayer) -> Float[Array, "B N 1 H"]:
    """Compute the rotated queries that this layer's weights make of what entered a lower layer's mixer."""
    token, layer = here.token, here.layer
    own = jax.tree.map(lambda w: w[layer.index], layers_of_groups(token.params)[layer.group])
    assert isinstance(layer.mixer, Attention)
    q = layer.mixer.project(own, layer.taken["foreseen"], layer.config).q
    return rotated(layer.rope, q, token.at[:, None], token.length)


def pick_for_others(here: AtLayer) -> AtLayer:
    """Choose pages for the layers above; the layer itself reads all of its slots."""
    token, past = here.token, here.past
    found = select_pages(here.token.run, past, here.q, token.length, here.pools)
    here = here._replace(past=past._replace(gm=past.gm.replaced(read=None)))
    if "picks" not in here.layer.publishes:
        return here
    if not here.token.run.method.aligned:
        # Layers above hold other tokens in these slots, so they get the positions of the chosen tokens.
        body, index = picked_from(past, here.pools)
        chosen = positions(body, index, past.gm.read.granule, found.pages, found.counts)
        found = found._replace(pages=jnp.where(chosen < 0, 2**30, chosen))
    return here.leaving(picks=found)


def take_picks(here: AtLayer) -> AtLayer:
    """Read the pages that a layer below chose."""
    return here._replace(found=by_part(here.past, here.pools, here.layer.taken["picks"]))


def find_picks(here: AtLayer) -> AtLayer:
    """Read those tokens chosen by a layer below that this layer holds."""
    pools, wanted = here.pools, jnp.sort(here.layer.taken["picks"].pages, axis=-1)
    body, index = picked_from(here.past, pools)
    pos = body.pos[index]
    at = jax.vmap(jax.vmap(jnp.searchsorted))(wanted, pos)
    same = jnp.take_along_axis(wanted, jnp.minimum(at, wanted.shape[-1] - 1), axis=-1) == pos
    _, slots = jax.lax.top_k(same.astype(jnp.int32), min(wanted.shape[-1], body.capacity))
    found = PickedPages(slots, same.sum(-1, dtype=jnp.int32))
    return here._replace(found=by_part(here.past, pools, found))


def bring_picked(here: AtLayer) -> AtLayer:
    """Copy the chosen pages from host memory to the device, unless the device holds them already."""
    past, found, body = here.past, here.found, here.past.parts[0]
    assert isinstance(body, Slots) and found is not None
    picks, far = found.whole, (body, found.whole)
    body, places = fetched(
        body, past.index, picks.pages, picks.counts, past.gm.read.granule, here.token.run.on_mesh
    )
    assert body.near is not None
    picks = picks._replace(pages=places)
    return here._replace(
        past=past._replace(parts=(body.near.slots, *past.parts[1:])),
        state=dataclasses.replace(here.state, bodies=(body,)),
        found=FoundPicks(picks, (picks,), far),
    )


def picked_from(past: Past, pools: tuple[Pages, ...]) -> tuple[Slots, int | Array]:
    """Return the slots from which a read picks, with keys rotated for queries, and the layer's index in them.

    If some of them are in pages, the body after the pages is concatenated to them.
    """
    body = past.parts[0]
    if isinstance(body, Slots):
        return as_met(past, body)
    tail = past.parts[1]
    assert isinstance(tail, Slots)
    pages, pool, own = body.layer(past.index), pools[body.pool], tail.layer(past.index)
    old, new = gather_pages(pages, pool), own.keys()
    join = lambda a, b: jnp.concatenate([a, b], axis=2)[None]  # noqa: E731
    summary = {n: join(x, own.summary[n]) for n, x in gather_summary(pages, pool).items()}
    sums = {n: x[None] for n, x in own.sums.items()}
    traces = {n: join(x, own.traces[n]) for n, x in gather_traces(pages, pool).items()}
    values = None if own.v is None else join(old.v, new.v)
    k, pos = join(old.k, new.k), join(old.pos, new.pos)
    union = Slots(k, values, pos, traces=traces, summary=summary, sums=sums, shared=own.shared)
    return as_met(past._replace(index=0, gm=past.gm.of_layer(past.index)), union)


def as_met(past: Past, part: Slots) -> tuple[Slots, int | Array]:
    """Return a part with a layer's keys as queries meet them, and the layer's index in it."""
    gm = past.gm
    if gm.rope is None and gm.computed is None:
        return part, past.index
    one = jax.tree.map(lambda x: x[past.index][None], dataclasses.replace(part, near=None))
    return dataclasses.replace(one, k=as_ranked(gm.of_layer(past.index), dense(one.k), one.pos)), 0


def by_part(past: Past, pools: tuple[Pages, ...], found: PickedPages) -> FoundPicks:
    """Sort the picks from all slots together by the parts that hold them."""
    body = past.parts[0]
    if isinstance(body, Slots):
        return FoundPicks(found, (found,))
    tail, granule = past.parts[1], past.gm.read.granule
    assert isinstance(tail, Slots)
    sizes = (body.most * pools[body.pool].page_tokens // granule, tail.capacity // granule)
    used = jnp.arange(found.pages.shape[2], dtype=jnp.int32)[None, None] < found.counts[..., None]
    parts, start = [], 0
    for size in sizes:
        at = found.pages - start
        mine, start = used & (at >= 0) & (at < size), start + size
        order = jnp.argsort(~mine, axis=-1, stable=True)[..., :size]
        pages = jnp.take_along_axis(jnp.where(mine, at, 0), order, axis=-1)
        parts.append(PickedPages(pages, mine.sum(-1, dtype=jnp.int32), _in_order(found.bias, order, granule)))
    return FoundPicks(found, tuple(parts))


def _in_order(
    bias: Float[Array, "B N P"] | None, order: Int[Array, "B K m"], granule: int
) -> Float[Array, "B N p"] | None:
    """Permute the pages of the biases of picked slots by `order`."""
    if bias is None:
        return None
    (b, n, _), heads = bias.shape, order.shape[1]
    rows = jnp.repeat(order, n // heads, axis=1)[..., None]
    return jnp.take_along_axis(bias.reshape(b, n, -1, granule), rows, axis=2).reshape(b, n, -1)


def select_pages(
    run: Run, past: Past, q: Float[Array, "B N 1 H"], length: Int[Array, "B"], pools: tuple[Pages, ...]
) -> PickedPages:
    """Select the pages that a layer's read selects for these queries."""
    read, paged = past.gm.read, not isinstance(past.parts[0], Slots)
    body, index = picked_from(past, pools)
    if past.gm.computed is not None:
        q = past.gm.computed.queries(q, body.kv_heads)
    if isinstance(read, Sampling):
        found = PickedPages(*read.sample(q, body, index, length))
    else:
        # A read that chooses for each KV head needs all queries of its group on one device.
        alone = read.by_list and not paged
        split = split_of(run.on_mesh, body, mass=True) if alone else None
        select = partial(read.select, implementation=run.implementation)
        found = PickedPages(*picked_on_each(split, select, q, body, index, length))
    lists, most = body.pos.shape[1:3], read.pages_visited(body.capacity)
    shaped(read, "pages", found.pages, "[B, K, M]", (*lists, most))
    shaped(read, "counts of pages", found.counts, "[B, K]", lists)
    if isinstance(read, Sampling):
        shaped(read, "biases", found.bias, "[B, N, M * granule]", (*q.shape[:2], most * read.granule))
    return found
