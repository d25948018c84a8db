"""Keys and values as codes: how a codec's arrays represent rows, and how they are decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.ops.base.memory import to_device


@runtime_checkable
class Codec(Protocol):
    """Encodes rows of `granule` tokens as arrays, and decodes them; static and hashable.

    A codec that needs more than these rows has a method `bind`, which takes arrays and returns a codec
    bound to them: arrays fitted to the model (`fitted`); observations of every row's own prompts, which
    `learns` names; and, if `sees_below` is true, the same tokens in the layer below (`BELOW`). Learnt arrays
    are used only when rows are encoded, never when they are decoded, so a row may learn more while its older
    codes stay. Axis -3 of the rows has all heads of a layer.

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


# What codecs may see beside the rows that they encode: fitted arrays by the digest of their word, and what
# rows learn from their prompts by the key of the observation (`LEARNT`), each by name, [Lg, ...] or for one
# layer.
CodecArrays = dict[str, dict[str, Array]]
# The key of arrays known before the rows to be encoded: "key" and "value" of the layer below, "own key", all
# decoded.
BELOW = "below"
# The name of an array that a row has learnt from its prompts, [Lg, B, ...].
LEARNT = "learnt"


def bind(codec: Codec, arrays: CodecArrays) -> Codec:
    """A codec bound to the arrays that it needs beside the rows; unchanged if it needs none.

    A codec that needs arrays has a method `bind(arrays)` that returns a bound codec; wrappers pass them on.

    arrays: by key, of the layers on the rows' leading axes, [*l, ...] for rows [*l, B, K, S, H]:
        fitted arrays of the model, by their digest;
        observations of a row's own prompts, by the key of the observation in the codec's `learns`
        (`kvjax.store.orthogonal_error`);
        if `sees_below` is true, the decoded keys and values of the same tokens in the layer below, under
        `BELOW` (`kvjax.store.predicted`).
    """
    if hasattr(codec, "bind"):
        return codec.bind(arrays)  # type: ignore[attr-defined]
    return _with_parts(codec, lambda part: bind(part, arrays))


def at_layer(codec: Codec | None, layer: int) -> Codec | None:
    """The codec of a layer; a codec that differs between layers has a method `at`."""
    if codec is None:
        return None
    if hasattr(codec, "at"):
        return at_layer(codec.at(layer), layer)  # type: ignore[attr-defined]
    return _with_parts(codec, lambda part: at_layer(part, layer))  # type: ignore[arg-type, return-value]


def _with_parts(codec: Codec, change: Callable[[Codec], Codec]) -> Codec:
    """The codec with the codecs in its fields changed; itself if it has none."""
    parts = {f.name: getattr(codec, f.name) for f in dataclasses.fields(codec)}  # type: ignore[arg-type]
    inner = {name: change(part) for name, part in parts.items() if isinstance(part, Codec)}
    return dataclasses.replace(codec, **inner) if inner else codec  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes:
    """Encoded keys or values: arrays [..., S / granule, ...] that `codec` decodes to [..., S, width].

    codec_arrays: the fitted arrays of its layers, attached while a program runs
    (`kvjax.steps.shared.fitted_arrays`). Between programs a cache has none.
    """

    data: dict[str, Array]
    codec: Codec = dataclasses.field(metadata=dict(static=True))
    width: int = dataclasses.field(metadata=dict(static=True))
    dtype: str = dataclasses.field(metadata=dict(static=True))
    codec_arrays: CodecArrays = dataclasses.field(default_factory=dict)

    def decode(self) -> Array:
        return bind(self.codec, self.codec_arrays).decode(self.data, self.width, jnp.dtype(self.dtype))

    def encoded(self, x: Array, layer: int | Array = 0, layers: int | None = None) -> dict[str, Array]:
        """Encodes x like these codes: `layers` layers from `layer` on, or one layer without its axis."""

        def part(a: Array) -> Array:
            return a[layer] if layers is None else jax.lax.dynamic_slice_in_dim(a, layer, layers)

        return bind(self.codec, jax.tree.map(part, self.codec_arrays)).encode(x)


def dense(x: Array | Codes) -> Array:
    """Decodes codes; returns a plain array as it is.

    Args:
        x: an array, or `Codes`.

    Returns:
        The array [..., S, H], in the device's memory.

    >>> import jax.numpy as jnp
    >>> dense(jnp.ones((2, 3))).shape
    (2, 3)
    """
    x = to_device(x)
    return x.decode() if isinstance(x, Codes) else x


def width_of(x: Array | jax.ShapeDtypeStruct | Codes) -> int:
    """How many channels a row has, for an array or a shape."""
    return x.width if isinstance(x, Codes) else x.shape[-1]


def encode(x: Array, codec: Codec | None, arrays: CodecArrays | tuple[()] = ()) -> Array | Codes:
    """Encodes x with `codec`; without one, returns x. arrays: the fitted arrays of the codec's words."""
    if codec is None:
        return x
    return Codes(bind(codec, arrays or {}).encode(x), codec, x.shape[-1], x.dtype.name)


def with_arrays(tree: Any, arrays: CodecArrays | tuple[()]) -> Any:
    """A tree of codes, or of lists in pages of codes, with the fitted arrays of its layers attached.

    With no arrays, as it is stored in a cache.
    """
    has_codes = lambda x: hasattr(x, "codec_arrays")  # noqa: E731
    attach = lambda x: dataclasses.replace(x, codec_arrays=arrays or {}) if has_codes(x) else x  # noqa: E731
    return jax.tree.map(attach, tree, is_leaf=has_codes)
