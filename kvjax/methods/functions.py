"""The table of functions that make a method of others, such as kvjax.per_layer (`kvjax.methods.around`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

from kvjax.grammar import Method


class MethodWrapper(NamedTuple):
    """A function that makes a method of others; methods: the arguments that these are."""

    function: Callable[..., Method]
    methods: tuple[str, ...]

    @property
    def needed(self) -> list[str]:
        """The arguments that must be given."""
        parameters = inspect.signature(self.function).parameters
        return [name for name, one in parameters.items() if one.default is one.empty]


AROUND: dict[str, MethodWrapper] = {}
