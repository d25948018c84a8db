"""HOMER: chunks of a prompt are read separately, thinned out and merged in pairs, level by level."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.grammar.phase import Phase
from kvjax.grammar.prompt_edits import Narrow
from kvjax.grammar.shared_ranges import SharedRanges
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import window_logits
from kvjax.keep.select import slot_lists, top


@dataclasses.dataclass(frozen=True)
class Hierarchy(Narrow, FittedWord):
    """Lower layers read chunks of a prompt separately, halve them, and merge neighbours (arXiv:2404.10308).

    The first `prefix` tokens are followed by 2^height chunks of `chunk` tokens, which all have the positions
    right after the prefix, and then by the rest of the prompt. After the last layer of a level, every block
    keeps half a chunk's tokens, and neighbouring blocks are joined; above the last level there is one block.
    A token dropped there is stored in no layer. share: the share of the layers that the levels and the first
    layers of the single block take up, evenly. Later turns are read whole. fitted: "bias" [L, D], the mean
    logit at each distance, as `kvjax fit homer` writes it; None uses logits as they are.

    ValueError for sizes that give no chunks.

    >>> word = Hierarchy(1, 4, 2, 0.625)
    >>> word.levels(32), word.levels(4), word.most(100), word.left(17, 0)
    ((7, 13), (0, 1), 88, 9)
    """

    prefix: int
    chunk: int
    height: int
    share: float
    fitted: Fitted | None = None
    by = "homer"
    fit_first = False
    # Dropped tokens are stored in no layer, and later turns are read whole.
    all_layers = True
    first_turn_only = True

    def __post_init__(self):
        if self.chunk < 2 or self.height < 1 or self.prefix < 0:
            raise ValueError(
                f"chunks of {self.chunk} tokens after a prefix of {self.prefix}, merged {self.height} times "
                "were given, expected 2 tokens or more, a prefix of 0 or more, and at least one merge"
            )

    @property
    def needs(self) -> frozenset[Observation]:
        """The observations by which tokens are selected."""
        return frozenset({Queries(1)})

    @property
    def phase(self) -> SharedRanges:
        """The rotation of the tokens: chunks share a range of positions, and upper layers see all chunks."""
        chunks = 2**self.height
        return SharedRanges(self.prefix, (self.chunk,) * chunks, 1.0, 1.0, chunks)

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "biases", "layers", "bias", (model.layers,))

    def levels(self, layers: int) -> tuple[int, ...]:
        """Return the last layer of every level but the highest one, in a model of `layers` layers."""
        merging = int(layers * self.share)
        each = max(1, merging // (self.height + 1))
        rest = max(0, merging - each * (self.height + 1))
        return tuple(rest + each * (i + 1) - 1 for i in range(self.height))

    def after(self, layers: int) -> int:
        """Return the last layer before all tokens are in one block."""
        return self.levels(layers)[-1]

    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, TokenReduction], ...]:
        """Pairs (layer, reduction): after which layers tokens of a prompt of `tokens` tokens are dropped."""
        return tuple(
            (at, TokenReduction(self, level, tokens)) for level, at in enumerate(self.levels(layers))
        )

    def phase_in(self, layer: int, layers: int, phase: Phase) -> Phase:
        """Return the phase of a first prompt in a layer: tokens attend to tokens of their own block."""
        below = sum(at < layer for at in self.levels(layers))
        return dataclasses.replace(self.phase, together=2**below)

    def left(self, tokens: int, level: int) -> int:
        """How many of the first `tokens` tokens of a text are left after a level."""
        chunks, block = 2**self.height * self.chunk, 2**level * self.chunk
        inside = min(max(tokens - self.prefix, 0), chunks)
        # A block holds what is left of its chunks; a partial last block holds what is left of its tokens.
        whole, part = divmod(inside, block)
        return tokens - inside + whole * (self.chunk // 2) + self._left_in(part, level)

    def _left_in(self, tokens: int, level: int) -> int:
        """How many of the first `tokens` tokens of a block are left after a level."""
        if level == 0:
            return min(tokens, self.chunk // 2)
        below, part = divmod(tokens, 2 ** (level - 1) * self.chunk)
        held = below * (self.chunk // 2) + self._left_in(part, level - 1)
        return min(held, self.chunk // 2)

    def most(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text are stored."""
        return self.left(tokens, self.height - 1)


@dataclasses.dataclass(frozen=True)
class TokenReduction:
    """One level of a `Hierarchy`: each block keeps the tokens to which its last query attends most.

    A token's score is max_n q_n k / sqrt(H) - bias[d], with the last query of every query head and its
    distance d to the token. tokens: the length of the whole prompt.
    """

    word: Hierarchy
    level: int
    tokens: int

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Unused: every block has a number of its own."""
        return tokens

    def choose(self, view: View, seen: Observed) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Return the tokens that stay, in order, and which of the M entries are in use."""
        pos, phase, word = view.pos[:, 0], self.word.phase, self.word
        number, chunks = phase.number(pos), 2**word.height
        inside = (pos >= 0) & (number > 0) & (number <= chunks)
        # The last token always stays, because the answer is predicted from it.
        found = jnp.where(pos == seen.length[:, None] - 1, jnp.inf, self.score(view, seen))
        blocks = jnp.arange(chunks // 2**self.level)
        mine = inside[:, None] & ((number - 1)[:, None] // 2**self.level == blocks[None, :, None])
        each = jnp.full(mine.shape[:2], word.chunk // 2, jnp.int32)
        best = top(jnp.where(mine, found[:, None], -jnp.inf), each).any(1)
        kept = best | ((pos >= 0) & ~inside)
        return slot_lists(kept, word.left(self.tokens, self.level))

    def score(self, view: View, seen: Observed) -> Float[Array, "B T"]:
        """Compute the last query's logit for every token, minus the mean logit at that distance."""
        _, q_pos = seen.of(Queries(1))
        found = window_logits(view, seen, 1)[:, :, :, 0].max((1, 2))
        if self.word.fitted is None:
            return found
        bias = seen.fitted[self.word.fitted.digest]["bias"]
        phase = self.word.phase
        apart = phase.phase(q_pos) - phase.phase(view.pos[:, 0])
        return found - bias[jnp.clip(apart, 0, bias.shape[0] - 1)]
