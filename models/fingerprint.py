"""Fingerprints: a short hash of everything that a model's caches and scores depend on."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.layers import Params

# Smaller arrays are summed by NumPy: compiling a program for their shape would take longer.
_SMALL = 2**18
_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint32"}


def fingerprint(config: object, params: Params, forms: str = "") -> str:
    """16 hexadecimal digits that name a config and every bit, dtype, name and shape of its parameters.

    forms: how the model stores slots, where an earlier release stored them otherwise.

    For every array two sums over all its numbers are computed, on its own device:

        sum_i m_i and sum_i (2 i + 1) m_i, mod 2^32, with m_i = mix(bits_i xor 0x9E3779B9 i),

    mix being the finaliser of MurmurHash3, and SHA-256 joins them. A stacked run of layers is an array of its
    own, so another stacking, whose caches have another layout, has another fingerprint; the placement of
    arrays does not matter.

    >>> fingerprint("config", {"w": np.zeros(3, np.float32)}) == fingerprint("config", {"w": np.zeros(3)})
    False
    """
    found = jax.tree.leaves_with_path(params)
    sums = jax.device_get([_sums(leaf) for _, leaf in found])
    digest = hashlib.sha256((described(config) + forms).encode())
    for (path, leaf), both in zip(found, sums, strict=True):
        name = f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} "
        digest.update(name.encode() + np.asarray(both, np.uint32).tobytes())
    return digest.hexdigest()[:16]


# A field of a config or of its words that was added after caches and fits had been saved: at its default
# value it is left out of fingerprints, so that those caches and fits still match their model.
ADDED = {"added later": True}


def described(word: Any) -> str:
    """Write the `repr` of a config, without fields that were added later and have their default value.

    >>> b = dataclasses.field(default=0, metadata=ADDED)
    >>> one = dataclasses.make_dataclass("One", [("a", int), ("b", int, b)])
    >>> described((one(1), one(1, 2)))
    '(One(a=1), One(a=1, b=2))'
    """
    if isinstance(word, tuple) and not hasattr(word, "_fields"):
        inner = ", ".join(map(described, word))
        return f"({inner},)" if len(word) == 1 else f"({inner})"
    if not dataclasses.is_dataclass(word) or isinstance(word, type):
        return repr(word)
    fields = {f.name: f for f in dataclasses.fields(word) if f.repr}
    shown = {
        name: getattr(word, name)
        for name, f in fields.items()
        if not (f.metadata == ADDED and getattr(word, name) == f.default)
    }
    return f"{type(word).__qualname__}({', '.join(f'{name}={described(x)}' for name, x in shown.items())})"


def _sums(x: Any) -> Any:
    """uint32 [2]: the two sums of an array; a small one is fetched, a large one summed on its device."""
    if x.size < _SMALL and getattr(x, "is_fully_addressable", True):
        held = np.ascontiguousarray(x)[..., None]
        return _mixed_sums(held.view(_UNSIGNED[held.dtype.itemsize]), np)
    return _sums_on_device(x)


@jax.jit
def _sums_on_device(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    return _mixed_sums(bits if bits.ndim > x.ndim else bits[..., None], jnp)


def _mixed_sums(bits: Any, xp: ModuleType) -> Any:
    # The index of an element from its indices along the axes: flattening a sharded array would gather it.
    number = xp.zeros((1,) * bits.ndim, xp.uint32)
    for axis, size in enumerate(bits.shape):
        stride = math.prod(bits.shape[axis + 1 :]) % 2**32
        along = xp.arange(size, dtype=xp.uint32) * xp.uint32(stride)
        number = number + along.reshape([-1 if a == axis else 1 for a in range(bits.ndim)])
    wide = bits.astype(xp.uint32)
    mixed = _mix(wide ^ number * xp.uint32(0x9E3779B9), xp)
    weighed = mixed * (number + number + xp.uint32(1))
    return xp.stack([lane.sum(dtype=xp.uint32) for lane in (mixed, weighed)])


def _mix(x: Any, xp: ModuleType) -> Any:
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return x ^ (x >> xp.uint32(16))
