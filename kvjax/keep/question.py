"""A question at a prompt's end, which judges all chunks that are read before it (FINCH)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.keep.algebra import Word
from kvjax.keep.observe import Queries
from kvjax.keep.probe import Probe
from kvjax.keep.score import probabilities
from kvjax.ops.attention.union import NEG_INF, Keys, logits
from kvjax.protocols import Observation, Seen, View


class Asked(NamedTuple):
    """What a question asked behind a chunk: its queries, their positions (-1: none), and its own keys."""

    q: Float[Array, "*layers B N W H"]
    q_pos: Int[Array, "*layers B W"]
    k: Float[Array, "*layers B K P H"]


@dataclasses.dataclass(frozen=True)
class Question(Probe):
    """The last `last` tokens of a prompt, read behind every chunk in which it does not end.

    A chunk is told of these tokens by the verb that reads the prompt (FINCH, arXiv:2408.00167).
    """

    last: int
    keys = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def tokens(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> None:
        """Nothing: a prompt that is read at once has the question at its end."""
        return None

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Asked:
        """The question's queries and keys."""
        assert keys is not None
        q, q_pos = observed[repr(Queries(self.last))]
        return Asked(q, q_pos, keys)


@dataclasses.dataclass(frozen=True)
class QuestionAttention(Word):
    """score[j] = mean_i n_i p_ij over the queries i of a question and the heads of a group.

    n_i is the number of visible positions before query i, and the softmax behind p_ij runs over these and
    itself: with more positions each of them gets less, which n_i makes up for (FINCH, arXiv:2408.00167). The
    question's own slots score infinity once the prompt ends with them.
    """

    probe: Question

    @property
    def needs(self) -> frozenset[Observation]:
        return self.probe.needs

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        (q, q_pos), asked = seen.of(Queries(self.probe.last)), seen.observed.get(repr(self.probe))
        slots, ends = view.pos.shape[-1], jnp.ones(seen.length.shape, bool)
        sets = [Keys(view.k, view.v, view.pos, view.bias)]
        if asked is not None:
            ends = (asked.q_pos < 0).all(-1)
            q = jnp.where(ends[:, None, None, None], q, asked.q)
            q_pos = jnp.where(ends[:, None], q_pos, asked.q_pos)
            sets.append(Keys(asked.k, asked.k, jnp.where(ends[:, None], -1, asked.q_pos)[:, None]))
        spec = seen.attention
        each = [logits(q, s, q_pos, scale=spec.scale, softcap=spec.softcap) for s in sets]
        s = jnp.concatenate(each, -1)
        before = jnp.maximum((s > NEG_INF).sum(-1, keepdims=True) - 1, 0).astype(s.dtype)
        p = (before * probabilities(s))[..., :slots]
        count = jnp.maximum((q_pos >= 0).sum(-1), 1)[:, None, None]
        score = p.sum(3).mean(2) / count.astype(p.dtype)
        own = ends[:, None, None] & (view.pos >= (seen.length - self.probe.last)[:, None, None])
        return jnp.where(own, jnp.inf, score)
