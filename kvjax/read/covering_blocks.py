"""Blocks of a prompt that cover a share of the attention, by a pattern for every head (FlexPrefill)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.grammar.prompt_reads import PromptQueries, PromptRead
from kvjax.ops.attention.block_sparse import Picks
from kvjax.read.prompt_blocks import (
    by_distance,
    covering,
    in_blocks,
    mean_of,
    newest_attention,
    ranks,
    softmax_over,
    visible_blocks,
)


@dataclasses.dataclass(frozen=True)
class CoveringBlocks(PromptRead):
    """FlexPrefill (arXiv:2502.20766, section 3): blocks that cover a share of the attention, head by head.

    A row's newest `block` queries are asked. Where the attention over blocks that their mean has to the means
    of keys differs from theirs by a root of the Jensen-Shannon divergence below `divergence`, the head picks
    by means of queries and keys: of all pairs of blocks the fewest that cover the share. Else it picks
    verticals and slashes: as many blocks of keys, and of distances, as the tokens that cover the share of
    what these queries attend to would fill.

    Args:
        covered: the share of the attention; 1 is all blocks.
        divergence: from which a head picks verticals and slashes.
        least: how many tokens of keys, and of distances, are always picked.
        block: queries, and keys, per block.
        skip_layers: how many of the first layers attend to everything.

    >>> CoveringBlocks(0.9).read_whole
    1024
    """

    covered: float
    divergence: float = 0.1
    least: int = 1024
    block: int = 128
    skip_layers: int = 0

    @property
    def segment(self) -> int:
        return self.block

    @property
    def read_whole(self) -> int:
        return max(2 * self.block, self._least * self.block)

    @property
    def _least(self) -> int:
        return -(-self.least // self.block)

    def pick(self, prompt: PromptQueries) -> tuple[Picks, None]:
        seen = visible_blocks(prompt.pos, self.block, self.block)
        seen = jnp.broadcast_to(seen, (*prompt.q.shape[:2], *seen.shape[2:]))
        if self.covered == 1.0:
            return Picks(seen), None
        attention, index, asked = newest_attention(prompt, self.block)
        count = jnp.maximum((index >= 0).sum(-1), 1)[:, None, None].astype(attention.dtype)
        vertical, slash = attention.sum(2) / count, by_distance(attention, index) / count
        keys = mean_of(prompt.k, prompt.pos, self.block)
        keys = jnp.repeat(keys, prompt.q.shape[1] // keys.shape[1], axis=1)
        alike = self._alike(prompt, asked.astype(attention.dtype).sum(2) / count, keys, vertical)[..., None]
        verticals = self._best(vertical, alike)
        slashes = self._best(slash, alike)
        at = np.arange(seen.shape[-1])
        apart = at[:, None] - at[None]
        picked = verticals[:, :, None] | slashes[..., np.maximum(apart, 0)] & (apart >= 0)[None, None]
        picked |= alike[..., None] & self._by_means(prompt, keys, seen)
        short = (prompt.length <= self.read_whole)[:, None, None, None]
        return Picks(seen & (picked | short)), None

    def _alike(
        self, prompt: PromptQueries, q: Float[Array, "B N H"], keys: Float[Array, "B N J H"],
        vertical: Float[Array, "B N T"],
    ) -> Bool[Array, "B N"]:  # fmt: skip
        """Whether the attention of the mean of queries to the means of keys is near what they attend to."""
        live = in_blocks((prompt.pos >= 0)[:, None], self.block).any(-1)
        p = softmax_over(prompt.scale * jnp.einsum("bnh,bnjh->bnj", q, keys, precision="highest"), live)
        return divergence(p, in_blocks(vertical, self.block).sum(-1)) < self.divergence

    def _best(self, x: Float[Array, "B N T"], alike: Bool[Array, "B N 1"]) -> Bool[Array, "B N J"]:
        """Choose the first block and the best others, as many as the tokens that cover the share fill."""
        most = jnp.full((*x.shape[:-1], 1), self.covered, x.dtype)
        tokens = covering(x, most).sum(-1, keepdims=True)
        blocks = jnp.where(alike, self._least, jnp.maximum(tokens // self.block + 1, self._least))
        each = in_blocks(x, self.block).sum(-1)
        return ranks(jnp.where(np.arange(each.shape[-1])[None, None] == 0, jnp.inf, each)) < blocks

    def _by_means(
        self, prompt: PromptQueries, keys: Float[Array, "B N J H"], seen: Bool[Array, "B N J J"]
    ) -> Bool[Array, "B N J J"]:
        """Of all pairs of blocks, the fewest whose attention, by means, covers the share."""
        queries = mean_of(prompt.q, prompt.pos, self.block)
        s = prompt.scale * jnp.einsum("bnih,bnjh->bnij", queries, keys, precision="highest")
        p = softmax_over(s, seen)
        flat = p.reshape(*p.shape[:2], -1)
        return covering(flat, self.covered * flat.sum(-1, keepdims=True)).reshape(p.shape)


def divergence(p: Float[Array, "*b J"], q: Float[Array, "*b J"]) -> Float[Array, "*b"]:
    """Compute the root of the Jensen-Shannon divergence, by natural logarithms.

    >>> round(float(divergence(jnp.asarray([1.0, 0.0]), jnp.asarray([0.0, 1.0]))), 4)
    0.8326
    """
    middle = (p + q) / 2

    def from_middle(x: Array) -> Array:
        held = x > 0
        return jnp.where(held, x * jnp.log(jnp.where(held, x, 1.0) / jnp.where(held, middle, 1.0)), 0.0).sum(
            -1
        )

    return jnp.sqrt(jnp.maximum((from_middle(p) + from_middle(q)) / 2, 0.0))
