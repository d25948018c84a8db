"""Phases: the integers by which keys and queries are rotated.

A slot keeps the position of its token, which decides causality, windows and `kept_positions`. A phase says by
which integers a key and a query are rotated when the query attends to the key. If these may change while a
token stays in the cache, keys are stored before rotation, and rotated when they are read.
"""

from __future__ import annotations

import dataclasses
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

    queries, keys: the integers of the rotation; one array for each set of keys. min_distance: the smallest
    distance from a query back to a key. reach: how many distances from there on; None for all larger ones.
    rule: which pairs these are, if that is not a matter of distance.
    """

    queries: Int[Array, "B #K T"]
    keys: tuple[Int[Array, "B #K _"], ...]
    min_distance: int = 0
    reach: int | None = None
    rule: PairRule | None = None

    def window(self, window: int | None) -> int | None:
        """Count a layer's window from distance `min_distance`; nothing is visible if it is not above 0."""
        left = None if window is None else window - self.min_distance
        return left if self.reach is None else self.reach if left is None else min(left, self.reach)


class Phase(Kind):
    """The base class of rules for rotating keys and queries; other code uses its properties, never its type.

    `steady`: a key is always rotated by its own position, so it is stored rotated. `alike`: a key is rotated
    the same way for all queries that attend to it at once. `first_alike`: a prompt over no cache is read as
    if all were rotated by position. `name`: what layouts call it. `counts`: what `largest_rotation` counts.
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
        """Return the rotations of queries and of all slots that they may see.

        q_pos: positions of the queries, -1 on padding. sets: positions of the slots, -1 for empty ones. With
        many queries, the last set holds consecutive new tokens; if it is the only set, there were none
        before. Rotations do not overlap: every pair of a query and a slot that it sees belongs to one. A
        single query has one `PairRotation`, or several that differ in their `rule` alone; in the first
        one, sharpness and weight are 1.
        """
        raise NotImplementedError

    @abstractmethod
    def largest_rotation(self, slots: int) -> int:
        """Find the largest integer of a past of at most `slots` slots, from 1; new tokens get later ones."""
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

    def largest_rotation(self, slots: int) -> int:
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
        """Rank slots, and queries as if each was appended to the slots alone."""
        lists = max(pos.shape[1] for pos in sets)
        each = [jnp.broadcast_to(pos, (pos.shape[0], lists, pos.shape[2])) for pos in sets]
        held = jnp.concatenate(each, -1) if lists > 1 or len(sets) > 1 else each[0]
        asked = jnp.broadcast_to(q_pos[:, None], (q_pos.shape[0], lists, q_pos.shape[1]))
        queries, *keys = older(held, asked, *each)
        return (PairRotation(queries, tuple(keys)),)

    def largest_rotation(self, slots: int) -> int:
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
        return near, PairRotation(jnp.full_like(q_pos[:, None], most), zeros, min_distance=most + 1)

    def largest_rotation(self, slots: int) -> int:
        return self.distance

    def bounded(self, positions: int) -> bool:
        return self.distance < positions


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
