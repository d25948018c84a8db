"""Hierarchy: chunks of a prompt are read apart, thinned and merged in pairs, level by level (HOMER)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.fitted import Fitted, ModelSizes, check_sizes
from kvjax.grammar.phase import Phase, SharedRanges
from kvjax.grammar.protocols import Observation, Seen, View
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import window_logits
from kvjax.keep.select import slot_lists, top


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """Lower layers read chunks of a prompt apart, halve them, and merge neighbours (arXiv:2404.10308).

    The first `prefix` tokens are followed by 2^height chunks of `chunk` tokens, all of which stand at the
    positions behind the prefix, and these by the rest of the prompt. Behind the last layer of a level, half a
    chunk's tokens stay of every block, and neighbouring blocks become one; above the last level there is one
    block. What leaves there leaves all layers. share: of the layers that the levels and the first layers of
    the one block make up, evenly. Later turns are read whole. fitted: "bias" [L, D], what a logit is at a
    distance, as `kvjax fit homer` writes it; None takes logits as they are.

    ValueError for sizes that make no chunks.

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
    # What leaves a layer is stored in none, and later turns are read whole.
    all_layers = True
    first_turn_only = True

    def __post_init__(self):
        if self.chunk < 2 or self.height < 1 or self.prefix < 0:
            raise ValueError(
                f"chunks of {self.chunk} tokens behind a prefix of {self.prefix}, merged {self.height} times "
                "were given, expected 2 tokens or more, a prefix of 0 or more, and at least one merge"
            )

    @property
    def needs(self) -> frozenset[Observation]:
        """What is observed, so that tokens can be chosen."""
        return frozenset({Queries(1)})

    @property
    def phase(self) -> SharedRanges:
        """What tokens turn by, and that all of them meet in the upper layers."""
        chunks = 2**self.height
        return SharedRanges(self.prefix, (self.chunk,) * chunks, 1.0, 1.0, chunks)

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        check_sizes(self, "biases", "layers", "bias", (model.layers,))

    def levels(self, layers: int) -> tuple[int, ...]:
        """The last layer of every level but the uppermost one, in a model of so many layers."""
        merging = int(layers * self.share)
        each = max(1, merging // (self.height + 1))
        rest = max(0, merging - each * (self.height + 1))
        return tuple(rest + each * (i + 1) - 1 for i in range(self.height))

    def after(self, layers: int) -> int:
        """The last layer below the one block."""
        return self.levels(layers)[-1]

    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, Thinning], ...]:
        """Behind which layers tokens of a prompt of so many leave, and who chooses them."""
        return tuple((at, Thinning(self, level, tokens)) for level, at in enumerate(self.levels(layers)))

    def phase_in(self, layer: int, layers: int, phase: Phase) -> Phase:
        """Which tokens of a first prompt meet in a layer: those of a block."""
        below = sum(at < layer for at in self.levels(layers))
        return dataclasses.replace(self.phase, together=2**below)

    def left(self, tokens: int, level: int) -> int:
        """How many of the first `tokens` tokens of a text stay behind a level."""
        chunks, block = 2**self.height * self.chunk, 2**level * self.chunk
        inside = min(max(tokens - self.prefix, 0), chunks)
        # A block holds what its chunks have left; what a prompt has not reached is no part of one.
        whole, part = divmod(inside, block)
        return tokens - inside + whole * (self.chunk // 2) + self._left_in(part, level)

    def _left_in(self, tokens: int, level: int) -> int:
        """Of the first tokens of a block."""
        if level == 0:
            return min(tokens, self.chunk // 2)
        below, part = divmod(tokens, 2 ** (level - 1) * self.chunk)
        held = below * (self.chunk // 2) + self._left_in(part, level - 1)
        return min(held, self.chunk // 2)

    def most(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text are stored."""
        return self.left(tokens, self.height - 1)


@dataclasses.dataclass(frozen=True)
class Thinning:
    """One level of a `Hierarchy`: the tokens of every block that its last query asks for most stay.

    A token's score is max_n q_n k / sqrt(H) - bias[d], with the last query of every query head and the
    distance d at which the two stand. tokens: of the whole prompt.
    """

    word: Hierarchy
    level: int
    tokens: int

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """No number is given: every block has its own."""
        return tokens

    def choose(self, view: View, seen: Seen) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """The tokens that stay, in their order, and which of the entries are any."""
        pos, phase, word = view.pos[:, 0], self.word.phase, self.word
        number, chunks = phase.number(pos), 2**word.height
        inside = (pos >= 0) & (number > 0) & (number <= chunks)
        # The last token answers, wherever it stands.
        found = jnp.where(pos == seen.length[:, None] - 1, jnp.inf, self.score(view, seen))
        blocks = jnp.arange(chunks // 2**self.level)
        mine = inside[:, None] & ((number - 1)[:, None] // 2**self.level == blocks[None, :, None])
        each = jnp.full(mine.shape[:2], word.chunk // 2, jnp.int32)
        best = top(jnp.where(mine, found[:, None], -jnp.inf), each).any(1)
        kept = best | ((pos >= 0) & ~inside)
        return slot_lists(kept, word.left(self.tokens, self.level))

    def score(self, view: View, seen: Seen) -> Float[Array, "B T"]:
        """What the last query asks of every token, without what it asks of any at that distance."""
        _, q_pos = seen.of(Queries(1))
        found = window_logits(view, seen, 1)[:, :, :, 0].max((1, 2))
        if self.word.fitted is None:
            return found
        bias = seen.fitted[self.word.fitted.digest]["bias"]
        phase = self.word.phase
        apart = phase.phase(q_pos) - phase.phase(view.pos[:, 0])
        return found - bias[jnp.clip(apart, 0, bias.shape[0] - 1)]
