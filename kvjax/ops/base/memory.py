"""The two memories of a device: its own, and host memory, if the backend offers it to programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
# The kind of host memory that a device can copy from without help of the host.
KIND = "pinned_host"


def offers_host() -> bool:
    """Whether programs of the backend can keep arrays in host memory."""
    return any(memory.kind == KIND for memory in jax.devices()[0].addressable_memories())


def in_host(x: Any) -> bool:
    """Whether a JAX array is in host memory, by its type, which traced arrays have too."""
    return isinstance(x, jax.Array) and jax.typeof(x).memory_space == HOST


def to_host(tree: PyTree) -> PyTree:
    """Move arrays to host memory; no change if the backend offers none.

    >>> x = to_host(jnp.arange(3))
    >>> in_host(x) == offers_host(), in_host(to_device(x))
    (True, False)
    """
    return jax.tree.map(lambda x: jax.device_put(x, HOST), tree) if offers_host() else tree


def to_device(tree: PyTree) -> PyTree:
    """Move arrays to the device's memory; those already there are not touched."""
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE) if in_host(x) else x, tree)


def there(f: Callable[[Array], Array], x: Array) -> Array:
    """f(x) in the memory of x; f itself runs on the device, which takes all of x."""
    return to_host(f(to_device(x))) if in_host(x) else f(x)


def copy_blocks(
    to: Shaped[Array, "L B K S *r"],
    source: Shaped[Array, "l B K D *r"],
    moves: tuple[Int[Array, "n"], Int[Array, "n"]],
    count: Int[Array, ""],
    size: int,
) -> Shaped[Array, "L B K S *r"]:
    """`to` with the first `count` of some blocks of `size` slots copied from `source`, one after another.

    moves: for each block its index in `source` and its place in `to`, counted through all KV heads. Either
    array may be in host memory; then only these blocks are transferred.
    """
    rest, crosses = to.shape[4:], in_host(to) != in_host(source)
    far = to if in_host(to) else source
    pack = max(1, 4 // far.dtype.itemsize)
    if crosses and size % pack and far.shape[3] % pack == 0:
        return _by_words(to, source, moves, count, size, pack)
    # A TPU copies to and from host memory by one axis at a time.
    blocks = source.reshape(-1, size, *rest)

    def one(i: int | Array, to: Array) -> Array:
        block = jax.lax.dynamic_index_in_dim(blocks, moves[0][i])
        block = jax.device_put(block, HOST if in_host(to) else DEVICE) if crosses else block
        return jax.lax.dynamic_update_index_in_dim(to, block, moves[1][i], 0)

    return jax.lax.fori_loop(0, count, one, to.reshape(-1, size, *rest)).reshape(to.shape)


def _by_words(
    to: Shaped[Array, "L B K S *r"], source: Shaped[Array, "l B K D *r"],
    moves: tuple[Int[Array, "n"], Int[Array, "n"]], count: Int[Array, ""], size: int, pack: int,
) -> Shaped[Array, "L B K S *r"]:  # fmt: skip
    """`copy_blocks` where a TPU has `pack` slots, more than a block's, in one row of 32-bit words.

    It copies whole words to and from host memory. The words around a block come to the device with it; those
    of a block that goes to host memory come first, and go back with it.
    """
    span = -(-(size + pack - 1) // pack) * pack
    given = source.reshape(-1, *source.shape[4:])

    def words(rows: Array, start: Array) -> tuple[Array, Array]:
        first = jnp.minimum(start // pack * pack, rows.shape[0] - span)
        return jax.device_put(jax.lax.dynamic_slice_in_dim(rows, first, span), DEVICE), first

    def one(i: int | Array, rows: Array) -> Array:
        start, place = moves[0][i] * size, moves[1][i] * size
        if in_host(given):
            whole, first = words(given, start)
            block = jax.lax.dynamic_slice_in_dim(whole, start - first, size)
            return jax.lax.dynamic_update_slice_in_dim(rows, block, place, 0)
        block = jax.lax.dynamic_slice_in_dim(given, start, size)
        whole, first = words(rows, place)
        # XLA would write the block alone.
        whole = jax.lax.optimization_barrier(
            jax.lax.dynamic_update_slice_in_dim(whole, block, place - first, 0)
        )
        return jax.lax.dynamic_update_slice_in_dim(rows, jax.device_put(whole, HOST), first, 0)

    return jax.lax.fori_loop(0, count, one, to.reshape(-1, *to.shape[4:])).reshape(to.shape)


def listed(which: Bool[Array, "*shape"]) -> tuple[Int[Array, "n"], Int[Array, ""]]:
    """List the flat indices at which an array is true, in order, then all others; and count those that are.

    >>> places, count = listed(jnp.asarray([[False, True], [True, True]]))
    >>> places[: int(count)].tolist()
    [1, 2, 3]
    """
    order = jnp.argsort(~which.reshape(-1), stable=True).astype(jnp.int32)
    return order, which.sum(dtype=jnp.int32)
