"""Slots in host memory: the device holds the pages that were read last, and fetches others when read.

Copying whole layers, if no read method picks pages, is in `kvjax.place.by_layer`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.model_kinds import Residence
from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import each_device, specs_of
from kvjax.ops.base.dispatch import alone
from kvjax.ops.base.memory import copy_blocks, listed, to_host
from kvjax.place.by_layer import far, far_pages
from kvjax.state.axes import specs_of_slots
from kvjax.state.cache import Near, Pages, Slots
from kvjax.state.codes import Codes, dense


@dataclasses.dataclass(frozen=True)
class Host(Residence):
    """Stores keys and values in host memory. All results equal those of the method without this word.

    With a read method, those of the body are in host memory, and the device holds the pages that were read
    last. resident: the share of the body's pages that the device holds, at least those that a step visits.
    Without a read method, which alone has pages to hold, all keys and values are in host memory, except an
    unencoded tail after codes of several tokens: a step copies those of a layer to the device while the layer
    below computes, as FlexGen does (Sheng et al., 2023, arXiv:2303.06865, section 4.1), and copies a new
    token's back. Of pages of unequal heads it copies as many as a layer can have, which is all that the layer
    has if every layer has a budget of its own. Positions, summaries and all else stay on the device. If
    programs of the backend have no access to host memory, everything is on the device. Prompts and functions
    on rows copy all of a group of layers to the device and back, and there are no gradients.

    >>> Host(0.25).places(64, page=8, visited=1), Host(0.25).places(64, page=8, visited=5)
    (2, 5)
    """

    resident: float = 0.0

    @property
    def requires(self) -> Reasons:
        return {
            Fact.OWN_SLOTS: "brings one layer after the other",
            Fact.SUMMARIES: "brings what is picked to the device",
        }

    def __post_init__(self):
        number = isinstance(self.resident, int | float) and not isinstance(self.resident, bool)
        if not number or not 0 <= self.resident <= 1:
            raise ValueError(f"resident is {self.resident!r}, expected a share from 0 to 1: write Host(0.25)")

    def places(self, slots: int, page: int, visited: int) -> int:
        """How many pages of a body of `slots` slots the device holds, if a step visits `visited`."""
        return min(slots // page, max(visited, math.ceil(self.resident * (slots // page))))


@dataclasses.dataclass(frozen=True)
class HostValues(Host):
    """Stores the values of a body in host memory, and its keys on the device.

    A read that looks at all keys has them at hand, and a step copies to the device the values that it picks
    and that the device does not hold. All results equal those of the method without this word. Without a read
    method it is `Host`, and a read must pick anew in every step.

    >>> HostValues(0.25).places(64, page=8, visited=1)
    2
    """

    values_alone = True

    @property
    def requires(self) -> Reasons:
        return {Fact.OWN_SLOTS: "brings one layer after the other"}


def in_its_memory(host: Host | None, read: Any, slots: Slots) -> Slots:
    """Move slots to the memory that `host` says; leave them as they are without such a word."""
    if host is None:
        return slots
    return far(slots) if read is None else in_host_memory(host, read, slots)


def pool_in_its_memory(host: Host | None, pool: Pages, most: int) -> Pages:
    """Move a pool to the memory that `host` says; most: the most pages of a layer."""
    return pool if host is None else far_pages(pool, most)


def in_host_memory(host: Host, read: Any, body: Slots) -> Slots:
    """Move a body to host memory, keys included or not, none of whose pages is cached on the device yet."""
    page, visited = read.granule, read.pages_visited(body.capacity)
    places = host.places(body.capacity, page, visited)
    bare = _bare(body)
    if _spans(body.k, page):
        bare["k"] = jax.eval_shape(dense, body.k)

    def empty(x: Array | jax.ShapeDtypeStruct) -> Array:
        size = x.shape[3] * page // body.capacity
        return jnp.zeros((*x.shape[:3], places * size, *x.shape[4:]), x.dtype)

    slots = Slots(**jax.tree.map(empty, bare), shared=body.shared)
    nothing = jnp.zeros((*body.pos.shape[:3], places), jnp.int32)
    alone = isinstance(host, HostValues)
    near = Near(dataclasses.replace(slots, pos=slots.pos - 1), nothing - 1, nothing, alone)
    return dataclasses.replace(body, k=body.k if alone else to_host(body.k), v=to_host(body.v), near=near)


def _bare(slots: Slots) -> dict[str, Any]:
    """Return what the device's copies hold of slots, by field."""
    return {name: getattr(slots, name) for name in ("k", "v", "pos", "bias")}


