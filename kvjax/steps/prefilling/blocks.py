"""Attention of a first prompt to the blocks that a method picks for segments of its queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.kinds import Inputs
from kvjax.grammar.prompt_reads import PromptQueries
from kvjax.models.attending import in_lists
from kvjax.models.mixer import Layer, Projected, Take
from kvjax.ops.attention.block_sparse import Picks, block_received
from kvjax.ops.attention.sparse_prompt import sparse_prompt
from kvjax.ops.attention.strips import attend_in_strips
from kvjax.ops.attention.union import Keys, Masses, Reduction, merge
from kvjax.read.prompt_blocks import lengthened

# The name under which layers publish what their read left for the layer above.
LEFT = "left by a read"


def reads_blocks(gm: GroupMethod, tokens: int) -> bool:
    """Whether a group attends to blocks of a first prompt of so many tokens."""
    return gm.read_prompt is not None and tokens > gm.read_prompt.read_whole


def left_taken(gms: Sequence[GroupMethod], tokens: int) -> dict[int, dict[str, Take]]:
    """From which layers groups take what a read left there, by the first layer of the group."""
    found, below = {}, None
    for gm in gms:
        if reads_blocks(gm, tokens) and gm.read_prompt.carries:
            if below is not None:
                found[gm.first] = {LEFT: Take(LEFT, below)}
            below = gm.first
    return found


def attend_to_blocks(
    gm: GroupMethod, layer: Layer, x: Projected, q: Float[Array, "B N T H"], new: Keys, inputs: Inputs,
    mass: tuple[Reduction, ...], implementation: str | None = None,
) -> tuple[Float[Array, "B N T V"], tuple[Masses, ...], Any]:  # fmt: skip
    """Attention of rotated queries to the new keys: (out, masses, what the read left for the layer above)."""
    read, lists, tokens = gm.read_prompt, new.k.shape[1], q.shape[2]
    options: dict[str, Any] = dict(scale=layer.scale, softcap=layer.config.attention_softcap)
    if x.expand is not None:
        q, (new,) = x.expand.queries(q), x.expand.sets([new])
    assert new.pos is not None
    size = math.lcm(read.segment, read.block)
    whole = new._replace(
        k=lengthened(new.k, size, 2), v=lengthened(new.v, size, 2), pos=lengthened(new.pos, size, 2, -1)
    )
    padded, pos = lengthened(q, size, 2), lengthened(inputs.pos, size, 1, -1)
    length = (inputs.pos >= 0).sum(-1, dtype=jnp.int32)
    asked = PromptQueries(padded, whole.k, pos, length, layer.scale, layer.taken.get(LEFT), inputs.fitted)
    picks, left = read.pick(asked)
    picks = _whole_rows(picks, length, read.read_whole)
    out, lse = sparse_prompt(padded, whole, pos, picks, implementation=implementation, **options)
    if x.extra is not None:
        # What lies outside the sequence, such as learned sinks, is seen by every query.
        beside = attend_in_strips(padded, (x.extra,), pos, **options)[:2]
        out, lse = merge([(out, lse), beside])
    if not mass:
        return out[:, :, :tokens], (), left
    found = block_received(padded, whole, lse, pos, picks, mass, **options)
    found = tuple(m[..., :tokens] for m in found)
    return out[:, :, :tokens], (found if x.expand is None else in_lists(mass, found, lists),), left


def _whole_rows(picks: Picks, length: Int[Array, "B"], most: int) -> Picks:
    """Rows of at most so many tokens attend to all of them, in whatever batch they stand."""
    return picks._replace(blocks=picks.blocks | (length <= most)[:, None, None, None])
