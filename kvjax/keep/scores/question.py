"""Scores by the question at the end of a prompt, asked after every chunk before it (FINCH, CItruS)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.calls import scored
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation, Observed, Score, View
from kvjax.keep.algebra import Made, Word
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.probe import Probe
from kvjax.keep.scores.score import probabilities
from kvjax.ops.attention.union import NEG_INF, Keys, logits

if TYPE_CHECKING:
    from kvjax.grammar import Keep


class QuestionQueries(NamedTuple):
    """The queries of a question read after a chunk, their positions (-1: none), and its own keys."""

    q: Float[Array, "*layers B N W H"]
    q_pos: Int[Array, "*layers B W"]
    k: Float[Array, "*layers B K P H"]


@dataclasses.dataclass(frozen=True)
class Question(Probe):
    """The last `last` tokens of a prompt, read after every chunk but the one that contains them.

    The function that reads the prompt passes these tokens to each chunk (FINCH, arXiv:2408.00167). chunks:
    a keep with which chunks attend to a cache of their own, which it compresses after each of them; None has
    chunks attend to the slots that the method keeps.
    """

    last: int
    chunks: Keep | None = None
    keys = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def tokens(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> None:
        """None: a prompt that is read in one chunk has the question at its end."""
        return None

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> QuestionQueries:
        """Return the question's queries and keys."""
        assert keys is not None
        q, q_pos = observed[key_of(Queries(self.last))]
        return QuestionQueries(q, q_pos, keys)


# The weight of a query is the number of positions it sees, itself included, minus this.
WEIGHTS = {"visible": 0, "before": 1}


@dataclasses.dataclass(frozen=True)
class QuestionAttention(Word):
    """score[j] = mean_i n_i p_ij over the queries i of a question and the heads of a group.

    n_i is the number of visible positions before query i, and the softmax of p_ij runs over these and itself:
    with more positions each of them gets less, which n_i compensates (FINCH, arXiv:2408.00167). weigh:
    "before" (n_i), "visible" (n_i + 1), or "alike" (1). heads: "mean" over a group, or "layer" for one score
    of all heads. The question's own slots score infinity once the prompt ends with them.
    """

    probe: Question
    weigh: Literal["before", "visible", "alike"] = "before"
    heads: Literal["mean", "layer"] = "mean"

    @property
    def needs(self) -> frozenset[Observation]:
        return self.probe.needs

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        (q, q_pos), asked = seen.of(Queries(self.probe.last)), seen.observed.get(key_of(self.probe))
        slots, ends = view.pos.shape[-1], _ends(self.probe, seen)
        sets = [Keys(view.k, view.v, view.pos, view.bias)]
        if asked is not None:
            q = jnp.where(ends[:, None, None, None], q, asked.q)
            q_pos = jnp.where(ends[:, None], q_pos, asked.q_pos)
            sets.append(Keys(asked.k, asked.k, jnp.where(ends[:, None], -1, asked.q_pos)[:, None]))
        spec = seen.attention
        each = [logits(q, s, q_pos, scale=spec.scale, softcap=spec.softcap) for s in sets]
        s = jnp.concatenate(each, -1)
        p = probabilities(s)[..., :slots]
        if self.weigh != "alike":
            visible = (s > NEG_INF).sum(-1, keepdims=True) - WEIGHTS[self.weigh]
            p = jnp.maximum(visible, 0).astype(s.dtype) * p
        count = jnp.maximum((q_pos >= 0).sum(-1), 1)[:, None, None]
        score = p.sum(3).mean(2) / count.astype(p.dtype)
        if self.heads == "layer":
            score = jnp.broadcast_to(score.mean(1, keepdims=True), score.shape)
        own = ends[:, None, None] & (view.pos >= (seen.length - self.probe.last)[:, None, None])
        return jnp.where(own, jnp.inf, score)


@dataclasses.dataclass(frozen=True)
class NewTokens(Observation):
    """How many tokens of every row the current chunk has."""

    def __call__(self, inputs: Inputs) -> Int[Array, "B"]:
        return (inputs.pos >= 0).sum(-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class ChunkAttention(Word):
    """The attention that slots receive from all queries of the current chunk, averaged over a layer's heads.

    score[j] = mean_h sum_i p_hij (CItruS, arXiv:2406.12018): one set of slots for all heads.
    """

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Mass("sum")})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mass = seen.of(Mass("sum"))
        return jnp.broadcast_to(mass.mean(1, keepdims=True), mass.shape)


@dataclasses.dataclass(frozen=True)
class CurrentChunkFirst(Made):
    """inf for the tokens of the current chunk while more chunks follow, `score` for all others.

    If the chunk exceeds the budget, `score` ranks all slots (CItruS, arXiv:2406.12018). probe: the question
    that is read after each chunk but the last; without one, every chunk stays.
    """

    score: Score
    probe: Question | None = None

    @property
    def parts(self) -> tuple[Score, ...]:
        return (self.score,)

    @property
    def needs(self) -> frozenset[Observation]:
        return super().needs | {NewTokens()}

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        score, new = scored(self.score, view, seen), seen.of(NewTokens())
        follows = True if self.probe is None else ~_ends(self.probe, seen)
        stays = jnp.where(follows & (new <= seen.n), new, 0)
        return jnp.where(view.pos >= (seen.length - stays)[:, None, None], jnp.inf, score)


def _ends(probe: Question, seen: Observed) -> Bool[Array, "B"]:
    """Find the rows whose prompt ends with the current chunk."""
    asked = seen.observed.get(key_of(probe))
    return jnp.ones(seen.length.shape, bool) if asked is None else (asked.q_pos < 0).all(-1)
