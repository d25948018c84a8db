"""One decoder over pages: a third `Memory`, beside those of prefill and decode step.

It appends by `paged_append` or `paged_write` and attends by `paged_decode`; pages of codes that no kernel
reads are appended to and decoded by `code_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.grammar import Store
from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import each_device
from kvjax.models.attending import rotated
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
from kvjax.serve.device.write import Drawn, RowDraws, drawn
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


class RowPages(NamedTuple):
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
    """Build the page table of every row and KV head."""
    of_head = pool.words.shape[1] // heads
    return jnp.arange(heads, dtype=jnp.int32)[None, :, None] * of_head + blocks[:, None]


Pool = PagePool | CodePool


class TokensToCompute(NamedTuple):
    """Tokens of some rows that a program computes: the first `counts` of T, which follow what is stored.

    flat: which of the R * T tokens are computed outside attention; None: all. first: where a row's tokens
    begin among these.
    """

    rows: RowPages
    tokens: Int[Array, "R T"]
    counts: Int[Array, "R"]
    flat: Int[Array, "C"] | None = None
    first: Int[Array, "R"] | None = None

    @property
    def pos(self) -> tuple[Int[Array, "R T"], Int[Array, "R T"]]:
        """Positions of all T tokens, and the same with -1 for those that do not count."""
        place = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        at = self.rows.next[:, None] + place
        return at, jnp.where(place < self.counts[:, None], at, -1)

    @property
    def size(self) -> int:
        """How many tokens are computed outside attention."""
        return self.tokens.size if self.flat is None else self.flat.size

    def flattened(self, x: Shaped[Array, "R T *x"]) -> Shaped[Array, "C *x"]:
        """Return what belongs to the tokens that are computed outside attention."""
        x = x.reshape(-1, *x.shape[2:])
        return x if self.flat is None else x[self.flat]

    def by_row(self, x: Shaped[Array, "C *x"]) -> Shaped[Array, "R T *x"]:
        """Invert `flattened`, with anything where a row has no token."""
        if self.first is not None:
            place = self.first[:, None] + jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
            x = x[jnp.minimum(place, x.shape[0] - 1)]
        return x.reshape(*self.tokens.shape, *x.shape[1 if self.first is None else 2 :])


def joined(
    parts: Sequence[TokensToCompute], xs: Sequence[Shaped[Array, "R T *x"]]
) -> Shaped[Array, "B S *x"]:
    """Join what belongs to the tokens of several parts as one row; that of a single part stays as it is."""
    if len(parts) == 1:
        return xs[0]
    return jnp.concatenate([part.flattened(x) for part, x in zip(parts, xs, strict=True)])[None]


def parted(parts: Sequence[TokensToCompute], x: Shaped[Array, "B S *x"]) -> list[Shaped[Array, "R T *x"]]:
    """Invert `joined`."""
    if len(parts) == 1:
        return [x]
    pieces = jnp.split(x[0], np.cumsum([part.size for part in parts])[:-1].tolist())
    return [part.by_row(piece) for part, piece in zip(parts, pieces, strict=True)]


def paged_hidden(
    step: PagedStep, params: Params, pools: tuple[Pool, ...], parts: Sequence[TokensToCompute]
) -> tuple[list[Float[Array, "R T D"]], tuple[Pool, ...]]:
    """Run the tokens of all parts through all layers, and store them in the pools.

    Several parts are one flat batch everywhere but in attention (Orca's selective batching, Yu et al., OSDI
    2022, section 4.2): each is stored in its rows' pages and attends to them. On a mesh every device does so
    with its own KV heads (Megatron-LM, Shoeybi et al., 2019, arXiv:1909.08053, section 3).
    """
    on, config = step.on_mesh, step.config
    at, pos = (joined(parts, x) for x in zip(*(part.pos for part in parts), strict=True))
    length = at[:, -1] + 1

    def split(x: Float[Array, "B N S H"]) -> list[Float[Array, "R N T H"]]:
        return [jnp.moveaxis(y, 2, 1) for y in parted(parts, jnp.moveaxis(x, 1, 2))]

    def attend(layer: Layer, x: Projected, state: GroupState) -> tuple[Array, GroupState, dict[str, Any]]:
        pool: Pool = state.rows[NAME]
        assert x.k is not None and x.v is not None
        q, k = (split(rotated(layer.rope, y, at, length)) for y in (x.q, x.k))
        stored = [part.rows.stored[layer.number] for part in parts]
        given = pool, parts, stored, q, list(zip(k, split(x.v), strict=True)), layer.index
        how = dict(scale=layer.scale, window=layer.window, softcap=config.attention_softcap)
        specs, out = _specs(on, given)
        outs, pool = each_device(on, partial(_in_pages, step, how), specs, out)(*given)
        out = jnp.moveaxis(joined(parts, [jnp.moveaxis(y, 1, 2) for y in outs]), 2, 1)
        return out, GroupState(rows={NAME: pool}), {}

    def recur(layer: Layer, step: Recurrence, state: GroupState) -> Any:
        raise AssertionError("pages hold slots, and this layer carries a state")

    memory = Memory(
        pos, attend, recur, lambda layer, state: [], implementation=step.implementation, on_mesh=on,
        alike=(0,) * len(pools),
    )  # fmt: skip
    states = tuple(GroupState(rows={NAME: pool}) for pool in pools)
    tokens = joined(parts, [part.tokens for part in parts])
    x, states, *_ = decode_layers(params, tokens, config, memory, states)
    return parted(parts, x), tuple(state.rows[NAME] for state in states)


def _specs(on: OnMesh | None, given: tuple[Any, ...]) -> tuple[Any, Any]:
    """How the arguments of `_in_pages` and its results are split: by KV heads, in whose order pages lie."""
    if on is None:
        return (), None
    by_head = on.rules.mesh_axes("kv_heads")
    pool, parts, stored, q, new, _ = given
    second = jax.tree.map(lambda x: PartitionSpec(None, by_head), (pool, stored, q, new))
    whole = jax.tree.map(lambda x: PartitionSpec(), parts)
    pool, stored, q, new = second
    return (pool, whole, stored, q, new, PartitionSpec()), (q, pool)


def _in_pages(
    step: PagedStep, how: dict[str, Any], pool: Pool, parts: Sequence[TokensToCompute],
    stored: list[Int[Array, "R K"]], q: list[Float[Array, "R N T H"]], new: list[tuple[Array, Array]],
    layer: int | Array,
) -> tuple[list[Float[Array, "R N T H"]], Pool]:  # fmt: skip
    """Append keys and values [R, K, T, H] of parts to their rows' pages, and attend to these."""
    tables = [table_of(pool, part.rows.blocks, one.shape[1]) for part, one in zip(parts, stored, strict=True)]
    if isinstance(pool, CodePool) and pool.plain is not None:
        # Codes with an uncoded ring: what leaves it is encoded after attention.
        ((part,), (table,), (one,)) = parts, tables, new
        out, pool = append_and_attend(
            pool, table, stored[0], part.counts, q[0], one, part.pos[1], layer, **how
        )
        return [out], pool
    # Everything is stored before anything is read: XLA copies a pool that is read between two writes.
    for part, table, one, slots in zip(parts, tables, stored, new, strict=True):
        pool = _stored(step, pool, part, table, one, slots, layer)
    how = how if isinstance(pool, CodePool) else how | dict(implementation=step.implementation)
    outs = [
        _attended(pool, part, table, one + part.counts[:, None], asked, layer, how)
        for part, table, one, asked in zip(parts, tables, stored, q, strict=True)
    ]
    return outs, pool


