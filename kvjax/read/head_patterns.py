"""Patterns of a prompt's attention, one for every query head (MInference)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.prompt_reads import PromptQueries, PromptRead
from kvjax.ops.attention.block_sparse import Picks
from kvjax.read.prompt_blocks import (
    blocks_at_distances,
    by_distance,
    mean_of,
    newest_attention,
    own_blocks,
    ranks,
    visible_blocks,
)


@dataclasses.dataclass(frozen=True)
class AShape:
    """A-shape: every query attends to the first `first` tokens and to the `newest` ones before it.

    >>> AShape(128, 1024).newest
    1024
    """

    first: int
    newest: int

    def read_whole(self, block: int) -> int:
        return max(self.newest, self.first)

    def columns(self, tokens: int) -> int:
        return min(self.first, tokens)

    def pick(self, prompt: PromptQueries, block: int) -> Picks:
        b, n, tokens, _ = prompt.q.shape
        near = jnp.broadcast_to(jnp.arange(tokens) < self.newest, (b, n, tokens))
        columns = jnp.arange(self.columns(tokens), dtype=jnp.int32)
        return Picks(blocks_at_distances(near, block, block), jnp.broadcast_to(columns, (b, n, len(columns))))


@dataclasses.dataclass(frozen=True)
class VerticalSlash:
    """Vertical-slash: the columns and the diagonals to which a row's newest `asked` queries attend most.

    vertical: how many columns, among them the `first`. slash: how many diagonals, among them the `nearest`;
    all keys of a block on one of them are attended to.

    >>> VerticalSlash(1000, 6096).asked
    64
    """

    vertical: int
    slash: int
    asked: int = 64
    first: int = 30
    nearest: int = 100

    def read_whole(self, block: int) -> int:
        return max(self.slash, self.vertical)

    def columns(self, tokens: int) -> int:
        return min(max(self.vertical, self.first), tokens)

    def pick(self, prompt: PromptQueries, block: int) -> Picks:
        tokens = prompt.q.shape[2]
        attention, index, _ = newest_attention(prompt, self.asked)
        at = np.arange(tokens)[None, None]
        vertical = jnp.where(at < self.first, jnp.inf, attention.sum(2))
        slash = jnp.where(at < self.nearest, jnp.inf, by_distance(attention, index))
        _, columns = jax.lax.top_k(vertical, self.columns(tokens))
        picked = ranks(slash) < self.slash
        return Picks(blocks_at_distances(picked, block, block), columns.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class BestBlocks:
    """Block-sparse: every block of queries attends to the `blocks` blocks of the largest product of means.

    >>> BestBlocks(100).blocks
    100
    """

    blocks: int

    def read_whole(self, block: int) -> int:
        return self.blocks * block

    def columns(self, tokens: int) -> int:
        return 0

    def pick(self, prompt: PromptQueries, block: int) -> Picks:
        q, k = (mean_of(x, prompt.pos, block) for x in (prompt.q, prompt.k))
        k = jnp.repeat(k, q.shape[1] // k.shape[1], axis=1)
        s = jnp.einsum("bnih,bnjh->bnij", q, k, precision="highest")
        seen = visible_blocks(prompt.pos, block, block)
        return Picks(seen & (ranks(jnp.where(seen, s, -jnp.inf)) < self.blocks))


Pattern = AShape | VerticalSlash | BestBlocks


@dataclasses.dataclass(frozen=True)
class HeadPatterns(PromptRead, FittedWord):
    """MInference (arXiv:2407.02490, section 3): every query head attends to a prompt by a pattern of its own.

    Args:
        patterns: what heads choose from; without a fit all of them have the first.
        block: queries, and keys, per block.
        skip_layers: how many of the first layers attend to everything.
        fitted: which pattern each head of each layer has.

    A block of queries attends to itself in every pattern.

    >>> HeadPatterns((VerticalSlash(1000, 6096),)).block
    64
    """

    patterns: tuple[Pattern, ...]
    block: int = 64
    skip_layers: int = 0
    fitted: Fitted | None = None
    by = "minference"
    fit_first = False

    @property
    def segment(self) -> int:
        return self.block

    @property
    def read_whole(self) -> int:
        found = self.patterns[:1] if self.fitted is None else self.patterns
        return min(p.read_whole(self.block) for p in found)

    def check(self, sizes: ModelSizes) -> None:
        """Raise InputError for patterns of other heads, and for one that is not among `patterns`."""
        check_sizes(self, "patterns", "layers, heads", "pattern", (sizes.layers, sizes.heads))
        assert self.fitted is not None
        chosen, count = self.fitted.arrays["pattern"], len(self.patterns)
        if ((chosen < 0) | (chosen >= count)).any():
            # A gather with such an index takes the last pattern.
            raise InputError(
                f"a head was fitted to pattern {chosen.max()}, counted from 0, and the method has {count}: "
                f"give those that it was fitted with, or run `kvjax fit {self.by}` on this model"
            )

    def pick(self, prompt: PromptQueries) -> tuple[Picks, None]:
        tokens = prompt.pos.shape[1]
        seen = visible_blocks(prompt.pos, self.block, self.block)
        chosen = self._chosen(prompt)
        found = self.patterns[:1] if chosen is None else self.patterns
        most = max(p.columns(tokens) for p in found)
        each = [_wide(p.pick(prompt, self.block), most) for p in found]
        blocks, columns = each[0] if chosen is None else _of_heads(each, chosen)
        picked = seen & (blocks | own_blocks(tokens, self.block, self.block))
        return Picks(picked, columns), None

    def _chosen(self, prompt: PromptQueries) -> Int[Array, "N"] | None:
        return None if self.fitted is None else prompt.fitted[self.fitted.digest]["pattern"]


def _wide(picks: Picks, columns: int) -> Picks:
    """Widen to so many columns."""
    if not columns:
        return picks
    b, n = picks.blocks.shape[:2]
    held = jnp.zeros((b, n, 0), jnp.int32) if picks.columns is None else picks.columns
    missing = columns - held.shape[-1]
    return picks._replace(columns=jnp.pad(held, ((0, 0), (0, 0), (0, missing)), constant_values=-1))


def _of_heads(each: list[Picks], chosen: Int[Array, "N"]) -> Picks:
    """Each head's picks of those of all patterns."""
    heads = np.arange(chosen.shape[0])

    def one(*found: Any) -> Any:
        return jnp.moveaxis(jnp.stack(found)[chosen, :, heads], 0, 1)

    blocks: Bool[Array, "B N I J"] = one(*(p.blocks for p in each))
    return Picks(blocks, None if each[0].columns is None else one(*(p.columns for p in each)))
