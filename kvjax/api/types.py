"""Types of the public functions, and models with `prefill` and `step` of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.state.cache import Cache

# Argument types: token ids of rows, how many of each row count, and one token per row.
TokenIds = Int[Array, "B T"] | np.ndarray | Sequence[Sequence[int] | Int[Array, "_"] | np.ndarray]
Lengths = Int[Array, "B"] | np.ndarray | Sequence[int]
OneToken = Int[Array, "B"] | np.ndarray | Sequence[int]
# A decode step without checks: (parameters, bare cache, token [B], append [B]) to (logits [B, V], bare
# cache). It is hashable, because programs are compiled for it.
Step = Callable[[Any, Cache, Array, Array], tuple[Array, Cache]]


class Verbs(Protocol):
    """What a model must provide that is not a single decoder, such as the Block Transformer."""

    @property
    def params(self) -> Any: ...

    def prefill(
        self, tokens: TokenIds, *, method: Method | str | None, lengths: Lengths | None, room: int
    ) -> tuple[Float[Array, "B V"], Cache]: ...

    def step(self, cache: Cache, token: OneToken) -> tuple[Float[Array, "B V"], Cache]: ...

    def stepping(self, method: Method | None) -> Step:
        """Return a decode step without checks."""
        ...


def has_verbs(model: object) -> TypeGuard[Verbs]:
    """Whether a model reads and steps by itself; InputError if it is not a model."""
    if not hasattr(model, "params"):
        raise InputError(f"model is {model!r:.80}, expected what kvjax.load returns: load it first")
    return hasattr(model, "stepping")  # isinstance of a protocol takes 1% of a step


def refuse(model: object, options: Mapping[str, bool]) -> None:
    """Raise InputError for options that were given (true) and that such a model does not have."""
    given = [name for name, asked in options.items() if asked]
    if given:
        raise InputError(
            f"a {type(model).__name__} reads whole prompts and single tokens, got {' and '.join(given)}: "
            "prefill the whole text again, or add its tokens with step"
        )
