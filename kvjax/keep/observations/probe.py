"""Probes: extra tokens that attend once to the uncompressed cache; their attention scores its slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass

# The key under which probes find |d phi / d a_i| of their tokens in every layer
# (`kvjax.steps.prefilling.sensitivity`).
SENSITIVITY = "sensitivity"


class Probe:
    """The base class of probes: which tokens are read after a prompt, and what is recorded for them.

    prefix: token ids of an instruction; None has the model's tokenizer encode `text`. needs: the observations
    of the probe's queries; `seen` turns them, per layer, into what scores look up by the probe's key. keys:
    whether the probe also needs the rotated keys of its own tokens. asks: whether the probe is nothing but
    its instruction, and so needs one. ahead: how many tokens the model generates greedily after the prompt
    for the probe to read. sensitivity: whether it needs the gradient of the last hidden states with respect
    to each of its tokens in every layer, which takes a backward pass.
    """

    prefix: tuple[int, ...] | None = ()
    text: str = ""
    keys: bool = False
    asks: bool = False
    ahead: int = 0
    sensitivity: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        raise NotImplementedError

    def tokens(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
    ) -> tuple[Int[Array, "B P"], Int[Array, "B"]] | None:
        """Return the probe of every row, right-padded, and its length; None if nothing needs to be read."""
        raise NotImplementedError

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Any:
        """Make what scores look up, [Lg, B, ...], of attention, observations and the probe's keys."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RepeatContext(Probe):
    """KVzip's probe (arXiv:2505.23416, section 3.1): an instruction, then the prompt once more.

    prefix holds the token ids of the instruction; None has the model's tokenizer encode `text`.
    """

    prefix: tuple[int, ...] | None = None
    text: str = "\n\nRepeat the previous context exactly."

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Mass("max")})

    def tokens(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
    ) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
        """Return the probe of every row, right-padded, and its length."""
        prefix = jnp.asarray(self.prefix or (), jnp.int32)
        head = jnp.broadcast_to(prefix[None], (tokens.shape[0], prefix.shape[0]))
        return jnp.concatenate([head, tokens], axis=1), lengths + prefix.shape[0]

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Float[Array, "Lg B K S"]:
        """Compute the largest attention that slots receive from one of its queries."""
        return received[key_of(Mass("max"))]


@dataclasses.dataclass(frozen=True)
class Catalyst(Probe):
    """An instruction alone, read after every prompt and chunk (InfiniPot, arXiv:2410.01518, section 3).

    It attends to what tasks not known yet may ask for. prefix and text: as in `RepeatContext`.
    """

    prefix: tuple[int, ...] | None = None
    text: str = "\n\nSummarize the critical points of the context."
    asks = True

    def __post_init__(self):
        if self.prefix == ():
            raise ValueError(
                "a catalyst is an instruction, got no tokens: give the token ids of one as prefix="
            )

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Mass("sum")})

    def tokens(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
    ) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
        """Return the same instruction for every row."""
        prefix = jnp.asarray(self.prefix, jnp.int32)
        asked = jnp.broadcast_to(prefix[None], (tokens.shape[0], prefix.shape[0]))
        return asked, jnp.full_like(lengths, prefix.shape[0])

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Float[Array, "Lg B K S"]:
        """Compute the sum of the attention that slots receive from all its queries."""
        return received[key_of(Mass("sum"))]


@dataclasses.dataclass(frozen=True)
class Episode(Catalyst):
    """A piece of a conversation, read after every prompt and chunk (EpiCache, arXiv:2509.17396, section 3).

    It attends most to what questions about its episode will ask for. prefix: its token ids; text: an
    instruction that replaces it if there are none.
    """

    text: str = "\n\nCollect who speaks, what happened and when, in this part of the conversation."

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Mass("max")})

    def seen(
        self, received: dict[str, Array], observed: dict[str, Any], keys: Float[Array, "Lg B K P H"] | None
    ) -> Float[Array, "Lg B K S"]:
        """Compute the largest attention that slots receive from one of its queries."""
        return received[key_of(Mass("max"))]


@dataclasses.dataclass(frozen=True)
class ProbeAttention(Word):
    """The attention that slots receive from a probe's queries, over the heads of a group.

    score[j] = max_i p_ij for `RepeatContext` and `Episode`, sum_i p_ij for `Catalyst`. The softmax of p
    runs over the slots of the cache and the tokens of the probe.
    """

    looks = False

    probe: Probe

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return seen.observed[key_of(self.probe)]
