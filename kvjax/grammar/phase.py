"""Phases: the integers by which keys and queries are rotated.

A slot keeps the position of its token, which decides causality, windows and `kept_positions`. A phase says by
which integers a key and a query are rotated when the query attends to the key. If these may change while a
token stays in the cache, keys are stored before rotation, and rotated when they are read.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.kind import Kind


class PairRule(NamedTuple):
    """Which queries attend to which keys, if distances do not say so, and with what weight.

    queries, keys: positions for causal order and windows, -1 for no attention at all. sharpness:
    multiplies logits. weight: multiplies the log of the sum of exponentials with which this part of the union
    is merged with the others.
    """

    queries: Int[Array, "B T"]
    keys: tuple[Int[Array, "B #K _"], ...]
    sharpness: Float[Array, "B T"]
    weight: Float[Array, "B T"]


class PairRotation(NamedTuple):
    """How queries and keys are rotated, for pairs within a range of distances.

    queries, keys: the integers of the rotation; one array for each set of keys. behind: the smallest distance
    from a query back to a key. reach: how many distances from there on; None for all larger ones. rule:
    which pairs these are, if that is not a matter of distance.
    """

    queries: Int[Array, "B #K T"]
    keys: tuple[Int[Array, "B #K _"], ...]
    behind: int = 0
    reach: int | None = None
    rule: PairRule | None = None

    def window(self, window: int | None) -> int | None:
        """A layer's window, counted from distance `behind`; nothing is visible if it is not above 0."""
        left = None if window is None else window - self.behind
        return left if self.reach is None else self.reach if left is None else min(left, self.reach)


