"""`Arena`: the words of a pool that requests of all methods share, in pages of equal bytes.

A page of `page` uncoded tokens is the unit. The same words hold more tokens as codes of fewer bits, so the
ledger counts pages, whatever they hold, and no bytes are set apart for one kind of request.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.base.errors import InputError
from kvjax.grammar import Store
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model
from kvjax.models.stacking import groups_in
from kvjax.ops.base.dispatch import platform
from kvjax.ops.decode.page_pool import BITS, PagePool, page_rows
from kvjax.serve.device.code_pages import PageLayout, layout_of
from kvjax.serve.device.code_step import CodePool
from kvjax.serve.device.coding import NUMBERS, PAYLOAD, is_of_rows
from kvjax.serve.holding import Holding

# A kernel's pages may hold so much fewer tokens.
WORTH = 0.75


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a page of one KV head in one layer: `page` uncoded tokens in `rows` rows of words."""

    page: int
    heads: int
    width: int
    dtype: str
    rows: int

    @property
    def words(self) -> int:
        return self.rows * self.width


def shape_of(model: Model, page: int) -> Shape:
    """Return the shape of a model's pages of `page` tokens. Raises InputError for half words."""
    slots = mixer_of(model.config, 0).slots_of(model.config)
    dtype = model.params["norm"].dtype.name
    if page % (tokens := 32 // BITS[dtype]):
        raise InputError(
            f"a page has {page} tokens, expected a multiple of {tokens} in {dtype}: write page=16"
        )
    return Shape(page, slots.heads, slots.key, dtype, _rows(dtype, page, slots.key, ("pos",)))


def _rows(payload: str, page: int, width: int, names: tuple[str, ...]) -> int:
    """Rows of a page: a TPU's memory has them in eights, others need no padding."""
    whole = page_rows(payload, page, width, names)
    if platform() == "tpu":
        return whole
    return 2 * page * BITS[payload] // 32 + len(names) * -(-page // width)


class PageFormat:
    """How the pages of an arena hold the slots of a store (None: uncoded).

    kernels: whether uncoded tokens and codes of 8 bits lie as the kernels of `paged_decode` read them; None:
    where such a kernel can run and a page of codes then holds at least `WORTH` of what it holds otherwise.
    There each of a token's five numbers has rows of its own, which a page of 16 tokens fills to an eighth: it
    holds no more codes than uncoded tokens. why: why pages cannot hold this store; empty if they can.
    """

    def __init__(self, shape: Shape, store: Store | None, kernels: bool | None = None):
        self.store = store
        self.plain: PageLayout | None = None
        self.coded: PageLayout | None = None
        self.why = ""
        possible = platform() != "cpu" if kernels is None else kernels
        if store is None:
            self.names, self.payload, self.holding = ("pos",), shape.dtype, Holding(shape.page)
            self.coded = None if possible else self._layout(shape, None, True, shape.page)
            return
        self._codes(shape, store)
        tokens = _most_tokens(shape) if is_of_rows(store, shape.width) else 0
        pays = kernels or self.coded is None or tokens >= WORTH * self.coded.tokens
        if tokens and possible and pays:
            self.coded, self.why = None, ""
            self.names, self.payload, self.holding = ("pos", *NUMBERS), PAYLOAD, Holding(tokens)

    def _layout(
        self, shape: Shape, store: Store | None, positions: bool, most: int | None = None
    ) -> PageLayout | None:
        sizes = shape.heads, shape.width
        found = layout_of(store, sizes, shape.dtype, shape.words, positions, most)
        if isinstance(found, PageLayout):
            return found
        self.why = found
        return None

    def _codes(self, shape: Shape, store: Store) -> None:
        """Pages in the arrays of the store's own codecs."""
        apart = store.residual > 0 or store.granule > 1
        self.coded = self._layout(shape, store, not apart)
        if self.coded is None:
            return
        self.plain = self._layout(shape, None, False) if apart else None
        more = (self.plain.tokens, store.residual, store.granule) if self.plain else ()
        self.holding = Holding(self.coded.tokens, *more)

    def of(self, words: Array) -> PagePool | CodePool:
        """Format the words as pages of this kind."""
        if self.coded is not None:
            return CodePool(words, self.coded, self.plain, self.holding)
        return PagePool(words, self.holding.page, self.payload, self.names)


def _most_tokens(shape: Shape) -> int:
    """Find the most tokens in codes of 8 bits that a page holds, in steps that kernels can read."""
    for step in (32, 16, 4):
        tokens = 0
        while _rows(PAYLOAD, tokens + step, shape.width, ("pos", *NUMBERS)) <= shape.rows:
            tokens += step
        if tokens:
            return tokens
    return 0


class Arena:
    """The words of all pages: for each group of layers [Lg, heads * blocks, rows, width].

    A block is one page of every layer and KV head. On a mesh every device has the pages of its KV heads.
    """

    def __init__(self, model: Model, page: int, blocks: int):
        self.shape, self.blocks = shape_of(model, page), blocks
        self.sizes = [group.size for group in groups_in(model.params)]
        one = self.shape.heads * blocks, self.shape.rows, self.shape.width
        on = model.on_mesh
        at = (
            None
            if on is None
            else NamedSharding(on.mesh, PartitionSpec(None, on.rules.mesh_axes("kv_heads")))
        )
        self.words: tuple[Array, ...] = tuple(
            jnp.zeros((size, *one), jnp.int32, device=at) for size in self.sizes
        )

    @property
    def layers(self) -> int:
        return sum(self.sizes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return 4 * self.layers * self.shape.heads * self.shape.words

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes
