"""Kinds of words: the base classes of scores, patterns, merges, observations, rewrites."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.base.kind import Kind
from kvjax.grammar.views import AttentionSpec as AttentionSpec
from kvjax.grammar.views import Inputs, Observed, View
from kvjax.ops.attention.union import Reduction

# The arrays that patterns take: they also run on the host.
Numbers = Array | np.ndarray


# When an observation exists: while many new tokens are read, or in the step of one token.
IN_PREFILL, IN_STEP = "prefill", "step"


class Observation(Kind):
    """The base class of what must be recorded while a layer attends: a function from Inputs to arrays.

    `phases`: whether it exists in "prefill", "step" or both. `reduction`: how attention sums probabilities
    for it while it runs; None if it needs none. `queries_alone`: whether it depends on queries alone, not on
    slots.

    >>> from kvjax.words import Queries
    >>> isinstance(Queries(16), Observation)
    True
    """

    phases: tuple[str, ...] = (IN_PREFILL,)
    reduction: Reduction | None = None
    queries_alone: bool = False

    @abstractmethod
    def __call__(self, inputs: Inputs) -> Any:
        raise NotImplementedError


class Carried(Observation):
    """An observation of more than the newest token: in decode steps, every row carries it."""

    @abstractmethod
    def start(self, inputs: Inputs) -> Any:
        """Return what a row carries before its first token: arrays [B, ...].

        Integer arrays are positions, initially -1; all others are zeros (`kvjax.api.rows.reset_rows`).
        """
        raise NotImplementedError

    @abstractmethod
    def carry(self, carried: Any, inputs: Inputs) -> Any:
        """Return what rows carry after new tokens; unchanged for rows without new tokens."""
        raise NotImplementedError

    @abstractmethod
    def read(self, carried: Any) -> Any:
        """Return the observation, as a call on all tokens at once would give it."""
        raise NotImplementedError


class SlotObservation(Observation):
    """A number per slot, computed from slots and new queries together; a call on `Inputs` alone raises.

    `by_layer`: `of` takes the layer's index in the stack as well, as `layer`.
    """

    by_layer: bool = False

    @abstractmethod
    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """Compute each slot's number; q and k are rotated, positions are -1 on padding and in empty slots."""
        raise NotImplementedError

    def __call__(self, inputs: Inputs) -> NoReturn:
        raise TypeError(f"{self!r} is known where queries and slots meet: call its `of`")


class AccumulatingObservation(Observation):
    """A per-slot observation that accumulates: `join` combines the values from earlier and new queries."""

    @abstractmethod
    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        raise NotImplementedError


# The value of `since` for a slot that is hidden from no query.
NEVER = 2**30


class Hiding(Observation):
    """From which new token on a slot is hidden from queries, its own included; a call on `Inputs` raises.

    It is known before a layer attends, for a prompt's tokens and in a step, which evicts hidden slots first.
    traces: the traces of slots that it needs, which the score must keep; they are the same in all KV heads of
    a layer.
    """

    traces: tuple[Trace, ...]

    @abstractmethod
    def since(
        self, inputs: Inputs, traces: dict[str, Float[Array, "B K S"]], pos: Int[Array, "B #K S"]
    ) -> Int[Array, "B K S"]:
        """Find the position of the first new token that does not see a slot; `NEVER` if all do."""
        raise NotImplementedError

    def __call__(self, inputs: Inputs) -> NoReturn:
        raise TypeError(f"{self!r} is known where new tokens and slots meet: call its `since`")


class Trace(Kind):
    """The base class of numbers that a method keeps per slot, and that move with the slot wherever it goes.

    `needs`: the observed masses or `SlotObservation`s that update it. `after_layers`: the numbers of new
    tokens are their surprisals, which are known once all layers have run. `by_ids`: the numbers follow from
    token ids.

    >>> from kvjax.words import AccumulatedMass
    >>> isinstance(AccumulatedMass(), Trace)
    True
    """

    needs: frozenset[Observation] = frozenset()
    after_layers: bool = False
    by_ids: bool = False

    @abstractmethod
    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        """Return the numbers of new tokens, before their own queries are counted."""
        raise NotImplementedError

    @abstractmethod
    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        """Return the numbers of slots, new ones included, after new queries whose masses are in `seen`."""
        raise NotImplementedError


