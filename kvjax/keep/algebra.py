"""Building blocks of scores: the base class of all scores, and scores computed from other scores.

`a + b`, `a * b`, `0.1 * a`, `a >> Pool(7)`, `rank(a)`, `standardised(a)` and `stage(a, share, b)` are scores
again. A combined score needs the observations of its parts, keeps their traces, and reads keys and values
if one of them does.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.calls import scored, spared
from kvjax.grammar.kinds import Allocation, Observation, Observed, Score, Trace, View
from kvjax.keep.select import ranks, top


class Word(Score):
    """The base class of all scores, which can be added, multiplied and chained.

    >>> from kvjax.words import KeyNorm, Position
    >>> KeyNorm().looks, Position().looks
    (True, False)
    """

    def __rshift__(self, pool: Pool) -> Pooled:
        return Pooled(self, pool)

    def __add__(self, other: Score | float) -> Sum | Offset:
        return Offset(self, float(other)) if isinstance(other, int | float) else Sum(self, other)

    def __mul__(self, other: Score) -> Product:
        return Product(self, other)

    def __rmul__(self, factor: float) -> Scaled:
        return Scaled(float(factor), self)


class Made(Word):
    """The base class of scores that combine other scores, which are its fields."""

    @property
    def parts(self) -> tuple[Score, ...]:
        each = (getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return tuple(part for part in each if isinstance(part, Score))

    @property
    def looks(self) -> bool:
        return any(part.looks for part in self.parts)

    @property
    def ordered(self) -> bool:
        return any(part.ordered for part in self.parts)

    @property
    def weights(self) -> bool:
        return any(part.weights for part in self.parts)

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset().union(*(part.traces for part in self.parts))


@dataclasses.dataclass(frozen=True)
class Sum(Made):
    """a[j] + b[j], built by `a + b`."""

    a: Score
    b: Score
    infix = ("a", "+", "b")

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return scored(self.a, view, seen) + scored(self.b, view, seen)


@dataclasses.dataclass(frozen=True)
class Product(Made):
    """a[j] b[j], built by `a * b`."""

    a: Score
    b: Score
    infix = ("a", "*", "b")

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return scored(self.a, view, seen) * scored(self.b, view, seen)


@dataclasses.dataclass(frozen=True)
class Scaled(Made):
    """factor a[j], built by `factor * a`."""

    factor: float
    score: Score
    infix = ("factor", "*", "score")

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return self.factor * scored(self.score, view, seen)


@dataclasses.dataclass(frozen=True)
class Offset(Made):
    """a[j] + by, built by `a + by`."""

    score: Score
    by: float
    infix = ("score", "+", "by")

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return scored(self.score, view, seen) + self.by


@dataclasses.dataclass(frozen=True)
class Ranked(Made):
    """Minus the number of live slots of the same KV head with a higher score, built by `rank(a)`."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        score = jnp.where(view.pos < 0, -jnp.inf, scored(self.score, view, seen))
        return -ranks(score).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Standardised(Made):
    """(a[j] - mean) / std over all live slots of a row in a layer, built by `standardised(a)`."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live = view.pos >= 0
        score = jnp.where(live, scored(self.score, view, seen), 0.0)
        count = live.sum((1, 2), keepdims=True).astype(score.dtype)
        apart = jnp.where(live, score - score.sum((1, 2), keepdims=True) / jnp.maximum(count, 1), 0.0)
        variance = jnp.square(apart).sum((1, 2), keepdims=True) / jnp.maximum(count - 1, 1)
        return apart / jnp.maximum(jnp.sqrt(variance), 1e-6)


@dataclasses.dataclass(frozen=True)
class Staged(Made):
    """inf for the best slots by `first`, as many as its share of the budget; the score `rest` for others."""

    first: Score
    share: float
    rest: Score
    whole: bool = False

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return self.of_heads(view, seen, seen.n[:, None])

    def of_heads(self, view: View, seen: Observed, n: Int[Array, "B #K"]) -> Float[Array, "B K S"]:
        """Compute the score when every KV head has its own budget n."""
        stay = spared(view, seen)
        many = stay.sum(-1)
        thousandths = round(self.share * 1000)
        if self.whole:
            count = n * thousandths // 1000 - many
        else:
            count = jnp.maximum(n - many, 0) * thousandths // 1000
        # Protected slots are never counted among the best, even if smoothing gave them a score.
        first = jnp.where((view.pos < 0) | stay, -jnp.inf, scored(self.first, view, seen))
        return jnp.where(top(first, count), jnp.inf, scored(self.rest, view, seen))


@dataclasses.dataclass(frozen=True)
class StagedAcross(Made):
    """1 for the slots that the two stages choose within each KV head's budget, 0 for all others.

    `heads` divides the layer's budget among heads by the first stage's score. If a layer then keeps its K n
    best slots by this score, it keeps exactly these (CriticalKV with Ada-KV's budgets, arXiv:2502.03805).
    """

    stages: Staged
    heads: Allocation

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        stay, empty = spared(view, seen), view.pos < 0
        first = jnp.where(stay, jnp.inf, scored(self.stages.first, view, seen))
        n = self.heads.counts(jnp.where(empty, -jnp.inf, first)[None], seen.n)[0]
        score = jnp.where(stay, jnp.inf, self.stages.of_heads(view, seen, n))
        return top(jnp.where(empty, -jnp.inf, score), n).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MaxNormalised(Made):
    """a[j] / max_i a[i] over all live slots of a KV head, for non-negative scores."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        score = jnp.where(view.pos >= 0, scored(self.score, view, seen), 0.0)
        return score / jnp.maximum(score.max(-1, keepdims=True), 1e-30)


@dataclasses.dataclass(frozen=True)
class AgeDecayed(Made):
    """a[j] rate^(age / tokens), where the age of slot j is the number of newer tokens."""

    score: Score
    rate: float
    tokens: int

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        age = (seen.length[:, None, None] - 1 - view.pos).astype(jnp.float32)
        return scored(self.score, view, seen) * jnp.power(jnp.float32(self.rate), age / self.tokens)


def rank(score: Score) -> Ranked:
    """Replace a score by its rank in a KV head, so that scores of different units can be added.

    Args:
        score: a score.

    Returns:
        A score.

    >>> from kvjax.words import KeyNorm, Position
    >>> type(rank(KeyNorm()) + rank(Position())).__name__
    'Sum'
    """
    return Ranked(score)


def standardised(score: Score) -> Standardised:
    """Scale a score to mean 0 and variance 1 in every layer, so that scores of different units can be added.

    Args:
        score: a score.

    Returns:
        A score.

    >>> from kvjax.words import KeyNorm
    >>> standardised(KeyNorm()).score
    KeyNorm()
    """
    return Standardised(score)


def stage(first: Score, share: float, rest: Score, whole: bool = False) -> Staged:
    """Score in two stages: `first` selects a share of the budget, `rest` selects the remaining slots.

    Args:
        first: the score of the first stage.
        share: share of the budget, without protected slots, that the first stage selects, in [0, 1].
        rest: the score of the second stage.
        whole: True takes `share` of the whole budget, protected slots included.

    Returns:
        A score.

    Raises:
        ValueError: for a share outside of [0, 1].

    >>> from kvjax.words import KeyNorm, Position
    >>> stage(Position(), 0.5, KeyNorm()).share
    0.5
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be a part of the budget from 0 to 1, got {share!r}")
    return Staged(first, share, rest, whole)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Smoothing along the slots: "mean" or "max" over `kernel` neighbours, zeros beyond the ends.

    Args:
        kernel: an odd number of neighbours.
        kind: "mean" or "max".

    >>> from kvjax.words import KeyNorm
    >>> (KeyNorm() >> Pool(5)).pool.kernel
    5
    """

    kernel: int
    kind: str = "max"

    def __post_init__(self):
        if self.kernel < 1 or self.kernel % 2 == 0 or self.kind not in ("mean", "max"):
            raise ValueError(
                f"a pool needs an odd kernel >= 1 and kind 'mean' or 'max', got {self.kernel}, {self.kind!r}"
            )

    def __call__(self, x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
        half = self.kernel // 2
        window, pad = (1, 1, self.kernel), ((0, 0), (0, 0), (half, half))
        if self.kind == "max":
            return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, (1, 1, 1), pad)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, (1, 1, 1), pad) / self.kernel


