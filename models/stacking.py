"""How equal layers are stacked: in groups, which run one after the other or take turns as a pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from kvjax.models.layers import Params


class Group(NamedTuple):
    """A group of equal layers, which are stacked: `size` layers, every `stride`-th one from `first` on.

    A group of stride 1 is a run of neighbours. A pattern of p kinds of layers that repeats n times is p
    groups, one for each kind, of n layers at a stride of p. Tuples of groups list the p groups of a pattern
    one after the other.

    >>> list(Group(2, 3, stride=4).layers)
    [2, 6, 10]
    """

    first: int
    size: int
    stride: int = 1

    @property
    def layers(self) -> range:
        """The numbers of the group's layers."""
        return range(self.first, self.first + self.stride * self.size, self.stride)


def entries(groups: Sequence[Group]) -> tuple[tuple[Group, ...], ...]:
    """List the groups that run together: a run alone, or all groups of a pattern.

    Raises ValueError for an incomplete pattern.

    >>> [len(entry) for entry in entries([Group(0, 2), Group(2, 3, 2), Group(3, 3, 2)])]
    [1, 2]
    """
    out, at = [], 0
    while at < len(groups):
        first, size, stride = groups[at]
        entry = tuple(Group(first + i, size, stride) for i in range(stride))
        if tuple(groups[at : at + stride]) != entry or (size == 1 and stride > 1):
            raise ValueError(
                f"a pattern of {stride} groups of {size} layers begins with {groups[at]}, expected {entry} "
                f"with at least 2 layers each, got {tuple(groups[at : at + stride])}"
            )
        out.append(entry)
        at += stride
    return tuple(out)


def span(entry: Sequence[Group]) -> range:
    """Return the layers of a run, or of all members of a pattern."""
    return range(entry[0].first, entry[0].first + len(entry) * entry[0].size)


def members(entry: Any) -> tuple[Params, ...]:
    """Return the parameters of each group in an entry of `params["layers"]`, a dict or a pattern's tuple."""
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def layers_of_groups(params: Params) -> tuple[Params, ...]:
    """Return the parameters of every group, as `params["layers"]` holds them in its entries."""
    return tuple(p for entry in params["layers"] for p in members(entry))


def groups_in(params: Params) -> tuple[Group, ...]:
    """Find how the layers of parameters are stacked.

    >>> import numpy as np
    >>> one, two = {"q": np.zeros((1, 8, 8))}, {"q": np.zeros((2, 8, 8))}
    >>> groups_in({"layers": (one, (two, two))})[1:]
    (Group(first=1, size=2, stride=2), Group(first=2, size=2, stride=2))
    """
    out: list[Group] = []
    first = 0
    for entry in params["layers"]:
        each = members(entry)
        size = next(iter(each[0].values())).shape[0]
        out += [Group(first + i, size, len(each)) for i in range(len(each))]
        first += size * len(each)
    return tuple(out)


def in_entries(groups: Sequence[Group], of: Callable[[int, Group], Any]) -> tuple[Any, ...]:
    """Arrange what `of(number, group)` gives for every group in the form of `params["layers"]`."""
    out, at = [], 0
    for entry in entries(groups):
        each = [of(at + i, group) for i, group in enumerate(entry)]
        out += [tuple(each)] if len(each) > 1 else each
        at += len(each)
    return tuple(out)


def with_layers(params: Params, layers: Sequence[Params]) -> Params:
    """Replace the parameters of every group, in the order of `layers_of_groups`."""
    return {**params, "layers": in_entries(groups_in(params), lambda number, _: layers[number])}


def places(groups: Sequence[Group]) -> list[int]:
    """Rank every layer by number, listed one group after the other.

    >>> places([Group(2, 3, 2), Group(3, 3, 2)])
    [0, 2, 4, 1, 3, 5]
    """
    numbers = [number for group in groups for number in group.layers]
    place = {number: i for i, number in enumerate(sorted(numbers))}
    return [place[number] for number in numbers]


def in_layer_order(groups: Sequence[Group], x: Array) -> Array:
    """Sort x [L, ...], which lists the layers one group after the other, by their numbers."""
    at = places(groups)
    return x if at == sorted(at) else x[np.argsort(at)]


def in_group_order(groups: Sequence[Group], x: Array) -> Array:
    """List x [L, ...], which is sorted by the layers' numbers, one group after the other."""
    at = places(groups)
    return x if at == sorted(at) else x[np.array(at)]
