"""The KV cache: what a decoder keeps of its past, as one plain pytree.

A cache has one `GroupState` for each run of equal layers, stacked on axis Lg; a layer's past is the union of
its parts. A slot knows its token's position (`pos`, -1 = empty) and nothing else about order. What is kept,
how it is encoded and what is read is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from kvjax.base.errors import InputError
from kvjax.hosts.arrays import fetch
from kvjax.mesh.on_mesh import OnMesh
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.memory import offers_host
from kvjax.ops.recurrent.recurrence import StackedState
from kvjax.state.codes import CodecArrays, Codes, dense, encode, layer_of, width_of
from kvjax.state.layer_order import by_layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Unordered slots of Lg layers.

    Args:
        k: keys [Lg, B, K, S, H], or Codes.
        v: values likewise; None if they are the first `shared` channels of the keys (latents).
        pos: token position per slot, -1 = empty.
        bias: added to the logits.
        traces: numbers that a method keeps per slot; they move with the slots.
        summary: what a read method keeps per page of slots.
        sums: what a read method keeps per KV head, such as sums and means over its slots, [Lg, B, K, ...].
        near: if k and v are in host memory, copies of some pages on the device.
        shared: how many channels of the keys are the values.
        far: whether k and v are in host memory and copied layer by layer (`kvjax.place.by_layer`).

    >>> import kvjax
    >>> _, cache = kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2, 3]], room=5)
    >>> type(cache.groups[0].tail).__name__, cache.groups[0].tail.pos.max().item()
    ('Slots', 2)
    """

    k: Array | Codes
    v: Array | Codes | None
    pos: Int[Array, "Lg B K S"]
    bias: Float[Array, "Lg B K S"] | None = None
    traces: dict[str, Float[Array, "Lg B K S"]] = dataclasses.field(default_factory=dict)
    summary: dict[str, Array] = dataclasses.field(default_factory=dict)
    sums: dict[str, Array] = dataclasses.field(default_factory=dict)
    near: Near | None = None
    shared: int = dataclasses.field(default=0, metadata=dict(static=True))
    far: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def capacity(self) -> int:
        return self.pos.shape[-1]

    @property
    def kv_heads(self) -> int:
        return self.pos.shape[-2]

    @property
    def rows(self) -> int:
        """Fewer than those of the cache, if copies of a row share the slots."""
        return self.pos.shape[-3]

    @property
    def value_width(self) -> int:
        """How many channels a value has."""
        return self.shared if self.v is None else width_of(self.v)

    def layer(self, index: int | Array) -> Slots:
        """Return the slots of one layer, without the Lg axis."""
        return jax.tree.map(lambda x: layer_of(x, index), self)

    def keys(self) -> Keys:
        """Return what attention reads; leading axes are unchanged."""
        k = dense(self.k)
        return Keys(k, k[..., : self.shared] if self.v is None else dense(self.v), self.pos, self.bias)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Near:
    """Copies on the device of R pages of every KV head's slots in host memory, or of all slots of one layer.

    slots: page m of a head is in slots m * page .. m * page + page - 1. pages: which of the head's pages
    that is, -1 = none. used: when it was last read, in steps of its head, 0 = never. Both are None if
    slots are those of one layer, while a program runs. values_alone: keys are on the device, too.
    """

    slots: Slots
    pages: Int[Array, "Lg B K R"] | None = None
    used: Int[Array, "Lg B K R"] | None = None
    values_alone: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """One pool of pages that rows and heads share, for one layer or several.

    k, v: [P, page, H] or Codes (v None: the first `shared` channels of k); pos, bias: [P, page]. owner[p] =
    (layer * B + row) * K + head with layers counted inside the pool, or -1 if the page is free; pages are in
    the order of their owners. traces: as of `Slots`, [P, page]. summary: what a read method keeps per
    `granule` of its slots, [P, page / granule, ...]. far: the most pages of a layer, as many as are copied to
    the device for it, if k and v are in host memory; else 0.
    """

    k: Array | Codes
    v: Array | Codes | None
    pos: Int[Array, "P page"]
    owner: Int[Array, "P"]
    bias: Float[Array, "P page"] | None = None
    traces: dict[str, Float[Array, "P page"]] = dataclasses.field(default_factory=dict)
    summary: dict[str, Array] = dataclasses.field(default_factory=dict)
    layers: int = dataclasses.field(default=1, metadata=dict(static=True))
    shared: int = dataclasses.field(default=0, metadata=dict(static=True))
    far: int = dataclasses.field(default=0, metadata=dict(static=True))

    def values(self) -> Array:
        return dense(self.k)[..., : self.shared] if self.v is None else dense(self.v)

    @property
    def page_tokens(self) -> int:
        return self.pos.shape[-1]

    def table(self, lists: Paged) -> Int[Array, "*lists M"]:
        """Return the page table of every KV head: its own pages, then others, which its length excludes."""
        page = np.arange(lists.most, dtype=np.int32).reshape((1,) * lists.first.ndim + (-1,))
        return (lists.first[..., None] + page).clip(max=self.owner.shape[0] - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """A segment whose slots are in one of the cache's pools, with the pages of a KV head side by side.

    first: the first page of each (row, KV head). lengths: the live slots of each. `pool` is the pool's index,
    `first_layer` the group's first layer in it, and `most` the most pages that a head can have. codec_arrays:
    as of `Codes`, for the codes of these slots. near: while a program runs, the device's copy of one layer's
    pages.
    """

    first: Int[Array, "Lg B K"]
    lengths: Int[Array, "Lg B K"]
    pool: int = dataclasses.field(metadata=dict(static=True))
    first_layer: int = dataclasses.field(metadata=dict(static=True))
    most: int = dataclasses.field(metadata=dict(static=True))
    codec_arrays: CodecArrays = dataclasses.field(default_factory=dict)
    near: Pages | None = None

    @property
    def rows(self) -> int:
        return self.lengths.shape[-2]

    def layer(self, index: int | Array) -> Paged:
        return jax.tree.map(lambda x: x[index], dataclasses.replace(self, near=None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The recurrent state of Lg layers without slots: arrays [Lg, B, ...] by name, or Codes."""

    data: dict[str, Array | Codes]

    def layer(self, index: int | Array) -> dict[str, Array]:
        """Return the unencoded arrays of one layer, without the Lg axis."""
        return {name: _of_layer(x, index) for name, x in self.data.items()}

    def layer_in_place(self, index: int | Array, names: frozenset[str]) -> dict[str, Array | StackedState]:
        """`layer`, except that the arrays `names` that are not encoded stay in the stack."""

        def one(name: str, x: Array | Codes) -> Array | StackedState:
            if name in names and not isinstance(x, Codes):
                return StackedState(x, index)
            return _of_layer(x, index)

        return {name: one(name, x) for name, x in self.data.items()}

    def replaced(self, index: int | Array, new: dict[str, Array | StackedState]) -> State:
        """Write the states of one layer, encoded as before."""

        def put(old: Array | Codes, x: Array | StackedState) -> Array | Codes:
            if isinstance(x, StackedState):
                return x.layers
            fresh = encode(x, old.codec) if isinstance(old, Codes) else x.astype(old.dtype)
            # `.at[index].set` would handle an index outside the stack by reading and selecting all of it.
            return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0), old, fresh)

        return State({n: put(x, new[n]) for n, x in self.data.items()})


def _of_layer(x: Array | Codes, index: int | Array) -> Array:
    return dense(jax.tree.map(lambda a: a[index], x))


Segment = Slots | Paged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupState:
    """What a group of Lg equal layers holds of its past; empty without a cache.

    bodies: slots that new tokens do not enter, oldest first: pages, encoded granules, and shared prefixes of
    fewer rows (`kvjax.place.common`). tail: the slots that new tokens enter. state: the state of layers
    without slots. rows: what a method carries per row, trees of arrays [Lg, B, ...] by name. sinks: the first
    tokens of every row, unencoded, if a store keeps some of them so; no other token enters these slots.
    """

    bodies: tuple[Segment, ...] = ()
    tail: Slots | None = None
    state: State | None = None
    rows: dict[str, Any] = dataclasses.field(default_factory=dict)
    sinks: Slots | None = None

    @property
    def parts(self) -> tuple[Segment, ...]:
        """All slots: the bodies, the first tokens, then the tail."""
        return (*self.bodies, *(s for s in (self.sinks, self.tail) if s is not None))

    def with_parts(self, parts: Sequence[Segment]) -> GroupState:
        """Copy the group with other `parts`, in the same order."""
        one, found = len(self.bodies), list(parts)
        tail = found.pop() if self.tail is not None else None
        sinks = found.pop() if self.sinks is not None else None
        assert len(found) == one and not isinstance(tail, Paged) and not isinstance(sinks, Paged)
        return dataclasses.replace(self, bodies=tuple(found), sinks=sinks, tail=tail)

    def with_tail(self, tail: Slots) -> GroupState:
        return dataclasses.replace(self, tail=tail)


NOTHING = GroupState()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["groups", "next", "pools"],
    meta_fields=["method", "model", "strides"],
    drop_fields=["spare", "added", "on_mesh"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The whole KV cache: explicit, donated, returned. `next[b]` is the position of row b's next token.

    method (a `kvjax.grammar.Method`, which this folder cannot import) and model are static and say what
    filled the cache: equal methods give equal tree structures. spare is the host's lower bound of how many
    more tokens fit, so that a step need not ask the device; added is the host's note of the newest tokens,
    for `rollback` (`kvjax.api.rollback.Added`); on_mesh says how arrays are sharded. These three are not part
    of the tree. strides: how far apart the layers of each group are; empty if they are neighbours in all.
    """

    groups: tuple[GroupState, ...]
    next: Int[Array, "B"]
    pools: tuple[Pages, ...] = ()
    method: Any = None
    model: str = ""
    spare: int = 0
    added: Any = None
    on_mesh: OnMesh | None = None
    strides: tuple[int, ...] = ()

    def __repr__(self) -> str:
        # From shapes alone, so that it serves traced and consumed caches, too.
        arrays = [x for x in jax.tree.leaves(self) if hasattr(x, "shape") and hasattr(x, "dtype")]
        rows = getattr(self.next, "shape", ("?",))[0]
        method = "no method" if self.method is None else repr(self.method)
        return (
            f"<Cache: {rows} {'row' if rows == 1 else 'rows'}, {method}, {nbytes(arrays):,} bytes; "
            "kvjax.summary(cache) says what it holds>"
        )


def nbytes(tree: PyTree) -> int:
    """Count the bytes of every array in a cache.

    Everything counts: codes, scales, page tables, summaries, statistics, padding and free slots.

    Args:
        tree: a cache or any pytree of arrays, results of `jax.eval_shape` included.

    Returns:
        The number of bytes.

    Raises:
        InputError: if a leaf is not an array.

    >>> nbytes({"k": np.zeros((2, 3), np.float32)})
    24
    """
    leaves = jax.tree.leaves(tree)
    for x in leaves:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            hint = ": give its .params" if hasattr(x, "params") else ""
            raise InputError(f"nbytes is given {x!r:.60}, expected a cache or a pytree of arrays{hint}")
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)


def host_nbytes(tree: PyTree) -> int:
    """Count the part of `nbytes` in host memory; 0 if programs of the backend have no access to it.

    These are the keys and values of which the device holds copies of some pages (`Slots.near`), or of one
    layer at a time (`Slots.far`, `Pages.far`).

    >>> host_nbytes(np.zeros(3))
    0
    """
    if not offers_host():
        return 0
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(lies_far(tree)), strict=True)
    return sum(nbytes(x) for x, far in pairs if far)


def lies_far(tree: PyTree) -> PyTree:
    """For every array of a cache, or of its shapes, whether it is in host memory, if there is one."""

    def one(x: Any) -> Any:
        whole = jax.tree.map(lambda _: False, x)
        if not _is_far(x):
            return whole
        # Arrays with one number per slot stay on the device with the positions.
        least = x.pos.ndim if x.far else 0
        k, v = (jax.tree.map(lambda a: a.ndim > least, y) for y in (x.k, x.v))
        if isinstance(x, Slots) and x.near is not None and x.near.values_alone:
            k = whole.k
        return dataclasses.replace(whole, k=k, v=v)

    return jax.tree.map(one, tree, is_leaf=_is_far)


def _is_far(x: Any) -> bool:
    return bool(isinstance(x, Pages) and x.far) or (isinstance(x, Slots) and (x.near is not None or x.far))


def check_alive(cache: Cache) -> None:
    """Raise InputError for a value that is not a cache, and for a cache that a step has consumed."""
    if not isinstance(cache, Cache):
        raise InputError(f"cache is {cache!r}, expected a Cache, as kvjax.prefill and step return it")
    at = cache.next
    if isinstance(at, jax.Array) and not isinstance(at, Tracer) and at.is_deleted():
        raise InputError(
            "this cache was consumed by kvjax.step or generate, expected a live one: use what they returned, "
            "or kvjax.fork a cache before a step to keep it"
        )


def kept_positions(cache: Cache) -> list[Int[np.ndarray, "B K S"]]:
    """List the token position that each slot of a cache holds, on the host.

    Args:
        cache: a live cache.

    Returns:
        An array [B, K, S] per layer, in stack order; -1 is an empty slot. K and S are 0 where a layer carries
        a state instead of slots. If a method reads only some tokens of a prompt
        (`kvjax.keep.prompts.reread`), positions count those tokens alone.

    Raises:
        InputError: if the value is not a cache, or a step has consumed it.

    >>> import kvjax
    >>> streaming = kvjax.method("streamingllm", budget=6)
    >>> _, cache = kvjax.prefill(kvjax.load("recall-tiny"), [[*range(9)]], method=streaming, room=0)
    >>> sorted(kept_positions(cache)[0][0, 0].tolist())
    [-1, 0, 1, 2, 3, 7, 8]
    """
    check_alive(cache)
    return by_layer(cache, [layer for group in positions_by_group(cache) for layer in group])


def positions_by_group(cache: Cache) -> list[list[Int[np.ndarray, "B K S"]]]:
    """`kept_positions` of the layers of every group."""
    out = []
    for group in cache.groups:
        if group.state is not None:
            layers, rows = jax.tree.leaves(group.state)[0].shape[:2]
            out.append([np.full((rows, 0, 0), -1, np.int32)] * layers)
            continue
        # Copies of a row may share slots.
        rows, parts = cache.next.shape[0], [_positions(s, cache.pools) for s in group.parts]
        parts = [np.repeat(pos, rows // pos.shape[1], axis=1) for pos in parts]
        out.append([np.concatenate(layer, -1) for layer in zip(*parts, strict=True)])
    return out


def _positions(segment: Segment, pools: tuple[Pages, ...]) -> Int[np.ndarray, "Lg B K S"]:
    if isinstance(segment, Slots):
        return fetch(segment.pos)
    pool = pools[segment.pool]
    pos = fetch(pool.pos)[fetch(pool.table(segment))]
    pos = pos.reshape(*segment.lengths.shape, -1)
    return np.where(np.arange(pos.shape[-1]) < fetch(segment.lengths)[..., None], pos, -1)
