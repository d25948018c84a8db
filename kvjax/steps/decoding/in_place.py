"""Kernels that attend to one layer of slots in place, in the stacked arrays of the cache."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.read_kinds import Read
from kvjax.models.mixer import Layer
from kvjax.ops.decode import grouped_decode as grouped
from kvjax.ops.decode import picked_decode as picked
from kvjax.ops.decode.rotation import KeyRotation
from kvjax.ops.decode.stacked_decode import rows_of, stacked_decode
from kvjax.state.cache import Slots
from kvjax.state.code_forms import groups_of
from kvjax.state.codes import Codes
from kvjax.state.picked_pages import positions
from kvjax.steps.decoding.dispatch import what_kernels_read
from kvjax.steps.decoding.past import PickedPages
from kvjax.steps.shared.rotate import rope_of_keys
from kvjax.steps.shared.run import Run


class KernelOperands(NamedTuple):
    """Further operands of a kernel beside the slots: factors of keys and values, and phases."""

    keys: Float[Array, "B K S"] | None
    values: Float[Array, "B K S"] | None
    phase: Int[Array, "B K S"] | None


def attend_picked(
    run: Run, layer: Layer, read: Read, implementation: str, slots: Slots, q: Array, pos: Int[Array, "B 1"],
    index: Int[Array, ""] | int, found: PickedPages,
) -> tuple[Float[Array, "B N 1 V"], Float[Array, "B N 1"], None]:  # fmt: skip
    """Attention over the picked pages, read in place: (out, lse, None for the mass)."""
    k, v, granule = slots.k, slots.v, read.granule
    assert not isinstance(k, Codes) and not isinstance(v, Codes) and v is not None
    held = positions(slots, index, granule, found.pages, found.counts)
    own = None if slots.bias is None else picked.picked(slots.bias[index][None], found.pages, 0, granule)
    heads = None if found.bias is None else found.bias.reshape(q.shape[0], q.shape[1], -1)
    out, lse = picked.picked_decode(
        q, k, v, found.pages, found.counts, held, pos, index, page=granule, scale=layer.scale,
        bias=biases(own, heads), window=layer.window, softcap=run.config.attention_softcap,
        implementation=implementation,
    )  # fmt: skip
    return out, lse, None


def attend_slots(
    run: Run, layer: Layer, mass: bool, implementation: str, slots: Slots, q: Array, pos: Int[Array, "B 1"],
    index: Int[Array, ""] | int, beside: KernelOperands,
) -> tuple[Float[Array, "B N 1 V"], Float[Array, "B N 1"], Float[Array, "B K S"] | None]:  # fmt: skip
    """Attention over one layer of slots, read in place in the stacked cache: (out, lse, mass if needed)."""
    slot = jnp.arange(1, slots.capacity + 1, dtype=jnp.int32)
    used = jnp.where(slots.pos[index] >= 0, slot[None, None], 0).max(-1)
    if (groups := groups_of(slots.k, slots.v)) is not None:
        assert isinstance(slots.k, Codes) and isinstance(slots.v, Codes)
        # Whole granules are encoded one after the other, so no slot before the last one is empty.
        keys, values = (grouped.Grouped(**x.data) for x in (slots.k, slots.v))
        out, lse = grouped.grouped_decode(
            q, keys, values, used, index, bits=groups.bits, group=groups.group, scale=layer.scale,
            softcap=run.config.attention_softcap, implementation=implementation,
        )  # fmt: skip
        return out, lse, None
    k, v = what_kernels_read(slots.k), None if slots.v is None else what_kernels_read(slots.v)
    rotation = None if beside.phase is None else KeyRotation(rope_of_keys(layer), beside.phase)
    return stacked_decode(
        q, k, v, used, pos, index, scale=layer.scale, pos=slots.pos, bias=slots.bias,
        sizes=(beside.keys, beside.values), rotation=rotation,
        values=slots.shared if v is None else rows_of(v).shape[-1], first=0, window=layer.window,
        softcap=run.config.attention_softcap, mass=mass, implementation=implementation,
    )  # fmt: skip


def biases(of_slots: Array | None, of_heads: Array | None) -> Array | None:
    """Compute the sum of biases per slot [B, K, P] and per query head [B, N, P]."""
    if of_slots is None or of_heads is None:
        return of_slots if of_heads is None else of_heads
    return of_heads + jnp.repeat(of_slots, of_heads.shape[1] // of_slots.shape[1], axis=1)


def by_list(bias: Float[Array, "B N P"] | None, lists: int) -> Float[Array, "B K G P"] | None:
    """Biases of query heads, grouped by the KV head that they attend to."""
    return None if bias is None else bias.reshape(bias.shape[0], lists, -1, bias.shape[-1])