def _stored(
    step: PagedStep, pool: Pool, part: TokensToCompute, table: Array, stored: Array, new: tuple[Array, Array],
    layer: int | Array,
) -> Pool:  # fmt: skip
    """Append keys and values [R, K, T, H] of a part to its rows' pages in the pool."""
    _, pos = part.pos
    if isinstance(pool, CodePool):
        return append_codes(pool, table, stored, part.counts, new, pos, layer)
    k, v, numbers = as_stored(pool, step.store, *new)
    numbers["pos"] = jnp.broadcast_to(pos[:, None].astype(jnp.float32), (*stored.shape, pos.shape[1]))
    if pos.shape[1] > 1:
        return paged_write(pool, table, stored, part.counts, k, v, layer, numbers=numbers)
    return paged_append(
        pool, table, stored, k[:, :, 0], v[:, :, 0], layer,
        numbers={name: y[:, :, 0] for name, y in numbers.items()}, active=part.counts > 0,
        implementation=step.implementation,
    )  # fmt: skip


def _attended(
    pool: Pool, part: TokensToCompute, table: Array, count: Int[Array, "R K"], q: Array, layer: int | Array,
    how: dict[str, Any],
) -> Float[Array, "R N T H"]:  # fmt: skip
    """Attention of a part's queries over the first `count` slots of its rows' pages."""
    (_, pos), nodes = part.pos, part.rows.nodes

    def over(table: Array, lengths: Array, q: Array, pos: Array) -> tuple[Array, Array]:
        if isinstance(pool, CodePool):
            return attend_codes(pool, table, lengths, q, pos, layer, **how)
        return paged_decode(q, pool, table, lengths, pos, layer, **how)[:2]

    if nodes is None:
        return over(table, count, q, pos)[0]
    # Pages that rows share are read once.
    shared = table_of(pool, nodes.blocks, count.shape[1]), nodes.lengths(count)
    return attend_by_node(partial(over, *shared), q, pos, nodes.rows)