class SelectionTrace(Trace):
    """A trace that is also updated whenever slots are selected, to record the selection."""

    @abstractmethod
    def judge(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        """Return the numbers of a view's slots before they are scored; the view is in position order."""
        raise NotImplementedError


class Score(Kind):
    """The base class of how much each slot matters; higher stays. `kvjax.words.Word` adds `+`, `*` and `>>`.

    `needs` and `traces`: what it reads of observations and of traces, known before attention runs. `looks`:
    whether it reads keys or values, not only positions and accumulated attention. `ordered`: whether it must
    see slots in position order, because it compares neighbours. `weights`: whether it needs the layer's
    weight matrices. `bounded`: whether it gives all but the best slots of a budget low scores (`UpTo`).
    `in_steps`: the score that ranks slots while decoding. `looks_after_a_token`: whether it reads keys or
    values when slots are evicted after every token, whose attention is known then.

    >>> from kvjax.words import KeyNorm
    >>> isinstance(KeyNorm(), Score)
    True
    """

    needs: frozenset[Observation] = frozenset()
    traces: frozenset[Trace] = frozenset()
    looks: bool = True
    ordered: bool = False
    weights: bool = False
    bounded: bool = False

    @property
    def in_steps(self) -> Score:
        return self

    @property
    def looks_after_a_token(self) -> bool:
        return self.looks if self.in_steps is self else self.in_steps.looks_after_a_token

    @abstractmethod
    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        raise NotImplementedError


class Merge(Kind):
    """The base class of merges, which fold evicted slots into kept ones.

    `writes`: what it changes of the kept slots, some of "k", "v", "bias" and "traces"; if it writes biases,
    every slot has one. `traces`: the traces that it reads (`View.of`), which the score must keep.
    `one_by_one`: after a token, a threshold evicts one slot of a KV head, and the others after later tokens.
    `ordered`: it must see slots in position order. `at_prompts`: False for one that
    merges only while decoding; slots evicted from a prompt are then dropped. `unrotated`: it merges keys
    before rotation, so it needs a phase that stores them so.

    >>> from kvjax.keep.merges.merge_values import ValueBlend
    >>> isinstance(ValueBlend(), Merge)
    True
    """

    needs: frozenset[Observation] = frozenset()
    traces: frozenset[Trace] = frozenset()
    writes: tuple[str, ...] = ("k", "v", "bias")
    one_by_one: bool = False
    ordered: bool = False
    at_prompts: bool = True
    unrotated: bool = False

    @abstractmethod
    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        raise NotImplementedError


class CarryingMerge(Merge):
    """A merge for which every row carries a state from eviction to eviction; a call finds it in `seen`."""

    @abstractmethod
    def start(self, view: View) -> Any:
        """Return what rows carry before evictions: arrays [B, ...] of zeros; only a view's shapes matter."""
        raise NotImplementedError

    @abstractmethod
    def carry(
        self,
        carried: Any,
        view: View,
        kept: Bool[Array, "B K S"],
        leaving: Int[Array, "B K E"],
        seen: Observed,
    ) -> Any:
        """Update what rows carry for evictions; unchanged in rows without any. Called before the merge."""
        raise NotImplementedError


class Answering(CarryingMerge):
    """A merge that lets queries attend to evicted slots, through a summary that rows carry."""

    @abstractmethod
    def answer(
        self, carried: Any, q: Float[Array, "B N T H"], fitted: dict[str, dict[str, Array]]
    ) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
        """Return (out, lse) of rotated queries over all evicted slots; lse is -inf if there are none."""
        raise NotImplementedError


class Pattern(Kind):
    """The base class of slots that stay whatever their score: a function of integer arrays, of JAX or NumPy.

    `tokens`: how many tokens it protects, or which share of the budget; None if neither says it. `newest`:
    whether they are the newest, which may take up half of a budget at most.

    >>> from kvjax.words import Sink
    >>> isinstance(Sink(4), Pattern)
    True
    """

    tokens: Any = None
    newest: bool = False

    @abstractmethod
    def __call__(
        self, pos: Int[Numbers, "B K S"], length: Int[Numbers, "B"], n: Int[Numbers, "B"]
    ) -> Bool[Numbers, "B K S"]:
        raise NotImplementedError


class Allocation(Kind):
    """The base class of how a mean budget is divided: into one count per layer, row and head.

    `uniform`: all heads have equal counts, so storage is dense; else storage is in pages. `across_layers`:
    slots move between layers, so all layers share one pool. `threshold`: slots stay or are evicted by their
    own score, in steps as at the end of a prefill, and how many stay follows from the data. An allocation
    that needs more than scores, such as observations (`needs`), is `Preferring`. `of_budget` and `poorest`
    are parts of messages: whose budget is n, and which heads get fewest.

    >>> from kvjax.words import Uniform
    >>> isinstance(Uniform(), Allocation)
    True
    """

    uniform: bool = False
    across_layers: bool = False
    threshold: float | None = None
    needs: frozenset[Observation] = frozenset()
    of_budget: str = ", in the mean of all"
    poorest: str = ""

    @abstractmethod
    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        raise NotImplementedError

    @abstractmethod
    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        """Find the most slots a row of at most `tokens` tokens keeps in all heads, per layer (static)."""
        raise NotImplementedError

    def layer_rest(self, budget: Any, tokens: int, layers: int, heads: int) -> list[int]:
        """As `layer_slots`, for the slots that do not stay and go to a second tier; by default all tokens."""
        return [heads * tokens] * layers

    def fewest(self, n: int, tokens: int) -> int:
        """Count the slots of the head that gets fewest."""
        return n

    def mean(self, n: int) -> int:
        """Return the mean number of slots per head."""
        return n

    def holding(self, tokens: int) -> Allocation:
        """Return the allocation in which every head can keep at least so many slots."""
        return self


class Preferring(Allocation):
    """An allocation that needs more than scores: what a layer observed says how much its heads should get."""

    @abstractmethod
    def preference(self, view: View, seen: Observed) -> Float[Array, "B K"]:
        """How much a layer's heads should get, relative to other layers; not negative."""
        raise NotImplementedError

    @abstractmethod
    def counts(
        self,
        scores: Float[Array, "L B K S"],
        n: Int[Array, "B"],
        preferences: Float[Array, "L B K"] | None = None,
    ) -> Int[Array, "L B K"]:
        """As in `Allocation`; preferences are those of all layers, and are always given."""
        raise NotImplementedError


def over_layers(f: Callable[..., Any], *args: Any) -> Any:
    """Apply f to every layer of stacked arguments [Lg, ...] and stack the results."""
    layers = jax.tree.leaves(args)[0].shape[0]
    if layers == 1:
        one = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], one)
    return jax.lax.map(lambda a: f(*a), args)
