"""Selective propagation: layers above one layer read only some tokens of a prompt, at their own positions."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.calls import number_of, probes_of, scored
from kvjax.grammar.kinds import Observation, Observed, Score, View
from kvjax.grammar.prompt_edits import Narrow
from kvjax.grammar.validate import check_words
from kvjax.keep.select import slot_lists, top


@dataclasses.dataclass(frozen=True)
class SelectivePropagation(Narrow):
    """Layers above `layer` read only a share of every prompt's tokens (arXiv:2502.01068, section 3).

    layer: the last layer that reads all of them, by number, or as a share of the layers. score: the score of
    new tokens, summed over the heads of that layer; it does not see earlier turns. share: how many tokens the
    upper layers read, rounded down per row; the newest `window` are always among them.

    ValueError for numbers outside their ranges, or a score that needs more than queries, keys and values.

    >>> from kvjax.keep.scores.score import KeyNorm
    >>> word = SelectivePropagation(0.5, KeyNorm(), 0.2)
    >>> word.after(32), word.most(100), word.most(10), word.most(3)
    (15, 20, 8, 3)
    """

    layer: int | float
    score: Score
    share: float
    window: int = 8
    # Lower layers store tokens that upper layers do not read, and every turn is narrowed.

    def __post_init__(self):
        check_chooser("SelectivePropagation", self.layer, self.score)
        if not 0 <= self.share <= 1:
            raise ValueError(
                f"SelectivePropagation's share of the tokens must be from 0 to 1, got {self.share!r}"
            )
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(
                "SelectivePropagation's window must be a whole number >= 1, because the last token answers, "
                f"got {self.window!r}"
            )

    @property
    def needs(self) -> frozenset[Observation]:
        """The observations by which tokens are selected."""
        return self.score.needs

    @property
    def looks(self) -> bool:
        """Whether the score reads keys or values."""
        return self.score.looks

    def after(self, layers: int) -> int:
        """Return the number of the last layer that reads all tokens, in a model of `layers` layers."""
        return number_of(self.layer, layers)

    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, SelectivePropagation], ...]:
        """Return (layer, selector) pairs: after which layers tokens are dropped, and who selects the rest."""
        return ((self.after(layers), self),)

    @property
    def _ratio(self) -> Fraction:
        # In thousandths or simpler fractions, so that counts are exact integer arithmetic.
        return Fraction(self.share).limit_denominator(1000)

    def most(self, tokens: int) -> int:
        """How many of `tokens` new tokens the upper layers read."""
        return min(tokens, max(self.window, tokens * self._ratio.numerator // self._ratio.denominator))

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the same for every row."""
        shared = tokens * self._ratio.numerator // self._ratio.denominator
        return jnp.minimum(tokens, jnp.maximum(self.window, shared))

    def choose(self, view: View, seen: Observed) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Return the new tokens that upper layers read, in order, and which of the M entries are in use.

        view: the layer's new tokens, the same in every KV head.
        """
        return choose_tokens(self.score, view, seen, self.window, self.most(view.pos.shape[2]))


def check_chooser(word: str, layer: int | float, score: Score) -> None:
    """Raise ValueError if a selecting word names no layer, or a score that is not available there."""
    by_number = isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
    if not (by_number or (isinstance(layer, float) and 0 < layer < 1)):
        raise ValueError(
            f"{word}'s layer must be a layer's number >= 0, or a share between 0 and 1, got {layer!r}"
        )
    check_words(score, None, (), None)
    masses = [o for o in score.needs if o.reduction is not None]
    for asked in (*masses, *score.traces, *(probes_of(score) - {None})):
        raise ValueError(
            f"{word} chooses while the prompt is read, and its score asks for {asked!r}, which is known "
            "later: give one of queries, keys and values, such as WindowAttention(8)"
        )
    if score.weights:
        raise ValueError(
            f"{word}'s score sees no matrices of its layer, and {score!r} asks for them: give "
            "one of queries, keys and values, such as WindowAttention(8)"
        )


def choose_tokens(
    score: Score, view: View, seen: Observed, window: int, most: int
) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
    """Return a layer's best seen.n new tokens, in order, and which entries are in use; newest always stay."""
    pos = view.pos[:, 0]
    found: Float[Array, "B T"] = scored(score, view, seen).astype(jnp.float32).sum(1)
    found = jnp.where(pos >= seen.length[:, None] - window, jnp.inf, found)
    kept = top(jnp.where(pos < 0, -jnp.inf, found), seen.n)
    return slot_lists(kept, most)
