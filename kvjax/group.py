"""Groups: what a sentence means for one run of equal layers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kvjax.grammar import STEP, Budget, Keep, Method
from kvjax.keep.budget import Uniform
from kvjax.keep.score import Position


class GroupMethod(NamedTuple):
    """What a sentence means for one group of layers."""

    keep: Keep | None
    codecs: tuple[Any, Any]
    granule: int
    residual: int
    read: Any
    first: int

    @property
    def paged(self) -> bool:
        return self.keep is not None and not self.keep.allocate.uniform

    @property
    def evicting(self) -> bool:
        return self.keep is not None and self.keep.when == STEP

    @property
    def split(self) -> bool:
        """Whether the group has an encoded body and a plain tail, rather than one segment."""
        return not self.paged and (self.granule > 1 or self.residual > 0)


def group_method(method: Method, first: int, size: int, window: int | None) -> GroupMethod:
    """The part of a sentence that the layers first .. first + size - 1, stacked as one group, follow.

    Windowed layers keep their window and nothing else (token-wise codecs still encode them); the first
    `skip_layers` layers keep everything.
    """
    keep, store, read = method.keep, method.store, method.read
    codecs = (None, None) if store is None else (store.keys, store.values)
    granule = 1 if store is None else store.granule
    residual = 0 if store is None else store.residual
    if window is not None:
        plain = granule > 1 or residual > 0
        rule = Keep(Position(), Budget(window - 1), Uniform(), when=STEP)
        return GroupMethod(rule, (None, None) if plain else codecs, 1, 0, None, first)
    for part in (keep, read):
        if part is not None and first < part.skip_layers < first + size:
            raise ValueError(
                f"{method.id}: skip_layers={part.skip_layers} ends inside the stacked layers {first} to "
                f"{first + size - 1}: use {first} or {first + size}, or layers that are not stacked"
            )
    if keep is not None and (first < keep.skip_layers or keep.score is None):
        keep = None
    if read is not None and first < read.skip_layers:
        read = None
    if read is not None:
        granule = math.lcm(granule, read.granule)
    return GroupMethod(keep, codecs, granule, residual, read, first)
