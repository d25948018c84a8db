"""KVzip+ and KVgrad: attention from a repeated context, times the slot's output and a weight per query."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.probe import SENSITIVITY, Probe, RepeatContext
from kvjax.keep.scores.score import STRIP, output_norms, probabilities
from kvjax.ops.attention.union import Keys, logits


@dataclasses.dataclass(frozen=True)
class QueriesWithNorms(Observation):
    """All new queries, rotated, [B, N, T, H], their positions and the norms of their inputs [B, T]."""

    def __call__(
        self, inputs: Inputs
    ) -> tuple[Float[Array, "B N T H"], Int[Array, "B T"], Float[Array, "B T"]]:
        square = jnp.square(inputs.hidden.astype(jnp.float32)).sum(-1)
        return inputs.q, inputs.pos, jnp.sqrt(jnp.maximum(square, 1e-24))


class Repeated(NamedTuple):
    """Recorded while a context is read a second time: queries, positions, a weight per query, and keys."""

    q: Float[Array, "*layers B N P H"]
    q_pos: Int[Array, "*layers B P"]
    weight: Float[Array, "*layers B P"]
    k: Float[Array, "*layers B K P H"]


@dataclasses.dataclass(frozen=True)
class RepeatWithNorms(RepeatContext):
    """KVzip's probe (`RepeatContext`) that records all queries, and the norms of their inputs.

    A query's weight is 1 / ||h_i||, with h_i the layer's input there (KVzip+, arXiv:2601.07891, section 3).
    """

    keys = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({QueriesWithNorms()})

    def seen(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Repeated:
        """Return the queries, their weights, and the probe's own keys."""
        assert keys is not None
        q, q_pos, size = observed[key_of(QueriesWithNorms())]
        return Repeated(q, q_pos, 1 / size, keys)


@dataclasses.dataclass(frozen=True)
class RepeatWithGradients(RepeatWithNorms):
    """KVzip's probe that records all queries, and the gradient with respect to each of them.

    A query's weight is |d phi / d a_i|, where a_i is the hidden state after the layer's attention and
    phi = sum_i |h_i|^2 over the probe's last hidden states (KVgrad, openreview.net/forum?id=cg1wTCJjjk).
    """

    sensitivity = True

    def seen(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Repeated:
        """Return the queries, their weights, and the probe's own keys."""
        return super().seen(received, observed, keys)._replace(weight=observed[SENSITIVITY])


@dataclasses.dataclass(frozen=True)
class WeightedProbeAttention(Word):
    """score[j] = max_i w_i p_ij ||W_O' v_j|| over a probe's queries i and the heads of a group.

    The probe gives the weights w. W_O are the rows of the query's head, and the softmax of p runs over the
    slots and the tokens of the probe.
    """

    probe: Probe
    weights = True

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        asked: Repeated = seen.observed[key_of(self.probe)]
        slots, spec, many = view.pos.shape[-1], seen.attention, asked.q_pos.shape[1]
        strip = min(STRIP // 2, many)
        sets = (
            Keys(view.k, view.v, view.pos, view.bias),
            Keys(asked.k, asked.k, asked.q_pos[:, None]),
        )
        pad = [(0, 0), (0, -many % strip)]
        q_pos = jnp.pad(asked.q_pos, pad, constant_values=-1)
        weight = jnp.pad(asked.weight, pad)
        q = jnp.pad(asked.q, [(0, 0), *pad, (0, 0)])

        def more(i: int | Array, best: Float[Array, "B K G S"]) -> Float[Array, "B K G S"]:
            """Take the largest so far, including one more strip of queries."""
            mine = jax.lax.dynamic_slice_in_dim(q, i * strip, strip, 2)
            at, by = (jax.lax.dynamic_slice_in_dim(x, i * strip, strip, 1) for x in (q_pos, weight))
            s = [logits(mine, x, at, scale=spec.scale, softcap=spec.softcap) for x in sets]
            p = probabilities(jnp.concatenate(s, -1))[..., :slots]
            return jnp.maximum(best, (p * by[:, None, None, :, None]).max(3))

        b, heads, _ = view.pos.shape
        best = jnp.zeros((b, heads, q.shape[1] // heads, slots), jnp.float32)
        best = jax.lax.fori_loop(0, q.shape[2] // strip, more, best)
        return (best * output_norms(view, seen, order=2)).max(2)
