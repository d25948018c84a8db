"""Keys and values in codes: how a codec's arrays stand for rows, and how they come back."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.ops.base.memory import to_device


@runtime_checkable
class Codec(Protocol):
    """Encodes rows of `granule` tokens as arrays and decodes them; static and hashable.

    >>> from kvjax.words import Affine
    >>> isinstance(Affine(4), Codec)
    True
    """

    @property
    def granule(self) -> int: ...

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Arrays of shape [*b, S / granule, ...]."""
        ...

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]: ...


# The arrays of fitted words, by their digests and names: [Lg, ...], or of one layer.
Taught = dict[str, dict[str, Array]]


def taught(codec: Codec, arrays: Taught) -> Codec:
    """A codec whose words have their fitted arrays at hand; one without such words as it is.

    arrays: of the layers that lead the rows: [*l, ...] for rows [*l, B, K, S, H].
    A codec that needs some has a method `taught` that takes them up; wrappers pass them on.
    """
    if hasattr(codec, "taught"):
        return codec.taught(arrays)  # type: ignore[attr-defined]
    parts = {f.name: getattr(codec, f.name) for f in dataclasses.fields(codec)}  # type: ignore[arg-type]
    inner = {name: taught(part, arrays) for name, part in parts.items() if isinstance(part, Codec)}
    return dataclasses.replace(codec, **inner) if inner else codec  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """Encoded keys or values: arrays [..., S / granule, ...] that `codec` turns back into [..., S, width].

    taught: the fitted arrays of its layers, lent while a program runs (`kvjax.steps.shared.fitted_arrays`). A
    cache between two programs holds none.
    """

    data: dict[str, Array]
    codec: Codec = dataclasses.field(metadata=dict(static=True))
    width: int = dataclasses.field(metadata=dict(static=True))
    dtype: str = dataclasses.field(metadata=dict(static=True))
    taught: Taught = dataclasses.field(default_factory=dict)

    def decode(self) -> Array:
        return taught(self.codec, self.taught).decode(self.data, self.width, jnp.dtype(self.dtype))

    def encoded(self, x: Array, layer: int | Array = 0, layers: int | None = None) -> dict[str, Array]:
        """Encodes x as these codes are: `layers` layers from `layer` on, or that layer without its axis."""

        def part(a: Array) -> Array:
            return a[layer] if layers is None else jax.lax.dynamic_slice_in_dim(a, layer, layers)

        return taught(self.codec, jax.tree.map(part, self.taught)).encode(x)


def dense(x: Array | Codes) -> Array:
    """Decodes an array that may be codes.

    Args:
        x: an array, or `Codes`.

    Returns:
        The plain array [..., S, H], in the device's memory.

    >>> import jax.numpy as jnp
    >>> dense(jnp.ones((2, 3))).shape
    (2, 3)
    """
    x = to_device(x)
    return x.decode() if isinstance(x, Codes) else x


def width_of(x: Array | jax.ShapeDtypeStruct | Codes) -> int:
    """How many channels a row has, of an array or of its shape alone."""
    return x.width if isinstance(x, Codes) else x.shape[-1]


def encode(x: Array, codec: Codec | None, arrays: Taught | tuple[()] = ()) -> Array | Codes:
    """Encodes x by `codec`; without one, x itself. arrays: the fitted arrays of the codec's words."""
    if codec is None:
        return x
    return Codes(taught(codec, arrays or {}).encode(x), codec, x.shape[-1], x.dtype.name)


def lent(tree: Any, arrays: Taught | tuple[()]) -> Any:
    """A tree of codes with the fitted arrays of its layers at hand; with none, as it lies in a cache."""
    is_codes = lambda x: isinstance(x, Codes)  # noqa: E731
    lend = lambda x: dataclasses.replace(x, taught=arrays or {}) if is_codes(x) else x  # noqa: E731
    return jax.tree.map(lend, tree, is_leaf=is_codes)
