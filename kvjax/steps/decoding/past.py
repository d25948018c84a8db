"""The slots that a layer attends to in a decode step, and the pages that a method picks of them."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.phase import PairRotation
from kvjax.models.mixer import Layer
from kvjax.state.cache import GroupState, Segment, Slots


class PickedPages(NamedTuple):
    """Picked pages, how many of them count (from the first), and a bias per query head."""

    pages: Int[Array, "B K M"]
    counts: Int[Array, "B K"]
    bias: Float[Array, "B N P"] | None = None


class FoundPicks(NamedTuple):
    """The pages that a method picks from all slots of a layer together, and from each of their parts.

    far: the body in host memory from which they were picked, and the picks there, if copies of them are read.
    """

    whole: PickedPages
    parts: tuple[PickedPages, ...]
    far: tuple[Slots, PickedPages] | None = None


class Past(NamedTuple):
    """The slots a layer attends to, its own or those of the layer it reads, and the method of their group.

    values: segments whose values replace those of `parts`. above: as in `LayerSlots`. rotation: how keys of
    the parts are rotated when they are read.
    """

    gm: GroupMethod
    index: int | Array  # pyright: ignore[reportIncompatibleMethodOverride]
    parts: tuple[Segment, ...]
    values: tuple[Slots, ...] | None = None
    above: bool = False
    rotation: PairRotation | None = None

    @property
    def tail(self) -> Slots:
        """The part that new tokens are written to."""
        tail = self.parts[-1]
        assert isinstance(tail, Slots)
        return tail


def past_of_others(gms: tuple[GroupMethod, ...], gm: GroupMethod, layer: Layer, state: GroupState) -> Past:
    """Return the past of a layer of group `gm` if another layer holds its slots, or their values."""
    slots, values = layer.taken.get("slots"), layer.taken.get("slot values")
    if slots is not None:
        source = layer.mixer.source_of("slots")
        owner = next(gm for gm in gms if gm.first == source)
        return Past(owner, 0, slots.state.parts, above=slots.above)
    assert values is not None
    return Past(gm, layer.index, state.parts, tuple(s.layer(0) for s in values.state.parts))
