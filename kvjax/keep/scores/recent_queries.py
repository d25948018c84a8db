"""Scores by the attention of the newest queries alone, recomputed after every token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import attention_to_older, probabilities, window_logits
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class FusedAttention(Word):
    """score[j] = fuse_i softmax_j(sum_g q_gi k_j / sqrt(H)) over the last queries i (arXiv:2503.00979).

    The softmax runs over the tokens before the window, whose own slots score 0 (protect them). The logits of
    a group's query heads g are summed before the softmax. fusion: "sum" or "max" over the last `last`
    queries.
    """

    last: int
    fusion: str = "sum"

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        older = view.pos < (seen.length - self.last)[:, None, None]
        s = window_logits(view, seen, self.last).sum(2)
        p = probabilities(jnp.where(older[:, :, None], s, -jnp.inf))
        return p.sum(2) if self.fusion == "sum" else p.max(2)


@dataclasses.dataclass(frozen=True)
class Votes(Word):
    """score[j] = max_i t_i p_ij over the last `last` queries i and the heads of a group (arXiv:2404.15949).

    t_i is the number of tokens up to query i, so a score of at least 1 means that one of these queries gave
    slot j at least an even share. The `newest` tokens score infinity. All but the n best slots of a head
    score -1.
    """

    last: int
    newest: int
    bounded = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        _, q_pos = seen.of(Queries(self.last))
        t = (q_pos + 1).astype(jnp.float32)[:, None, None, :, None]
        share = (probabilities(window_logits(view, seen, self.last)) * t).max((2, 3))
        share = jnp.where(view.pos >= (seen.length - self.newest)[:, None, None], jnp.inf, share)
        share = jnp.where(view.pos < 0, -jnp.inf, share)
        return jnp.where(ranks(share) < seen.n[:, None, None], share, -1.0)


@dataclasses.dataclass(frozen=True)
class Neglect(Word):
    """score[j] = -(how many of the last `last` queries i that see j gave it p_ij < 1 / t_i).

    t_i is the number of tokens up to query i, so 1 / t_i is an even share; averaged over a group's heads
    (Scissorhands, arXiv:2305.17118).
    """

    last: int

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        _, q_pos = seen.of(Queries(self.last))
        p = probabilities(window_logits(view, seen, self.last))
        share = 1 / jnp.maximum(q_pos + 1, 1).astype(jnp.float32)[:, None, None, :, None]
        sees = (view.pos[:, :, None] <= q_pos[:, None, :, None])[:, :, None]
        return -((p < share) & sees).astype(jnp.float32).sum(3).mean(2)


@dataclasses.dataclass(frozen=True)
class RecencyWeighted(Word):
    """score[j] = mean_i w_i p_ij over the last `last` queries i and all heads of a layer (arXiv:2405.12532).

    w rises linearly from 1 for the oldest of these queries to `most` for the newest. The window's own slots
    score 0 (protect them).
    """

    last: int
    most: float = 1.2

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        _, q_pos = seen.of(Queries(self.last))
        weight = jnp.linspace(1.0, self.most, self.last, dtype=jnp.float32).reshape(1, 1, 1, -1, 1)
        p = attention_to_older(view, seen, self.last) * weight
        count = jnp.maximum((q_pos >= 0).sum(-1), 1).astype(p.dtype)[:, None, None]
        score = p.mean(2).sum(2).mean(1, keepdims=True) / count
        return jnp.broadcast_to(score, view.pos.shape)
