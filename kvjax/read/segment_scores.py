"""Segments of a prompt's queries attend to the blocks whose representatives score highest (CritiPrefill)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.grammar import Budget
from kvjax.grammar.prompt_reads import PromptQueries, PromptRead
from kvjax.ops.attention.block_sparse import Picks
from kvjax.ops.attention.union import NEG_INF
from kvjax.ops.base.dtypes import wide
from kvjax.read.prompt_blocks import in_blocks, own_blocks, ranks, softmax_over, visible_blocks


@dataclasses.dataclass(frozen=True)
class SegmentScores(PromptRead):
    """CritiPrefill (arXiv:2409.12490, section 3): segments of queries attend to the best blocks before them.

    Segments and blocks are represented by their largest and smallest numbers in every channel. A block scores
    max(m k_max, m k_min), where m is the mean of a segment's q_max and q_min, averaged over the heads of a
    group; scores become shares by a softmax over the blocks before the segment, and are mixed with those of
    the layer below.

    Args:
        budget: of the tokens before a segment, those that it attends to, in whole blocks.
        segment: queries per segment, which attend to all tokens of their own segment.
        block: keys per block.
        below: the weight of the scores of the layer below.
        skip_layers: how many of the first layers attend to everything.

    The last segment of a row attends to everything.

    >>> SegmentScores(Budget(0.25), segment=64, block=16).share(256)
    0.775
    """

    budget: Budget
    segment: int = 512
    block: int = 32
    below: float = 0.25
    skip_layers: int = 1

    def __post_init__(self):
        if self.segment % self.block:
            raise ValueError(
                f"a segment of {self.segment} queries is no multiple of a block of {self.block} keys: give "
                f"segment={-(-self.segment // self.block) * self.block}"
            )

    @property
    def carries(self) -> bool:
        return self.below > 0

    @property
    def read_whole(self) -> int:
        return self.segment + (0 if self.budget.ratio is not None else int(self.budget.amount))

    def _counts(self, tokens: int) -> np.ndarray:
        """How many blocks before it each segment attends to."""
        before = range(0, tokens, self.segment)
        most = [0 if n == 0 else -(-self.budget.capacity(n) // self.block) for n in before]
        return np.array(most, np.int32)

    def share(self, tokens: int) -> float:
        """Compute the share of the pairs of a segment and a block it sees that is computed, where it acts."""
        if tokens <= self.read_whole:
            return 1.0
        seen = np.minimum(np.arange(self.segment, tokens + self.segment, self.segment), tokens)
        seen = -(-seen // self.block)
        before = np.arange(len(seen)) * (self.segment // self.block)
        picked = seen - before + np.minimum(self._counts(tokens), before)
        picked[-1] = seen[-1]
        return float(picked.sum() / seen.sum())

    def pick(self, prompt: PromptQueries) -> tuple[Picks, Float[Array, "B K I J"]]:
        q, k, pos = prompt.q, prompt.k, prompt.pos
        b, heads, tokens, h = k.shape
        live = (pos >= 0)[:, None, :, None]
        kind = wide(q)

        def ends(x: Array, size: int) -> tuple[Array, Array]:
            high = in_blocks(jnp.where(live, x, NEG_INF), size).max(3)
            low = in_blocks(jnp.where(live, x, -NEG_INF), size).min(3)
            return jnp.where(high == NEG_INF, 0, high).astype(kind), jnp.where(
                low == -NEG_INF, 0, low
            ).astype(kind)

        high, low = ends(q, self.segment)
        middle = (high + low) / 2
        middle = middle.reshape(b, heads, -1, *middle.shape[2:])
        products = [
            jnp.einsum("bkgih,bkjh->bkgij", middle, y, precision="highest") for y in ends(k, self.block)
        ]
        scores = jnp.maximum(*products).mean(2)
        seen = visible_blocks(pos, self.segment, self.block)
        own = own_blocks(tokens, self.segment, self.block)
        before = seen & ~own
        shares = softmax_over(scores, before)
        if prompt.below is not None:
            shares = self.below * prompt.below + (1 - self.below) * shares
        best = ranks(jnp.where(before, shares, -1.0)) < self._counts(tokens)[None, None, :, None]
        last = (np.arange(1, own.shape[2] + 1)[None] * self.segment >= prompt.length[:, None])[
            :, None, :, None
        ]
        return Picks(seen & (own | best | last)), shares
