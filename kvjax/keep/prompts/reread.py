"""Reread: an early layer selects tokens of a prompt, which the model then reads as a text of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.grammar.calls import number_of
from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.kinds import Observation, Observed, Score, View
from kvjax.grammar.prompt_edits import Rereading
from kvjax.keep.prompts.narrow import check_chooser, choose_tokens


@dataclasses.dataclass(frozen=True)
class Reread(Rereading):
    """Layers up to `layer` select tokens of a prompt, then the whole model reads those (arXiv:2409.17422).

    The selected tokens get new consecutive positions after those of earlier turns, so the cache, its length
    and `kept_positions` describe the text that was read, not the one that was given. layer: its number, or
    the share of the layers that run. score: the score of new tokens, summed over the heads of that layer.
    budget: how many are read, a `Budget`; the `newest` are always among them, since the answer is predicted
    from the last one.

    ValueError for a layer outside its range, or a score that needs more than queries, keys and values.

    >>> from kvjax.grammar import Budget
    >>> from kvjax.keep.scores.score import KeyNorm
    >>> word = Reread(13, KeyNorm(), Budget(0.25))
    >>> word.after(32), word.most(100), word.most(3)
    (13, 25, 1)
    """

    layer: int | float
    score: Score
    budget: Any
    newest: int = dataclasses.field(default=1, kw_only=True)
    reads = "Only some tokens of the prompt are read to the end."

    @property
    def requires(self) -> Reasons:
        return {Fact.STORED_KEYS: "chooses tokens by stored keys"} if self.looks else {}

    @property
    def breaks(self) -> Reasons:
        return {Fact.WHOLE_PROMPTS: "leaves tokens out before a prompt is read"}

    def __post_init__(self):
        check_chooser("Reread", self.layer, self.score)

    @property
    def needs(self) -> frozenset[Observation]:
        """The observations by which tokens are selected."""
        return self.score.needs

    @property
    def looks(self) -> bool:
        """Whether the score reads keys or values."""
        return self.score.looks

    def after(self, layers: int) -> int:
        """Return the number of the layer that selects, in a model of `layers` layers."""
        return number_of(self.layer, layers)

    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, Reread], ...]:
        """Return (layer, selector) pairs: after which layers tokens are selected, and by which word."""
        return ((self.after(layers), self),)

    def most(self, tokens: int) -> int:
        """How many of `tokens` new tokens are read."""
        return min(tokens, self.budget.capacity(tokens))

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the same for every row."""
        return jnp.minimum(tokens, self.budget.count(tokens))

    def choose(self, view: View, seen: Observed) -> tuple[Int[Array, "B M"], Bool[Array, "B M"]]:
        """Return the new tokens that are read, in order, and which of the M entries are in use."""
        return choose_tokens(self.score, view, seen, self.newest, self.most(view.pos.shape[2]))
