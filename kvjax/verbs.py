"""Models that read and step in a way of their own: what the public verbs ask of them, and refuse for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

from jaxtyping import Array, Float

from kvjax.cache import Cache
from kvjax.errors import InputError
from kvjax.grammar import Method


class Verbs(Protocol):
    """What a model brings that is no single decoder, such as the Block Transformer."""

    def prefill(
        self, tokens: Any, *, method: Method | str | None, lengths: Any, room: int
    ) -> tuple[Float[Array, "B V"], Cache]: ...

    def step(self, cache: Cache, token: Any) -> tuple[Float[Array, "B V"], Cache]: ...

    def stepping(self, method: Method | None) -> Callable[[Cache, Array, Array], tuple[Array, Cache]]:
        """A method's step without checks: (bare cache, token [B], append [B]) to (logits, bare cache)."""
        ...


def has_verbs(model: object) -> TypeGuard[Verbs]:
    """Whether a model reads and steps by itself."""
    return hasattr(model, "stepping")  # isinstance of a protocol would cost a percent of a step


def refuse(model: object, options: Mapping[str, bool]) -> None:
    """InputError for the options that were given (true) and that such a model does not know."""
    given = [name for name, asked in options.items() if asked]
    if given:
        raise InputError(
            f"a {type(model).__name__} reads whole prompts and single tokens, got {' and '.join(given)}: "
            "prefill the whole text again, or add its tokens with step"
        )
