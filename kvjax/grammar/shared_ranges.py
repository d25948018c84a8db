"""Contexts that share a range of positions: the phase of APE and HOMER."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar.phase import PairRotation, PairRule, Phase

# The name in a cache's `rows` of where every row's contexts start, int32[Lg, B, C + 1].
STARTS = "context starts"


class _Ranges(NamedTuple):
    """Where contexts start, and how they are attended to.

    starts: the first token of each context and of the text after them, for all rows or [B]. together: how
    many neighbours see each other. spacing: larger than any context.
    """

    starts: Sequence[int | Int[Array, "B"]]
    together: int
    temperature: float
    scale: float
    spacing: int

    @property
    def contexts(self) -> int:
        return len(self.starts) - 1

    def number(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Tell which part of the text a position is in: 0 for the prefix, 1 for the first context, ..."""
        return sum(((pos >= _by_row(start, pos)).astype(jnp.int32) for start in self.starts), 0 * pos)

    def block(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Return the same, with contexts that see each other counted as one."""
        starts = (*self.starts[: -1 : self.together], self.starts[-1])
        return self._replace(starts=starts).number(pos)

    def phase(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Return the integers by which tokens at these positions are rotated; 0 for empty slots."""
        moved, longest = pos, 0
        for start, end in itertools.pairwise(self.starts):
            # What comes after a context starts where the context did.
            moved = moved - jnp.where(pos >= _by_row(end, pos), _by_row(end - start, pos), 0)
            longest = jnp.maximum(longest, end - start)
        after = pos >= _by_row(self.starts[-1], pos)
        return jnp.maximum(moved + jnp.where(after, _by_row(longest, pos), 0), 0)

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """Rotations for text outside contexts, for a context's own tokens, and for contexts seen later."""
        last = -(-self.contexts // self.together)
        mine, ones = self.block(q_pos), jnp.ones(q_pos.shape, jnp.float32)
        whose = [self.block(pos) for pos in sets]
        inside = [(n > 0) & (n <= last) for n in whose]
        later = mine > last
        sharpness = jnp.where(later, 1 / self.temperature, ones)
        weight = jnp.where(later, self.scale * self.temperature, ones)
        queries, keys = self.phase(q_pos)[:, None], tuple(self.phase(pos) for pos in sets)

        def turn(
            asking: Array, held: Sequence[Array], *weighs: Float[Array, "B T"], reach: int | None = None
        ) -> PairRotation:
            return PairRotation(queries, keys, reach=reach, rule=PairRule(asking, tuple(held), *weighs))

        rest = turn(q_pos, [_shown(pos, ~one) for pos, one in zip(sets, inside, strict=True)], ones, ones)
        if q_pos.shape[1] == 1:
            met = [
                one & (later[:, None] | (mine[:, None] == n)) for one, n in zip(inside, whose, strict=True)
            ]
            held = [_shown(pos, one) for pos, one in zip(sets, met, strict=True)]
            return rest, turn(q_pos, held, sharpness, weight)
        # Contexts are placed further apart than any two tokens of one context, so that a window separates
        # them.
        apart, within = self.spacing, (mine > 0) & ~later
        spread = [_shown(pos + n * apart, one) for pos, n, one in zip(sets, whose, inside, strict=True)]
        own = turn(_shown(q_pos + mine * apart, within), spread, ones, ones, reach=apart)
        held = [_shown(pos, one) for pos, one in zip(sets, inside, strict=True)]
        return rest, own, turn(_shown(q_pos, later), held, sharpness, weight)


def _by_row(x: int | Int[Array, "*_"], pos: Int[Array, "*b"]) -> int | Array:
    """Return a number, or one for each row of `pos`."""
    return x if isinstance(x, int) or not x.ndim else x.reshape(-1, *(1,) * (pos.ndim - 1))


def _shown(pos: Int[Array, "*b"], there: Array) -> Int[Array, "*b"]:
    return jnp.where(there, pos, -1)


@dataclasses.dataclass(frozen=True)
class SharedRanges(Phase):
    """Contexts after a prefix that start at one position and do not see each other (arXiv:2502.05431).

    This is APE. The first `prefix` tokens are followed by contexts of `contexts` tokens each, then by the
    rest of the text. Every context is rotated by the positions right after the prefix, and the rest by those
    after the longest context. A token of a context sees the prefix and its own context. A later token sees
    everything: with l_C the log-sum-exp of its logits over all contexts, divided by `temperature`, and l_R
    that of the others,
        o = (exp(S T l_C) o_C + exp(l_R) o_R) / (exp(S T l_C) + exp(l_R)),
    where T is `temperature`, S is `scale`, and o_C and o_R are attention over these tokens alone. If
    `contexts` is (), every row has its own (`kvjax.parallel_contexts`). together: how many neighbouring
    contexts see each other (HOMER, arXiv:2404.10308); if that is all of them and both numbers are 1, tokens
    attend to all earlier ones as usual.

    >>> SharedRanges(1, (2, 3), 1.0, 1.0).phase(jnp.arange(8)).tolist()
    [0, 1, 2, 1, 2, 3, 4, 5]
    """

    prefix: int
    contexts: tuple[int, ...]
    temperature: float
    scale: float
    together: int = 1

    name = "shared ranges"
    counts = "tokens"

    def __post_init__(self):
        if min(self.contexts, default=1) < 1 or self.prefix < 0:
            raise ValueError(
                f"a prefix of {self.prefix} tokens and contexts of {self.contexts} were given, expected "
                "contexts of one token or more each, and a prefix of 0 or more"
            )
        if self.temperature <= 0 or self.scale <= 0:
            raise ValueError(
                f"temperature is {self.temperature} and scale is {self.scale}, expected numbers above 0"
            )

    @property
    def one_turn(self) -> bool:
        """Whether contexts have the weight of other tokens and see each other."""
        return self.temperature == self.scale == 1 and 0 < len(self.contexts) <= self.together

    @property
    def shared(self) -> int:
        """By how much the number of tokens of a text exceeds the number of its positions."""
        return sum(self.contexts) - max(self.contexts, default=0)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each context, and of the text after them."""
        return tuple(itertools.accumulate(self.contexts, initial=self.prefix))

    def _ranges(self, starts: Int[Array, "B _"] | None = None) -> _Ranges:
        """Return the ranges of all rows, or of rows with contexts of their own."""
        how = self.together, self.temperature, self.scale
        if starts is not None:
            columns = jnp.moveaxis(starts, 1, 0)
            # Positions that are spaced like this stay below 2^30.
            return _Ranges([*columns], *how, 2**29 // len(columns))
        if not self.contexts:
            raise InputError(
                "every row of this method has contexts of its own, and the cache does not say which: give "
                "cache=kvjax.parallel_contexts(model, lengths, method=...), or contexts= to the method"
            )
        blocks = (*self.starts[:: self.together], self.starts[-1])
        return _Ranges(self.starts, *how, max(b - a for a, b in itertools.pairwise(blocks)))

    def number(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Tell which part of the text a position is in: 0 for the prefix, 1 for the first context, ..."""
        return self._ranges().number(pos)

    def phase(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Return the integers by which tokens at these positions are rotated; 0 for empty slots."""
        return self._ranges().phase(pos)

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """Rotations for text outside contexts, for a context's own tokens, and for contexts seen later.

        A single query needs only one of these kinds, and has the last two in one rotation.
        """
        if self.one_turn:
            return (PairRotation(self.phase(q_pos)[:, None], tuple(self.phase(pos) for pos in sets)),)
        return self._ranges().turns(q_pos, sets)

    def turns_of_rows(
        self,
        starts: Int[Array, "B _"],
        q_pos: Int[Array, "B T"],
        sets: Sequence[Int[Array, "B #K _"]],
    ) -> tuple[PairRotation, ...]:
        """Return the same for rows whose contexts start at `starts`."""
        return self._ranges(starts).turns(q_pos, sets)

    def largest_rotation(self, slots: int) -> int:
        return 2**30

    def bounded(self, positions: int) -> bool:
        return False
