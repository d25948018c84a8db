"""Rotation of queries and stored keys as the method's phase says, if keys are stored unrotated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import View, over_layers
from kvjax.grammar.phase import PairRotation
from kvjax.grammar.shared_ranges import STARTS, SharedRanges
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.attending import attend_new, attend_sets, rotated
from kvjax.models.mixer import AttentionLogits, Layer, Projected
from kvjax.models.mixers.attention import mixer_of
from kvjax.ops.attention.union import Keys, Masses, Reduction
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope, angles, rotate
from kvjax.state.cache import GroupState, Paged, Pages, Segment
from kvjax.state.page_gather import page_positions
from kvjax.steps.shared.run import Run


def rotations_of(
    run: Run,
    q_pos: Int[Array, "B T"],
    sets: Sequence[Int[Array, "B #K _"]],
    layer: int | None = None,
    rows: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[PairRotation, ...]:
    """Return the rotations of queries and of all sets of keys; keys stored rotated are not rotated again.

    layer: a layer of a first prompt, if its phase differs between layers. rows: what the group's rows carry.
    """
    if STARTS in rows:
        assert isinstance(run.phase, SharedRanges)
        return run.phase.turns_of_rows(rows[STARTS][0], q_pos, sets)
    phase = run.phase if layer is None else run.phase_in(layer)
    return phase.turns(q_pos, sets) if run.unrotated else (PairRotation(q_pos[:, None], ()),)


def with_starts(group: GroupState, past: GroupState) -> GroupState:
    """Return a group with the starts of contexts, row by row, that `past` has."""
    found = {name: x for name, x in past.rows.items() if name == STARTS}
    return dataclasses.replace(group, rows=group.rows | found) if found else group


def rotations_over(
    run: Run,
    at: Int[Array, "B"],
    parts: Sequence[Segment],
    index: int | Array,
    pools: tuple[Pages, ...] = (),
    rows: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[PairRotation, ...]:
    """Return the rotations of one query per row over one layer of some parts; rows: as in `rotations_of`."""
    found = []
    for one in (part.layer(index) for part in parts if run.unrotated):
        pos = page_positions(one, pools[one.pool]) if isinstance(one, Paged) else one.pos
        # Where copies of a row share the slots of a part, each copy takes their positions.
        found.append(jnp.repeat(pos, at.shape[0] // pos.shape[0], axis=0))
    return rotations_of(run, at[:, None], found, rows=rows)


def rotated_queries(
    layer: Layer, q: Float[Array, "B N T H"], rotation: PairRotation, length: Int[Array, "B"]
) -> Array:
    """Rotated queries; those of a group are rotated as its KV head says."""
    phase = rotation.queries
    if phase.shape[1] > 1:
        phase = jnp.repeat(phase, q.shape[1] // phase.shape[1], axis=1)
    return rotated(layer.rope, q, phase, length)


def rope_of_keys(layer: Layer) -> Rope:
    """Return the RoPE of the keys a layer attends to: its own, or that of the layer whose slots it reads."""
    source = layer.mixer.source_of("slots")
    return layer.rope if source is None else mixer_of(layer.config, source).rope(layer.config, source)


def rotated_keys(rope: Rope, keys: Keys, rotation: PairRotation, i: int, length: Int[Array, "B"]) -> Keys:
    """Set `i` of unrotated keys, rotated for the queries."""
    if keys.pos is None:
        return keys
    pos = keys.pos if rotation.rule is None else rotation.rule.keys[i]
    return keys._replace(k=rotated(rope, keys.k, rotation.keys[i], length), pos=pos)


def sharpened(q: Float[Array, "B N T H"], rotation: PairRotation) -> Float[Array, "B N T H"]:
    """Scale queries by the sharpness of a rotation."""
    if rotation.rule is None:
        return q
    sharpness = rotation.rule.sharpness[:, None, :, None]
    return (q.astype(sharpness.dtype) * sharpness).astype(q.dtype)


def weighed(lse: Float[Array, "B N T"], rotation: PairRotation) -> Float[Array, "B N T"]:
    """Weigh one part of a union, as a rotation says."""
    return lse if rotation.rule is None else lse * rotation.rule.weight[:, None]


def attend_rotated(
    layer: Layer,
    x: Projected,
    new: Keys,
    past: Sequence[Keys],
    rotations: Sequence[PairRotation],
    length: Int[Array, "B"],
    more: Sequence[tuple[Array, Array]] = (),
    *,
    mass: tuple[Reduction, ...] = (),
    in_order: bool = True,
    in_places: bool = False,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B N T V"], tuple[Masses, ...], AttentionLogits | None]:
    """Attention of a layer's unrotated queries, as `attend_new`; part by part if there are several rotations.

    Masses and logits are those of the first rotation, which is the only one if they are needed.
    """
    parts, window = list(more), rotations[0].window(layer.window)
    for rotation in rotations[1:]:
        beyond = rotation.window(layer.window)
        if beyond is None or beyond > 0:
            q, sets = met_keys(layer, x, [*past, new], rotation, length)
            here, pos = layer._replace(window=beyond), layer.pos - rotation.min_distance
            ordered = beyond is None
            if rotation.rule is not None:
                # The positions by which tokens are rotated grow with their indices, by at least one.
                pos, ordered = rotation.rule.queries, True
            out, lse, *_ = attend_sets(
                here, x._replace(extra=None), sharpened(q, rotation), sets[-1], sets[:-1], pos,
                in_order=ordered, implementation=implementation, on=on,
            )  # fmt: skip
            parts.append((out, weighed(lse, rotation)))
    q, sets = met_keys(layer, x, [*past, new], rotations[0], length)
    return attend_new(
        layer._replace(window=window), x, q, sets[-1], sets[:-1], layer.pos, parts, mass=mass,
        in_order=in_order, in_places=in_places and rotations[0].rule is None,
        implementation=implementation, on=on,
    )  # fmt: skip


def met_keys(
    layer: Layer, x: Projected, sets: Sequence[Keys], rotation: PairRotation, length: Int[Array, "B"]
) -> tuple[Float[Array, "B N T H"], list[Keys]]:
    """Rotate a layer's queries, and sets of keys, by one rotation."""
    if rotation.keys:
        sets = [rotated_keys(rope_of_keys(layer), s, rotation, i, length) for i, s in enumerate(sets)]
    return rotated_queries(layer, x.q, rotation, length), [*sets]