class PagedStep(NamedTuple):
    """A decode step over pages, for `write_slice`; equal ones share programs. Its state: pools, RowPages."""

    config: Config
    store: Store | None = None
    implementation: str | None = None
    on_mesh: OnMesh | None = None

    def __call__(
        self, params: Params, state: tuple[tuple[Pool, ...], RowPages], token: Int[Array, "R"],
        active: Bool[Array, "R"],
    ) -> tuple[Float[Array, "R V"], tuple[tuple[Pool, ...], RowPages]]:  # fmt: skip
        pools, rows = state
        counts = active.astype(jnp.int32)
        (x,), pools = paged_hidden(self, params, pools, [TokensToCompute(rows, token[:, None], counts)])
        rows = rows._replace(stored=rows.stored + counts[None, :, None], next=rows.next + counts)
        return unembed(params, x[:, 0], self.config), (pools, rows)


@partial(jax.jit, static_argnames=("step",), donate_argnames=("pools",))
def read_piece(
    step: PagedStep, params: Params, pools: tuple[Pool, ...], piece: TokensToCompute
) -> tuple[Float[Array, "P V"], tuple[Pool, ...]]:
    """Read pieces of P prompts; return the logits after them, and the pools."""
    (x,), pools = paged_hidden(step, params, pools, [piece])
    return unembed(params, _last(x, piece.counts), step.config), pools


@partial(jax.jit, static_argnames=("step", "top"), donate_argnames=("pools",))
def mixed(
    step: PagedStep,
    params: Params,
    pools: tuple[Pool, ...],
    rows: TokensToCompute,
    pieces: TokensToCompute,
    draws: RowDraws,
    top: int,
) -> tuple[Drawn, tuple[Pool, ...]]:
    """One step of R rows and pieces of P prompts as one flat batch; draws the next token of each."""
    both = [rows, pieces]
    x, pools = paged_hidden(step, params, pools, both)
    last = jnp.concatenate([_last(y, part.counts) for y, part in zip(x, both, strict=True)])
    return drawn(draws, unembed(params, last, step.config), 0, top), pools


def _last(x: Float[Array, "R T D"], counts: Int[Array, "R"]) -> Float[Array, "R D"]:
    """Each row's last token that counts."""
    return jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], 1)[:, 0]


@partial(jax.jit, static_argnames=("store",), donate_argnames=("pools",))
def adopt(
    pools: tuple[PagePool, ...], blocks: Int[Array, "1 M"], count: Int[Array, "1"],
    new: tuple[tuple[Array, Array, Array], ...], store: Store | None = None,
) -> tuple[PagePool, ...]:  # fmt: skip
    """Write the first `count` slots of KV heads (keys, values, positions [Lg, K, S, H]) to blocks."""
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
    """Take the contents of some pages, for all layers."""
    return tuple(x[:, pages] for x in words)


@partial(jax.jit, donate_argnames=("words",))
def put_back(words: tuple[Array, ...], pages: Int[Array, "N"], held: tuple[Array, ...]) -> tuple[Array, ...]:
    """Write contents back to pages; an index beyond the last page writes nothing."""
    return tuple(x.at[:, pages].set(y, mode="drop") for x, y in zip(words, held, strict=True))