def _spans(keys: Array | Codes, page: int) -> bool:
    """Whether keys encoded together may lie in two pages, so that copies of pages hold them decoded."""
    return isinstance(keys, Codes) and page % keys.codec.granule != 0


def forgotten(near: Near) -> Near:
    """Mark the device's pages all as empty."""
    clear = jax.tree.map(jnp.zeros_like, near)
    slots = dataclasses.replace(clear.slots, pos=clear.slots.pos - 1)
    return dataclasses.replace(near, slots=slots, pages=clear.pages - 1, used=clear.used)


def fetched(
    body: Slots, layer: int | Array, pages: Int[Array, "B K M"], counts: Int[Array, "B K"], page: int,
    on: OnMesh | None = None,
) -> tuple[Slots, Int[Array, "B K M"]]:  # fmt: skip
    """Copy the first `counts` of `pages` of a layer to the device; return the body, and their places there.

    A page that the device does not hold replaces the least recently read one. Only such pages are
    copied from host memory; on a mesh every device copies those of its own KV heads.
    Raises NotImplementedError if KV heads are split over devices without rules.
    """
    if on is None:
        if not alone(body):
            raise NotImplementedError(
                "a cache in host memory that is spread over several devices was given without rules: place "
                "the model by kvjax.spread(model, mesh, rules), or on one device"
            )
        return _fetched(body, jnp.asarray(layer), pages, counts, page=page)
    lists = specs_of(on, ("batch", "kv_heads"), pages)
    specs = specs_of_slots(body, on), specs_of(on, (), jnp.asarray(layer)), lists, lists
    call = each_device(on, partial(_fetched, page=page), specs, (specs[0], lists))
    return call(body, jnp.asarray(layer), pages, counts)


def _fetched(
    body: Slots, layer: Array, pages: Int[Array, "B K M"], counts: Int[Array, "B K"], *, page: int
) -> tuple[Slots, Int[Array, "B K M"]]:
    near = body.near
    assert near is not None and near.pages is not None and near.used is not None
    held, used = near.pages[layer], near.used[layer]
    wanted = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    same = (held[:, :, None] == pages[..., None]) & wanted[..., None]
    there = same.any(-1)
    # Places that are read now come last; empty places come first.
    order = jnp.argsort(jnp.where(same.any(2), np.iinfo(np.int32).max, used), axis=-1, stable=True)
    missing = wanted & ~there
    turn = jnp.maximum(jnp.cumsum(missing, -1, dtype=jnp.int32) - 1, 0)
    found = jnp.argmax(same, -1).astype(jnp.int32)
    place = jnp.where(missing, jnp.take_along_axis(order, turn, axis=-1).astype(jnp.int32), found)
    mine = (place[..., None] == jnp.arange(held.shape[2], dtype=jnp.int32)[None, None, None]) & wanted[
        ..., None
    ]
    read = mine.any(2)
    held = jnp.where(read, jnp.where(mine, pages[..., None], 0).sum(2, dtype=jnp.int32), held)
    used = jnp.where(read, used.max(-1, keepdims=True) + 1, used)
    where, count = listed(missing)
    rows, heads, most = pages.shape
    of_list = layer * rows * heads + where // most
    pages_of = body.capacity // page
    source = of_list * pages_of + pages.reshape(-1)[where]
    target = of_list * held.shape[2] + place.reshape(-1)[where]

    def copy(far: Array, to: Array, source: Array = source) -> Array:
        return copy_blocks(to, far, (source, target), count, far.shape[3] * page // body.capacity)

    far, to, done = _bare(body), _bare(near.slots), {}
    if _spans(body.k, page):
        one = dense(jax.tree.map(lambda x: x[layer][None], far.pop("k")))
        done["k"] = copy(one, to.pop("k"), source - layer * rows * heads * pages_of)
    put = jax.lax.dynamic_update_index_in_dim
    new = dataclasses.replace(
        near,
        slots=dataclasses.replace(near.slots, **done | jax.tree.map(copy, far, to)),
        pages=put(near.pages, held, layer, 0),
        used=put(near.used, used, layer, 0),
    )
    return dataclasses.replace(body, near=new), place
