"""Which implementation attends to a segment in a decode step: a kernel in place, or the reference."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.grammar.read_kinds import Read, Sampling
from kvjax.models.mixer import Layer, Projected
from kvjax.ops.base.dispatch import form
from kvjax.ops.decode import grouped_decode as grouped
from kvjax.ops.decode import picked_decode as picked
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.ops.decode.stacked_decode import CodedSlots, Factors, refusals
from kvjax.state.cache import Paged, Pages, Slots
from kvjax.state.code_forms import Form, groups_of, is_rows
from kvjax.state.codes import Codes
from kvjax.steps.decoding.past import Past
from kvjax.steps.decoding.per_device import bare, said_of_one, split_of
from kvjax.steps.decoding.rotate_pages import form_over_unrotated
from kvjax.steps.shared.rotate import rope_of_keys
from kvjax.steps.shared.run import Run


def picking(past: Past, i: int) -> Read | None:
    """Return the read method that picks pages of segment `i`; None if all of its slots are read.

    It picks from the body, and from pages before it.
    """
    return past.gm.read if i == 0 or (i == 1 and isinstance(past.parts[0], Paged)) else None


def form_of(
    run: Run,
    past: Past,
    layer: Layer,
    x: Projected,
    i: int,
    q: Array,
    why: str,
    sized: tuple[bool, bool] = (False, False),
) -> str:
    """Choose the implementation for segment `i`; NotImplementedError if a kernel is forced and cannot run.

    why: as of `why_jointly`. sized: whether its keys, and its values, have factors.
    """
    slots = past.parts[i]
    assert isinstance(slots, Slots)
    split = split_of(run.on_mesh, slots, bool(past.gm.masses))
    if split is not None and split.apart and (past.gm.masses or run.unrotated or any(sized)):
        why = why or "attention mass, rotations and factors need all slots of a KV head on one device"
    if run.unrotated and x.q.shape[0] > slots.rows:
        why = why or "copies of a row rotate the slots that they share differently"

    def of_one(slots: Slots, q: Array) -> str:
        if why:
            return form("attention over slots", run.implementation, q, slots, **_nowhere(why))
        # Of what is stored beside the slots, only the shapes matter here.
        keys, values = (slots.pos[0] if one else None for one in sized)
        rotation = KeyRotation(rope_of_keys(layer), slots.pos[0]) if run.unrotated else None
        each = _refusals(past, layer, picking(past, i), slots, q, (keys, values), rotation)
        return form("attention over slots", run.implementation, q, slots, **each)

    return said_of_one(split, of_one, bare(slots), q)


def _refusals(
    past: Past,
    layer: Layer,
    read: Read | None,
    slots: Slots,
    q: Array,
    sizes: Factors,
    rotation: KeyRotation | None,
) -> dict[str, str]:
    """Why no kernel can read slots that are attended separately from all others, by platform."""
    if read is not None:
        unrotated = rotation is not None and "picked pages have no kernel for keys that are stored unrotated"
        return _nowhere(unrotated) if unrotated else _refusals_of_picks(past, q, slots, read)
    if (groups := groups_of(slots.k, slots.v)) is not None:
        if rotation is not None or sizes != (None, None):
            return _nowhere("codes in groups have no kernel for unrotated keys or for factors")
        return _refusals_of_groups(past, layer, q, slots, groups)
    if not is_rows(slots.k) or not is_rows(slots.v):
        return _nowhere("a dense cache of such codes has no kernel")
    k, v = what_kernels_read(slots.k), None if slots.v is None else what_kernels_read(slots.v)
    return refusals(q, k, v, slots.pos, slots.bias, sizes, rotation, mass=bool(past.gm.masses))


def pages_apart(run: Run, past: Past, layer: Layer, x: Projected, i: int, pool: Pages, jointly: str) -> bool:
    """Whether the pages of segment `i` are attended to in place; jointly: `why_jointly`."""
    pages, rotation = past.parts[i], rotation_in_kernel(past, layer, i)
    if past.gm.masses or x.picking is not None or (x.expand is not None and x.expand.outputs is None):
        return False
    if rotation is None:
        return not run.unrotated
    assert isinstance(pages, Paged)
    if x.q.shape[0] > pages.rows or jointly:
        return False
    own = pages.layer(past.index)
    return form_over_unrotated(run.on_mesh, x.q, own, pool, rotation, run.implementation) != "reference"


def rotation_in_kernel(past: Past, layer: Layer, i: int) -> KeyRotation | None:
    """How the keys of segment `i` are rotated when they are read, slot by slot of every KV head."""
    if past.rotation is None or not past.rotation.keys:
        return None
    part, phase = past.parts[i], past.rotation.keys[i]
    lists = (part.lengths if isinstance(part, Paged) else part.pos).shape[1:3]
    return KeyRotation(rope_of_keys(layer), jnp.broadcast_to(phase, (*lists, phase.shape[-1])))


def _nowhere(why: str) -> dict[str, str]:
    return dict(tpu=why, gpu=why)


def what_kernels_read(x: Array | Codes) -> Array | CodedSlots:
    """Return the operand of a kernel for these rows."""
    return CodedSlots(**x.data) if isinstance(x, Codes) else x


def _refusals_of_groups(past: Past, layer: Layer, q: Array, slots: Slots, groups: Form) -> dict[str, str]:
    """Why no kernel can read these grouped codes; kernels read slot counts, no positions or biases."""
    if layer.window is not None or slots.bias is not None or past.gm.masses:
        return _nowhere("windows, biases and masses over a dense cache of such codes have no kernel")
    if past.gm.evicting:
        return _nowhere("codes in groups have no kernel where slots leave them: it counts slots")
    assert isinstance(slots.k, Codes)
    return grouped.refusals(q, grouped.Grouped(**slots.k.data), groups.bits, groups.group)


def _refusals_of_picks(past: Past, q: Array, slots: Slots, read: Read) -> dict[str, str]:
    """Why no kernel can read the pages that a method picks."""
    if isinstance(slots.k, Codes) or isinstance(slots.v, Codes) or slots.v is None:
        return _nowhere("pages that a method picks have a kernel where keys and values are stored as rows")
    if past.gm.masses:
        return _nowhere("masses over pages that a method picks have no kernel")
    most, by_head = read.pages_visited(slots.capacity), isinstance(read, Sampling)
    biased = by_head or slots.bias is not None
    return picked.refusals(q, slots.k, slots.v, most, read.granule, biased, by_head)


def why_jointly(past: Past, layer: Layer, x: Projected) -> str:
    """Why no segment can be attended separately from the others; empty if all can."""
    reasons = {
        "the softmax is clipped": layer.mixer.clip is not None,
        "layers share attention weights": "logits" in layer.publishes or "logits" in layer.taken,
        "a phase hides slots": past.rotation is not None and past.rotation.rule is not None,
        "keys and values are made from what the slots hold": x.expand is not None
        and x.expand.outputs is None,
        "values come from another layer": past.values is not None,
        "the layer reads one above it": past.above,
        "its window starts anew in every chunk": layer.mixer.chunked,
        "queries pick the tokens that they attend to": x.picking is not None,
        "what slots receive is recorded among several parts": bool(past.gm.masses)
        and (len(past.parts) > 1 or x.extra is not None),
        "kernels record no more than the sum of what slots receive": any(
            o.reduce != "sum" for o in past.gm.masses
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")
