"""Blocks of a prompt by sums along the antidiagonals of their attention maps (XAttention)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.grammar.prompt_reads import PromptQueries, PromptRead
from kvjax.ops.attention.block_sparse import Picks
from kvjax.ops.base.dtypes import wide
from kvjax.read.prompt_blocks import covering, own_blocks, softmax_over, visible_blocks


@dataclasses.dataclass(frozen=True)
class Antidiagonals(PromptRead):
    """XAttention (arXiv:2503.16428, section 2): blocks that cover a share of the attention by antidiagonals.

    Of every `stride` x `stride` tile of logits only the antidiagonal is computed, whose mean stands for the
    tile; a softmax over the tiles at and before a query's, summed over a block, is the block's share.

    Args:
        covered: a query head's blocks of queries each attend to the fewest blocks with this share of the
            attention, the first block and their own among them; 1 is all blocks.
        stride: tokens per tile.
        block: queries, and keys, per block.
        skip_layers: how many of the first layers attend to everything.

    >>> Antidiagonals(0.9).stride
    16
    """

    covered: float
    stride: int = 16
    block: int = 128
    skip_layers: int = 0

    def __post_init__(self):
        if self.block % self.stride:
            raise ValueError(
                f"a block of {self.block} tokens is no multiple of the stride of {self.stride}: give "
                f"block={-(-self.block // self.stride) * self.stride}"
            )

    @property
    def segment(self) -> int:
        return self.block

    @property
    def read_whole(self) -> int:
        # A block attends to the first one and to itself.
        return 2 * self.block

    def pick(self, prompt: PromptQueries) -> tuple[Picks, None]:
        tokens, block = prompt.pos.shape[1], self.block
        seen = visible_blocks(prompt.pos, block, block)
        seen = jnp.broadcast_to(seen, (*prompt.q.shape[:2], *seen.shape[2:]))
        if self.covered == 1.0:
            return Picks(seen), None
        mass = self._block_mass(prompt)
        always = seen & (
            own_blocks(tokens, block, block) | (np.arange(tokens // block) == 0)[None, None, None]
        )
        held = jnp.where(always, mass, 0.0).sum(-1, keepdims=True)
        most = self.covered * mass.sum(-1, keepdims=True) - held
        others = covering(jnp.where(seen & ~always, mass, 0.0), most)
        return Picks(always | others), None

    def _block_mass(self, prompt: PromptQueries) -> Float[Array, "B N I J"]:
        """Compute the softmax over tiles by antidiagonals, summed over the tiles of each pair of blocks."""
        live, size = (prompt.pos >= 0)[:, None, :, None], self.stride
        b, n, tokens, h = prompt.q.shape
        heads, tiles = prompt.k.shape[1], tokens // size

        def in_tiles(x: Array) -> Array:
            return jnp.where(live, x, 0).reshape(*x.shape[:2], tiles, size, x.shape[-1])

        q = in_tiles(prompt.q)[:, :, :, ::-1].reshape(b, heads, n // heads, -1, self.block // size, size * h)
        k = in_tiles(prompt.k).reshape(b, heads, tiles, size * h)
        real = (prompt.pos >= 0).reshape(b, tiles, size).any(-1)

        def of_block(at: tuple[Array, Array]) -> Array:
            i, mine = at
            s = jnp.einsum("bkgsf,bktf->bkgst", mine, k, preferred_element_type=wide(mine))
            row = i * (self.block // size) + jnp.arange(self.block // size)
            before = jnp.arange(tiles)[None] <= row[:, None]
            asked = jnp.take(real, row, axis=1)[:, :, None] & real[:, None] & before[None]
            p = softmax_over(s * (prompt.scale / size), asked[:, None, None])
            return p.sum(3).reshape(b, n, -1, self.block // size).sum(-1)

        blocks = jnp.moveaxis(q, 3, 0)
        found = jax.lax.map(of_block, (jnp.arange(blocks.shape[0]), blocks))
        return jnp.moveaxis(found, 0, 2)
