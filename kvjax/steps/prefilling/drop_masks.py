"""Masks of slots that are dropped within a prefill: from which token on queries no longer see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs
from kvjax.models.mixer import Layer
from kvjax.ops.attention.union import Keys
from kvjax.state.cache import GroupState, Paged, Pages
from kvjax.state.page_gather import gather_traces


def remembered(
    layer: Layer, state: GroupState, pools: tuple[Pages, ...]
) -> list[dict[str, Float[Array, "B K S"]]]:
    """Return the traces of the slots of a layer's parts."""
    parts = (part.layer(layer.index) for part in state.parts)
    return [gather_traces(s, pools[s.pool]) if isinstance(s, Paged) else s.traces for s in parts]


def hidden(
    gm: GroupMethod, inputs: Inputs, sets: Sequence[Keys], traces: Sequence[dict[str, Any]]
) -> tuple[list[Keys], list[dict[str, Int[Array, "B K S"]]]]:
    """Return key sets as new tokens see them, the new ones last; per set, since which token slots are hidden.

    traces: the traces of the slots of every set but the last.
    """
    word, heads, rows = gm.hiding, sets[-1].k.shape[1], inputs.pos.shape[0]
    assert word is not None
    # New tokens have the same slot indices in all KV heads, which drop the same ones.
    new = {key_of(t): t.start(inputs, heads)[:, :1] for t in word.traces}
    wide = [jax.tree.map(lambda x: jnp.repeat(x, rows // x.shape[0], axis=0), old) for old in traces]
    since = [
        word.since(inputs, t, s.pos) for t, s in zip([*wide, new], sets, strict=True) if s.pos is not None
    ]
    seen = [s._replace(until=at) for s, at in zip(sets, since, strict=True)]
    return seen, [
        {key_of(word): jnp.broadcast_to(at, s.k.shape[:3])} for s, at in zip(sets, since, strict=True)
    ]
