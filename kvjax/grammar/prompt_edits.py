"""Edits of prompts: the base classes of the words that say which tokens of a prompt layers read or store."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from kvjax.base.kind import Kind
from kvjax.grammar.facts import Stating
from kvjax.grammar.kinds import Observation
from kvjax.grammar.phase import Phase


class Narrow(Kind):
    """The base class of words that select the prompt tokens for the upper layers (`Keep.narrow`).

    `needs`: the observations by which tokens are selected. `looks`: whether the selection reads keys or
    values. `phase`: by what tokens are rotated, if not by their positions. `all_layers`: whether a dropped
    token is stored in no layer. `first_turn_only`: whether later turns are read whole.

    >>> from kvjax.keep.prompts.narrow import SelectivePropagation
    >>> issubclass(SelectivePropagation, Narrow)
    True
    """

    needs: frozenset[Observation]
    looks: bool = True
    phase: Phase | None = None
    all_layers: bool = False
    first_turn_only: bool = False

    @abstractmethod
    def after(self, layers: int) -> int:
        """Return the number of the last layer that reads all tokens, in a model of `layers` layers."""
        raise NotImplementedError

    @abstractmethod
    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, Any], ...]:
        """List (layer, selector) pairs: after which layers tokens are dropped, and what selects the rest."""
        raise NotImplementedError

    @abstractmethod
    def most(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text the upper layers read."""
        raise NotImplementedError

    def phase_in(self, layer: int, layers: int, phase: Phase) -> Phase:
        """Return the phase of a first prompt in a layer, by default that of the keep in all layers."""
        return phase


class Rereading(Stating):
    """The base class of words that select the prompt tokens to read or to store (`Method.reread`).

    `reads`: a sentence about how a prompt is read. `looks`: whether the selection reads keys or values.
    `marks`: whether it reads tokens with weights beside the model's.

    >>> from kvjax.keep.prompts.reread import Reread
    >>> issubclass(Reread, Rereading)
    True
    """

    reads: str
    looks: bool = True
    marks: bool = False

    @abstractmethod
    def most(self, tokens: int) -> int:
        """How many tokens of a prompt of at most `tokens` tokens are stored."""
        raise NotImplementedError

    @abstractmethod
    def count(self, length: Any) -> Any:
        """How many tokens of prompts of these lengths are stored, per row."""
        raise NotImplementedError

    def stages(self, layers: int, tokens: int) -> tuple[tuple[int, Any], ...]:
        """List (layer, selector) pairs: after which layers tokens are selected; () if none are selected."""
        return ()
