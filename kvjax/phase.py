"""Phases: what position keys and queries turn by.

A slot keeps the position of its token, which decides causality, windows and `kept_positions`. A phase says by
which integers a key and a query turn where they meet. What it says may change while a token stays, so keys
then lie in the cache as they were before their rotation, and turn when they are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


class Turn(NamedTuple):
    """What queries and keys turn by, for pairs of them that are some number of tokens apart.

    keys: one array for each set of keys. behind: how many tokens a key lies behind a query at least. reach:
    at how many distances from there on, which are all further ones where it is None.
    """

    queries: Int[Array, "B #K T"]
    keys: tuple[Int[Array, "B #K _"], ...]
    behind: int = 0
    reach: int | None = None

    def window(self, window: int | None) -> int | None:
        """The window of a layer's queries, seen from `behind`; nothing is visible where it is not above 0."""
        left = None if window is None else window - self.behind
        return left if self.reach is None else self.reach if left is None else min(left, self.reach)


@runtime_checkable
class Phase(Protocol):
    """A frozen word that says what keys and queries turn by; what others ask of it is what it can do.

    steady: a key always turns by its own position, so it is stored turned. alike: a key turns alike for all
    queries that it meets at once. first_alike: a prompt over no cache is read as if all turned by position.
    name: what layouts call it. counts: what `most_behind` counts.
    """

    @property
    def steady(self) -> bool: ...

    @property
    def alike(self) -> bool: ...

    @property
    def first_alike(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def counts(self) -> str: ...

    def turns(self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]) -> tuple[Turn, ...]:
        """By what queries and all slots that they may see turn; exactly one `Turn` for a single query.

        q_pos: positions of the queries, -1 on padding. sets: those of the slots, -1 where one is empty. Among
        many queries, the last set is new tokens in a row, and where it is the only one, there were none
        before. Turns do not overlap: every pair of a query and a slot that it sees belongs to one.
        """
        ...

    def most_behind(self, slots: int) -> int:
        """How large phases of a past of at most `slots` slots are, counted from 1: new tokens follow them."""
        ...

    def bounded(self, positions: int) -> bool:
        """Whether phases stay within `positions` as long as slots do, however long the text grows."""
        ...


@dataclasses.dataclass(frozen=True)
class ByPosition:
    """The position of the token in its text: what a model was trained to do."""

    steady = True
    alike = True
    first_alike = True
    name = "position"
    counts = "tokens"

    def turns(self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]) -> tuple[Turn, ...]:
        """Their positions."""
        return (Turn(q_pos[:, None], tuple(sets)),)

    def most_behind(self, slots: int) -> int:
        return 2**30

    def bounded(self, positions: int) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class ByRank:
    """How many live slots of the same list are older (StreamingLLM, arXiv:2309.17453, section 3.2).

    Where slots leave at the end of prompts or chunks, this is what FINCH (arXiv:2408.00167) and InfiniPot
    (arXiv:2410.01518) do: kept keys are rotated anew to positions 0 to n - 1, and the next tokens follow at
    n. A rank is that number, and turning unrotated keys by it is rotating them anew, without the rounding.
    """

    steady = False
    alike = True
    first_alike = True
    name = "rank"
    counts = "slots"

    def turns(self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]) -> tuple[Turn, ...]:
        """The ranks of slots, and of queries as if each stood in a list of its own."""
        lists = max(pos.shape[1] for pos in sets)
        each = [jnp.broadcast_to(pos, (pos.shape[0], lists, pos.shape[2])) for pos in sets]
        held = jnp.concatenate(each, -1) if lists > 1 or len(sets) > 1 else each[0]
        asked = jnp.broadcast_to(q_pos[:, None], (q_pos.shape[0], lists, q_pos.shape[1]))
        queries, *keys = older(held, asked, *each)
        return (Turn(queries, tuple(keys)),)

    def most_behind(self, slots: int) -> int:
        return slots

    def bounded(self, positions: int) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Clamped:
    """Distances of more than `distance` tokens count as that many (LM-Infinite, arXiv:2308.16137, section 4).

    The logit of query i and key j is q_i R(min(i - j, distance)) k_j. Near pairs turn by their positions,
    counted from shortly before the first query so that they stay small; of the others, all queries turn by
    `distance`, and all keys by 0.
    """

    distance: int

    steady = False
    alike = False
    first_alike = False
    name = "clamped distance"
    counts = "tokens"

    def __post_init__(self):
        if isinstance(self.distance, bool) or not isinstance(self.distance, int) or self.distance < 1:
            raise ValueError(
                f"the largest distance must be a whole number of tokens >= 1, got {self.distance!r}"
            )

    def turns(self, q_pos: Int[Array, "B T"], sets: Sequence[Int[Array, "B #K _"]]) -> tuple[Turn, ...]:
        """One for near and one for far pairs; a single query sees all keys in one."""
        most, new = self.distance, q_pos.shape[1]
        if new == 1:
            keys = [jnp.clip(pos - q_pos[:, None] + most, 0, most) for pos in sets]
            return (Turn(jnp.full_like(q_pos[:, None], most), tuple(keys)),)
        if len(sets) == 1 and sets[0].shape[-1] <= most + 1:
            return (Turn(q_pos[:, None], tuple(sets)),)
        start = (q_pos[:, :1] - most)[:, None] if len(sets) > 1 else 0
        keys = [jnp.maximum(pos - start, 0) for pos in sets]
        near = Turn(q_pos[:, None] - start, tuple(keys), reach=most + 1)
        zeros = tuple(jnp.zeros_like(pos) for pos in sets)
        return near, Turn(jnp.full_like(q_pos[:, None], most), zeros, behind=most + 1)

    def most_behind(self, slots: int) -> int:
        return self.distance

    def bounded(self, positions: int) -> bool:
        return self.distance < positions


BY_POSITION = ByPosition()


def older(held: Int[Array, "B K S"], *asked: Int[Array, "B K _"]) -> tuple[Int[Array, "B K _"], ...]:
    """How many live slots of a list (`held`, -1 = empty) stand before each of the positions `asked`.

    >>> held = jnp.asarray([[[7, -1, 2, 4]]])
    >>> [x.tolist() for x in older(held, held, jnp.asarray([[[5]]]))]
    [[[[2, 0, 0, 1]]], [[[2]]]]
    """
    ordered = jnp.sort(jnp.where(held < 0, jnp.iinfo(jnp.int32).max, held), axis=-1)

    def count(ordered: Int[Array, "S"], one: Int[Array, "X"]) -> Int[Array, "X"]:
        return jnp.searchsorted(ordered, one).astype(jnp.int32)

    return tuple(jax.vmap(jax.vmap(count))(ordered, one) for one in asked)
