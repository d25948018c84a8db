"""A lower bound of the memory that a prompt needs, so that one that cannot fit is refused unread."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import with_fitted
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model
from kvjax.ops.base.memory import offers_host
from kvjax.place.trim import counted
from kvjax.pure import bind
from kvjax.state.cache import lies_far, nbytes
from kvjax.steps import Run


def free_bytes() -> int:
    """Free memory of the computing device: the accelerator's, or the machine's on CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available)


def check_memory(model: Model, tokens: Any, method: Method, room: int, chunk: int | None = None) -> None:
    """Raise InputError for a prompt that needs more memory than there is, given its shape.

    tokens: as in `kvjax.prefill`. Only arrays that must be in memory at once count, so no prompt that could
    run is refused.
    """
    if (shape := _shape_of(tokens)) is None:
        return
    rows, length = shape
    needed = rows * least_bytes(model, method, length, room, chunk)
    devices = 1 if model.on_mesh is None else model.on_mesh.mesh.size
    if needed > (free := free_bytes()) * devices:
        raise InputError(
            f"{rows} rows of {length} tokens need at least {needed / 2**30:.1f} GiB, and "
            f"{free * devices / 2**30:.1f} GiB are free: read fewer rows at a time, {_smaller(model)}"
        )
    if method.host is not None:
        _check_host(model, method, rows, length, room)


def _check_host(model: Model, method: Method, rows: int, length: int, room: int) -> None:
    """InputError where keys and values that a method puts into host memory need more of it than is free."""
    assert method.host is not None
    if isinstance(model.config, BlockConfig) or not offers_host():
        return
    keys, free = not method.host.values_alone, int(psutil.virtual_memory().available) * jax.process_count()
    # Slots are traced only if they could exceed what is free: no method stores twice the bytes of its tokens.
    if rows * 2 * _cache_bytes(model, length, room, keys=keys) <= free:
        return
    if _changes(method):
        needed = rows * _stored_in_host(model, method, length, room)
    else:
        # A read keeps the newest tokens on the device.
        newest = 0 if method.read is None else method.read.newest or method.read.granule
        needed = rows * _cache_bytes(model, max(0, length - newest), room, keys=keys)
    if needed > free:
        raise InputError(
            f"{'keys and ' * keys}values of {rows} rows of {length} tokens and {room} free slots each need "
            f"at least {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are free: read "
            "fewer rows, shorter ones, or keep less of them, as snapkv + offloaded and kivi + offloaded do"
        )


def _stored_in_host(model: Model, method: Method, length: int, room: int) -> int:
    """Return one row's bytes in host memory after a prompt; 0 if only the data says how many slots stay."""
    if counted(method):
        return 0
    run = Run(model.config, bind(method, model))
    call = partial(steps.prefill, run, tokens_bound=length, room=room, compress=True)
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, length), (1,)))
    _, cache = jax.eval_shape(call, with_fitted(model.params, method), ids, lengths, None)
    return nbytes([x for x, far in zip(*map(jax.tree.leaves, (cache, lies_far(cache))), strict=True) if far])


def least_bytes(model: Model, method: Method, length: int, room: int, chunk: int | None) -> int:
    """Return a lower bound for one row of a prompt: a layer's input and output, and an uncompressed cache.

    For a Block Transformer, that of the block decoder, which reads and keeps one vector per block.
    """
    config, itemsize = model.config, model.params["embed"].dtype.itemsize
    if isinstance(config, BlockConfig):
        config, length, room = config.blocks, length // config.length, room // config.length
    # A layer's input, and what the layer adds to it.
    read = 2 * min(length, chunk or length) * config.d_model * itemsize
    return read if _changes(method) or method.host else read + _cache_bytes(model, length, room, config)


def _changes(method: Method) -> bool:
    """Whether a cache may take fewer bytes than its keys and values have."""
    acts = (method.keep, method.store, method.reread, method.layers, method.make, method.stack)
    return any(acts)


def _cache_bytes(
    model: Model, length: int, room: int, config: Config | None = None, keys: bool = True
) -> int:
    """Sum a row's bytes of keys and values as they are; config: instead of the model's. keys: count them."""
    config, itemsize = config or model.config, model.params["embed"].dtype.itemsize
    cache = 0
    for layer in range(config.layers):
        mixer, window = mixer_of(config, layer), config.window(layer)
        slots = mixer.slots(config)
        if slots is None or slots.fixed or slots.factors or mixer.source_of("slots") is not None:
            continue
        kept = length + room if window is None else min(length, window)
        width = slots.key * keys + (0 if slots.shared else slots.value)
        cache += slots.heads * width * kept * itemsize
    return cache


def _smaller(model: Model) -> str:
    """Return what would take less memory than the prompt, beside fewer rows."""
    if isinstance(model.config, BlockConfig):
        return "or shorter ones"
    return "shorter ones, or pieces of them (chunk=) under a method that keeps less"


def _shape_of(tokens: Any) -> tuple[int, int] | None:
    """Rows and tokens of a prompt; None for anything else, which is refused elsewhere."""
    if isinstance(tokens, jax.Array | np.ndarray):
        return (tokens.shape[0], tokens.shape[1]) if tokens.ndim == 2 else None
    if isinstance(tokens, list | tuple) and tokens and all(isinstance(row, Sized) for row in tokens):
        return len(tokens), max(len(row) for row in tokens)
    return None
