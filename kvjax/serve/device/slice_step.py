"""A slice of decode steps that gathers pages once, where no kernel reads them in place.

Attention is over a union: the slots before the slice, which its first step gathers, and the tokens that the
slice itself appends. These are written to the pages when it ends. A step that gathered its pages anew would
read every slot three times; the price is memory for the slots of all rows while a slice runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.models.attending import rotated
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected
from kvjax.models.transformer import decode_layers, unembed
from kvjax.ops.attention.union import Keys, attend
from kvjax.serve.device.code_pages import listed
from kvjax.serve.device.code_step import CodePool, append_codes, keys_of
from kvjax.serve.device.paged_step import NAME, PagedStep, Pool, RowPages, table_of
from kvjax.serve.device.write import SLICE, RowDraws, SliceResult, slice_of
from kvjax.state.cache import GroupState

Tail = tuple[Float[Array, "R K N H"], Float[Array, "R K N H"]]


class Gathered(NamedTuple):
    """The state of a slice after `count` steps.

    bodies: the slots of each layer before the slice. tails: keys and values of the tokens since, by layer.
    pos: their positions, -1 where there is none.
    """

    bodies: tuple[Keys, ...]
    tails: tuple[Tail, ...]
    pos: Int[Array, "R N"]
    next: Int[Array, "R"]
    count: Int[Array, ""]


class SliceStep(NamedTuple):
    """A step of a slice, for `slice_of`; its state is a `Gathered`."""

    step: PagedStep

    def __call__(
        self, params: Params, state: Gathered, token: Int[Array, "R"], active: Bool[Array, "R"]
    ) -> tuple[Float[Array, "R V"], Gathered]:
        config, at = self.step.config, state.next[:, None]
        new = jnp.where(active[:, None], at, -1)
        pos = jax.lax.dynamic_update_slice_in_dim(state.pos, new, state.count, 1)
        tails = [*state.tails]

        def over(layer: Layer, x: Projected, group: GroupState) -> tuple[Array, GroupState, dict[str, Any]]:
            assert x.k is not None and x.v is not None and isinstance(layer.number, int)
            body = state.bodies[layer.number]
            q, k = (rotated(layer.rope, y, at, at[:, -1] + 1) for y in (x.q, x.k))
            tail = tails[layer.number] = _put(tails[layer.number], (k, x.v), state.count)
            where = jnp.broadcast_to(pos[:, None], (*tail[0].shape[:3],))
            out = attend(
                q, [body, Keys(*tail, where)], new, scale=layer.scale, window=layer.window,
                softcap=config.attention_softcap,
            )  # fmt: skip
            return out[0], group, {}

        def recur(layer: Layer, step: Any, group: GroupState) -> Any:
            raise AssertionError("pages hold slots, and this layer carries a state")

        memory = Memory(new, over, recur, lambda layer, group: [], implementation=self.step.implementation)
        groups = tuple(GroupState(rows={NAME: ()}) for _ in params["layers"])
        x, *_ = decode_layers(params, token[:, None], config, memory, groups)
        following = state.next + active.astype(jnp.int32)
        state = Gathered(state.bodies, tuple(tails), pos, following, state.count + 1)
        return unembed(params, x[:, 0], config), state


def _put(tail: Tail, new: tuple[Array, Array], at: Int[Array, ""]) -> Tail:
    k, v = (
        jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), at, 2)
        for x, y in zip(tail, new, strict=True)
    )
    return k, v


def gathers(step: PagedStep, pools: tuple[Pool, ...], rows: RowPages) -> bool:
    """Whether a slice of these rows gathers its pages: uncoded ones of one device that no kernel reads.

    Each layer is in a group of its own, as where layers are not scanned.
    """
    plain = all(isinstance(x, CodePool) and x.plain is None and x.words.shape[0] == 1 for x in pools)
    return plain and step.store is None and step.on_mesh is None and rows.nodes is None


@partial(jax.jit, static_argnames=("step", "top"), donate_argnames=("pools",))
def gathered_slice(
    step: PagedStep, params: Params, pools: tuple[CodePool, ...], rows: RowPages, token: Int[Array, "R"],
    active: Bool[Array, "R"], draws: RowDraws, n: Int[Array, ""], top: int,
) -> SliceResult:  # fmt: skip
    """`write_slice` over pages that `gathers` accepts; the state of its result is the pools alone."""
    heads = rows.stored.shape[2]
    tables = [table_of(pool, rows.blocks, heads) for pool in pools]
    bodies, tails = [], []
    for pool, table, stored in zip(pools, tables, rows.stored, strict=True):
        k, v, at = listed(pool.words, pool.coded, table, 0)
        assert at is not None
        live = jnp.arange(at.shape[2])[None, None] < stored[..., None]
        bodies.append(keys_of(k, v, jnp.where(live, at, -1)))
        blank = jnp.zeros((*k.shape[:2], SLICE, k.shape[3]), k.dtype)
        tails.append((blank, blank))
    pos = jnp.full((len(token), SLICE), -1, jnp.int32)
    start = Gathered(tuple(bodies), tuple(tails), pos, rows.next, jnp.int32(0))
    done = slice_of(SliceStep(step), params, start, token, active, draws, n, top)
    state: Gathered = done.state
    counts = jnp.where(active, state.count, 0)
    each = zip(pools, tables, rows.stored, state.tails, strict=True)
    after = tuple(append_codes(p, table, n, counts, tail, state.pos, 0) for p, table, n, tail in each)
    return done._replace(state=after)
