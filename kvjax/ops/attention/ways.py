"""How tokens that are split over several devices attend to each other: the way that sends the fewest bytes.

`kvjax.ops.attention.split_tokens` says what each way does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.mesh.on_mesh import OnMesh
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide

WHOLE, GATHER, KEYS, HELPED, QUERIES = "whole", "gather", "keys", "helped", "queries"
# From so many tokens per device on, attention to another device's tokens takes longer than sending queries
# and outputs.
HELP_FROM = 4096


class Way(NamedTuple):
    """How queries of other devices attend to a set. hops: how many devices further its keys are visible."""

    kind: str
    hops: int = 0


class TransferBytes(NamedTuple):
    """Byte counts by which the cheapest way is chosen.

    parts: devices along the axis. asked: bytes of queries, and of outputs before merging, on one device.
    stored, attended: bytes of a set on all devices, as it is stored and as it is attended to.
    """

    parts: int
    asked: int
    stored: int
    attended: int

    def of_new(self, tokens: int, window: int | None) -> Way:
        """Choose the way of the new keys: a ring or a gather.

        A ring if a window needs only some of them, or if all would not fit beside the device's own
        queries and outputs; both send the same amount if all are needed. If all go round and there are many
        tokens, devices help each other.
        """
        last = self.parts - 1
        hops = last if window is None else min(last, -(-(window - 1) // (tokens // self.parts)))
        if hops == last and self.attended <= self.asked:
            return Way(GATHER)
        helped = hops == last > 1 and tokens // self.parts >= HELP_FROM
        return Way(HELPED if helped else KEYS, hops)

    def of_past(self) -> Way:
        """Choose the way of split slots: keys go round, or queries and outputs, whichever is less."""
        if self.asked * self.parts < self.stored:
            return Way(QUERIES)
        return Way(GATHER) if self.attended <= self.asked else Way(KEYS, self.parts - 1)


def ways_of(
    on: OnMesh,
    q: Array,
    sets: Sequence[Keys],
    made: Sequence[Any],
    window: int | None,
    clip: tuple[float, float] | None,
    shared: bool = False,
) -> tuple[Way, ...]:
    """How the queries of all devices attend to each set; the last one is that of the new tokens.

    made: the shapes of the sets as they are attended to. shared: whether values are channels of the keys.
    """
    parts = on.devices("tokens")
    same = on.rules.mesh_axes("slots") == on.rules.mesh_axes("tokens")
    out = []
    for keys, met in zip(sets, made, strict=True):
        asked = math.prod(q.shape[:3]) * bytes_asked(q, met)
        stored = _bytes(keys.k) + (0 if shared else _bytes(keys.v))
        lists, heads = (on.parts("kv_heads", x.k.shape[1]) for x in (keys, met))
        asked //= parts * on.parts("heads", q.shape[1])
        one = TransferBytes(parts, asked, stored // lists, (_bytes(met.k) + _bytes(met.v)) // heads)
        if len(out) + 1 == len(sets):
            out.append(Way(GATHER) if clip is not None else one.of_new(q.shape[2], window))
        elif not same or keys.k.shape[2] % parts or clip is not None:
            out.append(Way(WHOLE))
        else:
            out.append(one.of_past())
    return tuple(out)


def bytes_asked(q: Any, met: Any) -> int:
    """Count the bytes of one query and its output, which is merged in promote(float32, q)."""
    return q.shape[3] * q.dtype.itemsize + met.v.shape[-1] * jnp.dtype(wide(q)).itemsize


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize
