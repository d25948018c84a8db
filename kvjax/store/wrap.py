"""Codecs made of codecs: `Rotate() >> Affine(4)` encodes the rotated row."""

from __future__ import annotations

import dataclasses
from typing import overload

from jaxtyping import Array

from kvjax.state.codes import Codec, Encoding


class Wrapper(Encoding):
    """The base of words that make a codec of a codec; they are written before it, and before each other.

    >>> from kvjax.words import Affine, Rotate
    >>> isinstance(Rotate(), Wrapper), (Rotate() >> Affine(4)).granule
    (True, 1)
    """

    def around(self, codec: Codec) -> Codec:
        """Return the codec that this wrapper makes from `codec`."""
        raise NotImplementedError

    @overload
    def __rshift__(self, inner: Wrapper) -> ChainedWrappers: ...
    @overload
    def __rshift__(self, inner: Codec) -> Codec: ...
    def __rshift__(self, inner: Wrapper | Codec) -> ChainedWrappers | Codec:
        return ChainedWrappers(self, inner) if isinstance(inner, Wrapper) else self.around(inner)


@dataclasses.dataclass(frozen=True)
class ChainedWrappers(Wrapper):
    """Two wrappers, the outer one first: (a >> b) >> codec is a >> (b >> codec)."""

    outer: Wrapper
    inner: Wrapper

    def around(self, codec: Codec) -> Codec:
        return self.outer.around(self.inner.around(codec))


class WrappedCodec(Codec):
    """The base of the codecs that wrappers make, with the properties of the `codec` inside.

    >>> from kvjax.words import Affine, Rotate
    >>> isinstance(Rotate() >> Affine(4), WrappedCodec)
    True
    """

    codec: Codec

    @property
    def granule(self) -> int:
        return self.codec.granule

    @property
    def steady(self) -> bool:
        return self.codec.steady


def joined(**parts: dict[str, Array]) -> dict[str, Array]:
    """Join the arrays of several codecs, named by the part and their own name.

    >>> import jax.numpy as jnp
    >>> list(joined(first={"words": jnp.ones(1)}, rest={"words": jnp.ones(2)}))
    ['first words', 'rest words']
    """
    return {f"{part} {name}": x for part, data in parts.items() for name, x in data.items()}


def part_of(data: dict[str, Array], part: str) -> dict[str, Array]:
    """One part of `joined`.

    >>> import jax.numpy as jnp
    >>> list(part_of({"first words": jnp.ones(1), "rest words": jnp.ones(2)}, "rest"))
    ['words']
    """
    return {n.removeprefix(f"{part} "): x for n, x in data.items() if n.startswith(f"{part} ")}
