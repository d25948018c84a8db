"""The pages of a body that a read method visits: chosen, taken from a layer below, brought to the device."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
from jaxtyping import Array, Int

from kvjax.compress.summaries import as_queries_meet
from kvjax.grammar.calls import shaped
from kvjax.grammar.read_protocols import Sampling
from kvjax.place.host import fetched
from kvjax.state.cache import Slots
from kvjax.state.codes import dense
from kvjax.steps.decoding.at_layer import AtLayer
from kvjax.steps.decoding.past import Past, Picks
from kvjax.steps.decoding.per_device import picked_on_each, split_of
from kvjax.steps.shared.run import Run


def pick(here: AtLayer) -> AtLayer:
    """Chooses the pages that this layer's query reads."""
    return here._replace(found=_chosen(here.run, here.past, here.q, here.token.length))


def pick_for_others(here: AtLayer) -> AtLayer:
    """Chooses pages for the layers above, and has the layer itself read all of its slots."""
    found, past = pick(here).found, here.past
    here = here._replace(past=past._replace(gm=past.gm.replaced(read=None)))
    return here.leaving(picks=found) if "picks" in here.layer.publishes else here


def take_picks(here: AtLayer) -> AtLayer:
    """Reads the pages that a layer below has chosen."""
    return here._replace(found=here.layer.taken.get("picks"))


def bring_picked(here: AtLayer) -> AtLayer:
    """Brings the chosen pages to the device from host memory, where it does not hold them."""
    past, found, body = here.past, here.found, here.past.parts[0]
    assert isinstance(body, Slots) and found is not None
    body, places = fetched(
        body, past.index, found.pages, found.counts, past.gm.read.granule, here.run.on_mesh
    )
    assert body.near is not None
    return here._replace(
        past=past._replace(parts=(body.near.slots, *past.parts[1:])),
        state=dataclasses.replace(here.state, bodies=(body,)),
        found=found._replace(pages=places),
    )


def as_met(past: Past, part: Slots) -> tuple[Slots, int | Array]:
    """A part with a layer's keys as queries meet them, and where that layer lies in it."""
    if past.gm.rope is None:
        return part, past.index
    one = jax.tree.map(lambda x: x[past.index][None], dataclasses.replace(part, near=None))
    return dataclasses.replace(one, k=as_queries_meet(past.gm, dense(one.k), one.pos)), 0


def _chosen(run: Run, past: Past, q: Array, length: Int[Array, "B"]) -> Picks:
    read, body = past.gm.read, past.parts[0]
    assert isinstance(body, Slots)
    body, index = as_met(past, body)
    if isinstance(read, Sampling):
        found = Picks(*read.sample(q, body, index, length))
    else:
        # The queries of a group choose together, as where what slots receive is summed.
        alone = getattr(read, "by_list", False)
        split = split_of(run.on_mesh, body, mass=True) if alone else None
        select = partial(read.select, implementation=run.without_gpu)
        found = Picks(*picked_on_each(split, select, q, body, index, length))
    lists, most = body.pos.shape[1:3], read.pages_visited(body.capacity)
    shaped(read, "pages", found.pages, "[B, K, M]", (*lists, most))
    shaped(read, "counts of pages", found.counts, "[B, K]", lists)
    if isinstance(read, Sampling):
        shaped(read, "biases", found.bias, "[B, N, M * granule]", (*q.shape[:2], most * read.granule))
    return found
