"""The numbers of the layers of a cache's groups, and how to sort by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def layers_of(cache: Any) -> list[range]:
    """Return the numbers of the layers of every group of a `Cache`."""
    out: list[range] = []
    first = 0
    while (group := len(out)) < len(cache.groups):
        stride = cache.strides[group] if cache.strides else 1
        size = next((x.shape[0] for x in jax.tree.leaves(cache.groups[group])), 1)
        # The groups of a pattern are side by side, and their layers take turns.
        out += [range(first + i, first + i + stride * size, stride) for i in range(stride)]
        first += stride * size
    return out


def by_layer(cache: Any, each: Sequence[T]) -> list[T]:
    """Sort `each`, which lists the layers of a `Cache` one group after the other, by their numbers."""
    if not cache.strides:
        return list(each)
    numbers = [number for layers in layers_of(cache) for number in layers]
    return [x for _, x in sorted(zip(numbers, each, strict=True), key=lambda pair: pair[0])]
