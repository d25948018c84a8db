"""Separate budgets for tokens read in prompts and for tokens generated after them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Inputs, Observed, Score, Trace, View
from kvjax.keep.algebra import Made
from kvjax.keep.select import ranks

# Larger than any attention: a slot with this score is evicted only if no other slot can be.
_STAYS = 1e6


@dataclasses.dataclass(frozen=True)
class IsGenerated(Trace):
    """1 for a token that was appended by a decode step, 0 for a token that was read in a prompt."""

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.full((b, heads, t), float(t == 1), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old


@dataclasses.dataclass(frozen=True)
class PromptAndGenerated(Made):
    """Prompt tokens keep their own share of the budget n; generated tokens are evicted among themselves.

    At the end of a prompt, floor((1 - written) * n) prompt tokens stay: the newest `newest` ones and the best
    by `prompt`. Others score -inf. Generated tokens score `later`, and decode steps evict them before any
    prompt token.
    """

    prompt: Score
    later: Score
    written: float
    newest: int

    @property
    def traces(self) -> frozenset[Trace]:
        return super().traces | {IsGenerated()}

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        written, later = view.of(IsGenerated()) > 0, scored(self.later, view, seen)
        if seen.query is not None:
            return jnp.where(written, later, _STAYS)
        read = (view.pos >= 0) & ~written
        first = jnp.where(read, scored(self.prompt, view, seen), -jnp.inf)
        first = jnp.where(view.pos >= (seen.length - self.newest)[:, None, None], jnp.inf, first)
        share = seen.n * (1000 - round(self.written * 1000)) // 1000
        stays = jnp.where(ranks(first) < share[:, None, None], _STAYS, -jnp.inf)
        return jnp.where(written, later, stays)
