"""Scores of whole pages of slots, which are evicted together."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observed, Score, View
from kvjax.keep.algebra import Made


@dataclasses.dataclass(frozen=True)
class WholePages(Made):
    """The score of a slot's page when a whole page must be evicted, else the slot's own score.

    A KV head's pages are `page` slots each, in position order. A page's score is the mean over its slots and
    over all heads, which share pages. Pages that are not full, or hold one of the newest `page` tokens, score
    infinity, as those tokens do everywhere.
    """

    score: Score
    page: int

    @property
    def ordered(self) -> bool:
        return True

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = view.pos >= 0
        recent = view.pos >= (seen.length - self.page)[:, None, None]
        each = jnp.where(live, scored(self.score, view, seen), 0.0)
        pages = -(-each.shape[-1] // self.page)
        pad = ((0, 0), (0, 0), (0, pages * self.page - each.shape[-1]))
        cut = lambda x: jnp.pad(x, pad).reshape(*x.shape[:2], pages, self.page)  # noqa: E731
        mean = cut(each).mean((1, 3))
        stays = (cut(recent) | ~cut(live)).any((1, 3))
        paged = jnp.repeat(jnp.where(stays, jnp.inf, mean), self.page, axis=-1)[:, None, : each.shape[-1]]
        exactly = live.sum(-1, keepdims=True) == seen.n[:, None, None] + self.page
        return jnp.where(exactly, paged, jnp.where(recent, jnp.inf, each))