class Phase(Kind):
    """The base class of rules for rotating keys and queries; other code uses its properties, never its type.

    `steady`: a key is always rotated by its own position, so it is stored rotated. `alike`: a key is rotated
    the same way for all queries that attend to it at once. `first_alike`: a prompt over no cache is read as
    if all were rotated by position. `name`: what layouts call it. `counts`: what `most_behind` counts.
    `one_turn`: a single query attends to all slots under one rotation. `shared`: by how much a text's tokens
    exceed its positions.

    >>> isinstance(ByRank(), Phase)
    True
    """

    name: str
    counts: str
    steady: bool = False
    alike: bool = False
    first_alike: bool = False
    one_turn: bool = False
    shared: int = 0

    @abstractmethod
    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """The rotations of queries and of all slots that they may see.

        q_pos: positions of the queries, -1 on padding. sets: positions of the slots, -1 for empty ones. With
        many queries, the last set holds consecutive new tokens; if it is the only set, there were none
        before. Rotations do not overlap: every pair of a query and a slot that it sees belongs to one. A
        single query has one `PairRotation`, or several that differ in their `rule` alone; in the first
        one, sharpness and weight are 1.
        """
        raise NotImplementedError

    @abstractmethod
    def most_behind(self, slots: int) -> int:
        """The largest integer of a past with at most `slots` slots, from 1; new tokens get later ones."""
        raise NotImplementedError

    @abstractmethod
    def bounded(self, positions: int) -> bool:
        """Whether the integers stay within `positions` as long as the slots do, for texts of any length."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ByPosition(Phase):
    """Rotation by the position of the token in its text, as in training.

    >>> ByPosition().steady
    True
    """

    steady = True
    alike = True
    first_alike = True
    name = "position"
    counts = "tokens"

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """Rotation by their positions."""
        return (PairRotation(q_pos[:, None], tuple(sets)),)

    def most_behind(self, slots: int) -> int:
        return 2**30

    def bounded(self, positions: int) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class ByRank(Phase):
    """Rotation by rank, the number of older live slots in the KV head (StreamingLLM, arXiv:2309.17453, 3.2).

    If slots are evicted at the end of prompts or chunks, this is what FINCH (arXiv:2408.00167) and InfiniPot
    (arXiv:2410.01518) do: kept keys are rotated anew to positions 0 to n - 1, and the next tokens follow at
    n. Here keys are stored unrotated, so there is no rounding error of a second rotation.

    >>> ByRank().steady
    False
    """

    one_turn = True
    alike = True
    first_alike = True
    name = "rank"
    counts = "slots"

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """The ranks of slots, and of queries as if each was appended to the slots alone."""
        lists = max(pos.shape[1] for pos in sets)
        each = [jnp.broadcast_to(pos, (pos.shape[0], lists, pos.shape[2])) for pos in sets]
        held = jnp.concatenate(each, -1) if lists > 1 or len(sets) > 1 else each[0]
        asked = jnp.broadcast_to(q_pos[:, None], (q_pos.shape[0], lists, q_pos.shape[1]))
        queries, *keys = older(held, asked, *each)
        return (PairRotation(queries, tuple(keys)),)

    def most_behind(self, slots: int) -> int:
        return slots

    def bounded(self, positions: int) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Clamped(Phase):
    """Rotation with distances clamped to `distance` tokens (LM-Infinite, arXiv:2308.16137, section 4).

    The logit of query i and key j is q_i R(min(i - j, distance)) k_j. Near pairs are rotated by their
    positions, counted from shortly before the first query so that they stay small; for the others, all
    queries are rotated by `distance`, and all keys by 0.

    Args:
        distance: in tokens.

    >>> Clamped(4096).steady
    False
    """

    distance: int

    one_turn = True
    name = "clamped distance"
    counts = "tokens"

    def __post_init__(self):
        if isinstance(self.distance, bool) or not isinstance(self.distance, int) or self.distance < 1:
            raise ValueError(
                f"the largest distance must be a whole number of tokens >= 1, got {self.distance!r}"
            )

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """One rotation for near and one for far pairs; a single query attends to all keys under one."""
        most, new = self.distance, q_pos.shape[1]
        if new == 1:
            keys = [jnp.clip(pos - q_pos[:, None] + most, 0, most) for pos in sets]
            return (PairRotation(jnp.full_like(q_pos[:, None], most), tuple(keys)),)
        if len(sets) == 1 and sets[0].shape[-1] <= most + 1:
            return (PairRotation(q_pos[:, None], tuple(sets)),)
        start = (q_pos[:, :1] - most)[:, None] if len(sets) > 1 else 0
        keys = [jnp.maximum(pos - start, 0) for pos in sets]
        near = PairRotation(q_pos[:, None] - start, tuple(keys), reach=most + 1)
        zeros = tuple(jnp.zeros_like(pos) for pos in sets)
        return near, PairRotation(jnp.full_like(q_pos[:, None], most), zeros, behind=most + 1)

    def most_behind(self, slots: int) -> int:
        return self.distance

    def bounded(self, positions: int) -> bool:
        return self.distance < positions


@dataclasses.dataclass(frozen=True)
class SharedRanges(Phase):
    """Contexts after a prefix that start at one position and do not see each other (arXiv:2502.05431).

    This is APE. The first `prefix` tokens are followed by contexts of `contexts` tokens each, then by the
    rest of the text. Every context is rotated by the positions right after the prefix, and the rest by those
    after the longest context. A token of a context sees the prefix and its own context. A later token sees
    everything: with l_C the log-sum-exp of its logits over all contexts, divided by `temperature`, and l_R
    that of the others,
        o = (exp(S T l_C) o_C + exp(l_R) o_R) / (exp(S T l_C) + exp(l_R)),
    where T is `temperature`, S is `scale`, and o_C and o_R are attention over these tokens alone. together:
    how many neighbouring contexts see each other (HOMER, arXiv:2404.10308); if that is all of them and both
    numbers are 1, tokens attend to all earlier ones as usual.

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
        if not self.contexts or min(self.contexts) < 1 or self.prefix < 0:
            raise ValueError(
                f"a prefix of {self.prefix} tokens and contexts of {self.contexts} were given, expected at "
                "least one context, of one token or more each, and a prefix of 0 or more"
            )
        if self.temperature <= 0 or self.scale <= 0:
            raise ValueError(
                f"temperature is {self.temperature} and scale is {self.scale}, expected numbers above 0"
            )

    @property
    def one_turn(self) -> bool:
        """Whether contexts have the weight of other tokens and see each other."""
        return self.temperature == self.scale == 1 and self.together >= len(self.contexts)

    @property
    def shared(self) -> int:
        """By how much the number of tokens of a text exceeds the number of its positions."""
        return sum(self.contexts) - max(self.contexts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each context, and of the text after them."""
        return tuple(itertools.accumulate(self.contexts, initial=self.prefix))

    def number(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The part of the text that a position is in: 0 for the prefix, 1 for the first context, ..."""
        return sum(((pos >= start).astype(jnp.int32) for start in self.starts), jnp.zeros_like(pos))

    def _block(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The same, with contexts that see each other counted as one."""
        starts = (*self.starts[: -1 : self.together], self.starts[-1])
        return sum(((pos >= start).astype(jnp.int32) for start in starts), jnp.zeros_like(pos))

    def phase(self, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The integers by which tokens at these positions are rotated; 0 for empty slots."""
        jumps = [0, *(-length for length in self.contexts[:-1]), max(self.contexts) - self.contexts[-1]]
        moved = pos
        for start, jump in zip(self.starts, jumps, strict=True):
            moved = moved + jnp.where(pos >= start, jump, 0)
        return jnp.maximum(moved, 0)

    def turns(
        self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]
    ) -> tuple[PairRotation, ...]:
        """Rotations for text outside contexts, for a context's own tokens, and for contexts seen later.

        A single query needs only one of these kinds, and has the last two in one rotation.
        """
        if self.one_turn:
            return (PairRotation(self.phase(q_pos)[:, None], tuple(self.phase(pos) for pos in sets)),)
        last = -(-len(self.contexts) // self.together)
        mine, ones = self._block(q_pos), jnp.ones(q_pos.shape, jnp.float32)
        whose = [self._block(pos) for pos in sets]
        inside = [(n > 0) & (n <= last) for n in whose]
        behind = mine > last
        sharpness = jnp.where(behind, 1 / self.temperature, ones)
        weight = jnp.where(behind, self.scale * self.temperature, ones)
        queries, keys = self.phase(q_pos)[:, None], tuple(self.phase(pos) for pos in sets)

        def turn(
            asking: Array, held: Sequence[Array], *weighs: Array, reach: int | None = None
        ) -> PairRotation:
            return PairRotation(queries, keys, reach=reach, rule=PairRule(asking, tuple(held), *weighs))

        def shown(pos: Array, there: Array) -> Array:
            return jnp.where(there, pos, -1)

        rest = turn(q_pos, [shown(pos, ~one) for pos, one in zip(sets, inside, strict=True)], ones, ones)
        if q_pos.shape[1] == 1:
            met = [
                one & (behind[:, None] | (mine[:, None] == n)) for one, n in zip(inside, whose, strict=True)
            ]
            held = [shown(pos, one) for pos, one in zip(sets, met, strict=True)]
            return rest, turn(q_pos, held, sharpness, weight)
        # Contexts are placed further apart than any two tokens of one context, so that a window separates
        # them.
        apart, starts = sum(self.contexts), (*self.starts[:: self.together], self.starts[-1])
        reach = max(b - a for a, b in itertools.pairwise(starts))
        within = (mine > 0) & ~behind
        spread = [shown(pos + n * apart, one) for pos, n, one in zip(sets, whose, inside, strict=True)]
        own = turn(shown(q_pos + mine * apart, within), spread, ones, ones, reach=reach)
        held = [shown(pos, one) for pos, one in zip(sets, inside, strict=True)]
        return rest, own, turn(shown(q_pos, behind), held, sharpness, weight)

    def most_behind(self, slots: int) -> int:
        return 2**30

    def bounded(self, positions: int) -> bool:
        return False


BY_POSITION = ByPosition()


def older(held: Int[Array, "B K S"], *asked: Int[Array, "B K _"]) -> tuple[Int[Array, "B K _"], ...]:
    """How many live slots of a KV head (`held`, -1 = empty) have positions before each of `asked`.

    >>> held = jnp.asarray([[[7, -1, 2, 4]]])
    >>> [x.tolist() for x in older(held, held, jnp.asarray([[[5]]]))]
    [[[[2, 0, 0, 1]]], [[[2]]]]
    """
    ordered = jnp.sort(jnp.where(held < 0, jnp.iinfo(jnp.int32).max, held), axis=-1)

    def count(ordered: Int[Array, "S"], one: Int[Array, "X"]) -> Int[Array, "X"]:
        return jnp.searchsorted(ordered, one).astype(jnp.int32)

    return tuple(jax.vmap(jax.vmap(count))(ordered, one) for one in asked)