def unrotated_merges(
    rope: Rope, merged: Float[Array, "B K S H"], met: View, stored: Float[Array, "B K S H"],
    turns: Int[Array, "B #K S"], length: Int[Array, "B"],
) -> Float[Array, "B K S H"]:  # fmt: skip
    """One layer's merged keys before rotation, each rotated back as the key of its slot was rotated.

    Slots mix keys of several positions, so merges are given keys rotated for queries. met: the view that the
    merge was given. stored: the unrotated keys of all slots before it, which other slots keep. turns: the
    integers by which keys are rotated for the newest query.
    """
    changed = (merged != met.k).any(-1, keepdims=True)
    cos, sin = angles(
        rope, jnp.maximum(turns, 0), merged.shape[-1], length[:, None, None], dtype=wide(merged)
    )
    size = rope.amplitude**2
    back = rotate(merged, cos / size, -sin / size, rope.start)
    return jnp.where(changed, back.astype(stored.dtype), stored)


def seen_by_words(
    run: Run, rope: Rope, view: View, length: Int[Array, "B"], rows: Mapping[str, Any] = MappingProxyType({})
) -> View:
    """Return all layers of a view with keys as scores see them: rotated for the newest query of every row."""
    if not run.unrotated:
        return view

    def one(k: Float[Array, "B K S H"], pos: Int[Array, "B K S"]) -> Float[Array, "B K S H"]:
        rotation, *_ = rotations_of(run, length[:, None] - 1, [pos], rows=rows)
        return rotated(rope, k, rotation.keys[0], length)

    return view._replace(k=over_layers(one, view.k, view.pos))