@dataclasses.dataclass(frozen=True)
class ChunkSum(Made):
    """The sum of a score over the slots of a KV head in the same chunk of `tokens` tokens of the text."""

    score: Score
    tokens: int

    def __post_init__(self):
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"chunks need a whole number of tokens >= 1, got {self.tokens!r}")

    @property
    def ordered(self) -> bool:
        return True

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live, chunk = view.pos >= 0, view.pos // self.tokens
        score = jnp.where(live, scored(self.score, view, seen), 0.0)
        # Slots are in position order, so the slots of a chunk are contiguous.
        starts = jnp.diff(chunk, axis=-1, prepend=-1) != 0
        which = jnp.cumsum(starts, axis=-1) - 1
        add = jax.vmap(jax.vmap(lambda x, at: jnp.zeros_like(x).at[at].add(x)))
        return jnp.take_along_axis(add(score, which), which, axis=-1)


@dataclasses.dataclass(frozen=True)
class Pooled(Made):
    """A score smoothed along the slots, built by `score >> pool`."""

    score: Score
    pool: Pool
    infix = ("score", ">>", "pool")

    @property
    def ordered(self) -> bool:
        return True

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        beyond = -jnp.inf if self.pool.kind == "max" else 0.0
        return self.pool(jnp.where(view.pos < 0, beyond, scored(self.score, view, seen)))
