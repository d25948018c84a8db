"""One decoder over pages: a third `Memory`, beside those of prefill and decode step.

It appends by `paged_append` or `paged_write` and attends by `paged_decode`; pages of codes that no kernel
reads are appended to and decoded by `code_step`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar import Store
from kvjax.models.attending import rotary
from kvjax.models.config import Config
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected
from kvjax.models.mixer import Step as Recurrence
from kvjax.models.transformer import decode_layers, unembed
from kvjax.ops.attention.by_node import attend_by_node
from kvjax.ops.decode.page_pool import PagePool
from kvjax.ops.decode.paged_append import paged_append
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.ops.decode.paged_write import paged_write
from kvjax.serve.device.code_step import CodePool, append_and_attend, append_codes, attend_codes
from kvjax.serve.device.coding import coded
from kvjax.state.cache import GroupState

NAME = "pages"


class Nodes(NamedTuple):
    """Pieces of the pages; a step reads each once, for all rows that share it.

    blocks: those of every piece. rows: the rows that attend to it, -1 for none. first: slots of these rows
    before it. size: the most slots in it.
    """

    blocks: Int[Array, "I P"]
    rows: Int[Array, "I Q"]
    first: Int[Array, "I"]
    size: Int[Array, "I"]

    def lengths(self, stored: Int[Array, "R K"]) -> Int[Array, "I K"]:
        """Slots of every piece and KV head, where rows have `stored`."""
        of = stored[jnp.maximum(self.rows[:, 0], 0)]
        return jnp.clip(of - self.first[:, None], 0, self.size[:, None])


class Rows(NamedTuple):
    """The pages that hold the slots of some rows.

    blocks: the blocks of each row. A block is one page of every layer and KV head; in a layer's pool its page
    of a head has index head * (number of blocks) + block. stored: slots per layer, row and KV head. next: the
    position of the row's next token. nodes: how shared pages are read once; None: every row reads its own.
    """

    blocks: Int[Array, "R M"]
    stored: Int[Array, "L R K"]
    next: Int[Array, "R"]
    nodes: Nodes | None = None


def as_stored(
    pool: PagePool, store: Store | None, k: Float[Array, "*b T H"], v: Float[Array, "*b T H"]
) -> tuple[Array, Array, dict[str, Array]]:
    """Keys and values as a pool holds them: in its type, or as codes with their numbers."""
    if store is not None:
        return coded(store, k, v)
    k, v = (y.astype(jnp.dtype(pool.payload)) for y in (k, v))
    return k, v, {}


def table_of(pool: PagePool | CodePool, blocks: Int[Array, "R M"], heads: int) -> Int[Array, "R K M"]:
    """The page table of every row and KV head."""
    of_head = pool.words.shape[1] // heads
    return jnp.arange(heads, dtype=jnp.int32)[None, :, None] * of_head + blocks[:, None]


Pool = PagePool | CodePool


def paged_hidden(
    config: Config, params: Params, pools: tuple[Pool, ...], rows: Rows, tokens: Int[Array, "R T"],
    counts: Int[Array, "R"], store: Store | None = None, implementation: str | None = None,
) -> tuple[Float[Array, "R T D"], tuple[Pool, ...]]:  # fmt: skip
    """Runs the first `count` tokens of every row through all layers, and stores them in the pools."""
    heads, t = rows.stored.shape[2], tokens.shape[1]
    new = jnp.arange(t, dtype=jnp.int32)[None] < counts[:, None]
    at = rows.next[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
    pos, length = jnp.where(new, at, -1), rows.next + counts

    def attend(layer: Layer, x: Projected, state: GroupState) -> tuple[Array, GroupState, dict[str, Any]]:
        pool: Pool = state.rows[NAME]
        assert x.k is not None and x.v is not None
        table, stored = table_of(pool, rows.blocks, heads), rows.stored[layer.number]
        q, k = (rotary(layer, y, at, length) for y in (x.q, x.k))
        how: dict[str, Any] = dict(scale=layer.scale, window=layer.window, softcap=config.attention_softcap)
        if isinstance(pool, CodePool):
            if rows.nodes is None:
                out, pool = append_and_attend(
                    pool, table, stored, counts, q, (k, x.v), pos, layer.index, **how
                )
            else:
                pool = append_codes(pool, table, stored, counts, (k, x.v), pos, layer.index)
                out = _by_node(pool, rows.nodes, stored + counts[:, None], q, pos, layer.index, how)
            return out, GroupState(rows={NAME: pool}), {}
        k, v, numbers = as_stored(pool, store, k, x.v)
        numbers["pos"] = jnp.broadcast_to(pos[:, None].astype(jnp.float32), (*stored.shape, t))
        if t == 1:
            pool = paged_append(
                pool, table, stored, k[:, :, 0], v[:, :, 0], layer.index,
                numbers={name: y[:, :, 0] for name, y in numbers.items()}, active=new[:, 0],
                implementation=implementation,
            )  # fmt: skip
        else:
            pool = paged_write(pool, table, stored, counts, k, v, layer.index, numbers=numbers)
        how["implementation"] = implementation
        if rows.nodes is None:
            out, _, _ = paged_decode(q, pool, table, stored + counts[:, None], pos, layer.index, **how)
        else:
            out = _by_node(pool, rows.nodes, stored + counts[:, None], q, pos, layer.index, how)
        return out, GroupState(rows={NAME: pool}), {}

    def recur(layer: Layer, step: Recurrence, state: GroupState) -> Any:
        raise AssertionError("pages hold slots, and this layer carries a state")

    memory = Memory(pos, attend, recur, lambda layer, state: [], implementation=implementation)
    states = tuple(GroupState(rows={NAME: pool}) for pool in pools)
    x, states, *_ = decode_layers(params, tokens, config, memory, states)
    return x, tuple(state.rows[NAME] for state in states)


def _by_node(
    pool: Pool, nodes: Nodes, stored: Array, q: Array, pos: Array, layer: Any, how: dict[str, Any]
) -> Array:
    """Attention of one token of every row, in which every page is read once."""
    table, lengths = table_of(pool, nodes.blocks, stored.shape[1]), nodes.lengths(stored)

    def over(q: Array, q_pos: Array) -> tuple[Array, Array]:
        if isinstance(pool, CodePool):
            return attend_codes(pool, table, lengths, q, q_pos, layer, **how)
        return paged_decode(q, pool, table, lengths, q_pos, layer, **how)[:2]

    return attend_by_node(over, q, pos, nodes.rows)


class PagedStep(NamedTuple):
    """A decode step over pages, for `write_slice`; equal ones share programs. Its state is (pools, Rows)."""

    config: Config
    store: Store | None = None
    implementation: str | None = None

    def __call__(
        self, params: Params, state: tuple[tuple[Pool, ...], Rows], token: Int[Array, "R"],
        active: Bool[Array, "R"],
    ) -> tuple[Float[Array, "R V"], tuple[tuple[Pool, ...], Rows]]:  # fmt: skip
        pools, rows = state
        counts = active.astype(jnp.int32)
        how = self.store, self.implementation
        x, pools = paged_hidden(self.config, params, pools, rows, token[:, None], counts, *how)
        rows = rows._replace(stored=rows.stored + counts[None, :, None], next=rows.next + counts)
        return unembed(params, x[:, 0], self.config), (pools, rows)


@partial(jax.jit, static_argnames=("step",), donate_argnames=("pools",))
def read_piece(
    step: PagedStep, params: Params, pools: tuple[Pool, ...], rows: Rows, tokens: Int[Array, "1 T"],
    count: Int[Array, "1"],
) -> tuple[Float[Array, "1 V"], tuple[Pool, ...]]:  # fmt: skip
    """Reads the first `count` of the given tokens of one prompt; returns logits after them, and the pools."""
    how = step.store, step.implementation
    x, pools = paged_hidden(step.config, params, pools, rows, tokens, count, *how)
    last = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], 1)
    return unembed(params, last[:, 0], step.config), pools


@partial(jax.jit, static_argnames=("store",), donate_argnames=("pools",))
def adopt(
    pools: tuple[PagePool, ...], blocks: Int[Array, "1 M"], count: Int[Array, "1"],
    new: tuple[tuple[Array, Array, Array], ...], store: Store | None = None,
) -> tuple[PagePool, ...]:  # fmt: skip
    """Writes the first `count` slots of KV heads (keys, values, positions [Lg, K, S, H]) to blocks."""
    done = []
    for pool, (k, v, pos) in zip(pools, new, strict=True):
        table, start = table_of(pool, blocks, k.shape[1]), jnp.zeros((1, k.shape[1]), jnp.int32)
        for i in range(k.shape[0]):
            ki, vi, numbers = as_stored(pool, store, k[i][None], v[i][None])
            numbers["pos"] = pos[i][None]
            pool = paged_write(pool, table, start, count, ki, vi, i, numbers=numbers)
        done.append(pool)
    return tuple(done)


@jax.jit
def taken(words: tuple[Array, ...], pages: Int[Array, "N"]) -> tuple[Array, ...]:
    """The contents of some pages, for all layers."""
    return tuple(x[:, pages] for x in words)


@partial(jax.jit, donate_argnames=("words",))
def put_back(words: tuple[Array, ...], pages: Int[Array, "N"], held: tuple[Array, ...]) -> tuple[Array, ...]:
    """Writes contents back to pages; an index beyond the last page writes nothing."""
    return tuple(x.at[:, pages].set(y, mode="drop") for x, y in zip(words, held, strict=True))
