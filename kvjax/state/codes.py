"""Keys and values as codes: how a codec's arrays represent rows, and how they are decoded."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from kvjax.base.kind import Kind
from kvjax.ops.base.dispatch import alone, platform
from kvjax.ops.base.memory import to_device
from kvjax.ops.decode.stacked_decode import on_lanes

if TYPE_CHECKING:
    from kvjax.state.code_forms import Form, Span


class Encoding(Kind):
    """The base class of codecs, and of words that make a codec of a codec.

    `learns`: the observations of every row's own prompts that a codec needs. `sees_below`: whether it needs
    the same tokens in the layer below (`BELOW`).
    """

    learns: frozenset[Any] = frozenset()
    sees_below: bool = False


class Codec(Encoding):
    """The base class of codecs, which encode rows of `granule` tokens as arrays, and decode them.

    Static and hashable. `steady`: whether decoded rows may be encoded again without drift. `borrows`: whether
    arrays of its codes are stored with the layer below (`kvjax.state.code_forms.completed`). `each`: the
    codecs of which it is one, layer by layer.

    A codec that needs more than the rows to encode has a method `bind`, which takes arrays and returns a
    codec bound to them: arrays fitted to the model (`fitted`), and what `learns` and `sees_below` say. Learnt
    arrays are used only when rows are encoded, never when they are decoded, so a row may learn more while its
    older codes stay. Axis -3 of the rows has all heads of a layer.

    >>> from kvjax.words import Affine
    >>> isinstance(Affine(4), Codec)
    True
    """

    former: ClassVar[dict[str, str]] = {"taught": "bind"}
    granule: int
    steady: bool = True
    borrows: bool = False
    each: tuple[Codec, ...] = ()

    @abstractmethod
    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        """Encode S tokens as arrays [*b, S / granule, ...]."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        raise NotImplementedError

    def bind(self, arrays: CodecArrays) -> Codec:
        """Bind the codec to the arrays that it needs (`bind`); by default, bind its parts to theirs."""
        return _with_parts(self, lambda part: part.bind(arrays))

    def at(self, layer: int) -> Codec:
        """Return the codec of a layer, if it differs between layers."""
        return self

    def form(self, width: int) -> Form | None:
        """Return the layout of its codes; None if no kernel reads them."""
        return None

    def span(self, width: int) -> Span | None:
        """Return the codec of z and a fixed matrix M with rows x = z M of `width` channels; None without M.

        Attention then runs over z itself: logits are <q, z M> = <q M', z>, and outputs are sum_j p_j z_j M =
        (sum_j p_j z_j) M: two products per query in place of one per slot. M need not be square: a rotation
        is, a sketch is not.
        """
        return None

    def factors(self, codes: Codes) -> tuple[Array | Codes, Float[Array, "*b S"]] | None:
        """Return z and s of codes of rows x = s z, one number s per row; None if they are no such product.

        Attention then multiplies logits by s, not rows.
        """
        return None


class Thinning(Codec):
    """A codec that leaves numbers of a row out, and may have another codec encode those that stay."""

    @abstractmethod
    def around(self, codec: Codec) -> Codec:
        """Make the codec whose numbers that stay `codec` encodes, too."""
        raise NotImplementedError


# What codecs may use beside the keys or values to encode: arrays by name, [Lg, ...] or for one layer, under
# the digest of their word if they are fitted, under the key of the observation if every row of the batch has
# learnt them from its prompts (`LEARNT`), or under `BELOW`.
CodecArrays = dict[str, dict[str, Array]]
# The key of arrays of the same tokens that are known before their keys or values are encoded: "key" and
# "value" of the layer below, and "own key", all decoded.
BELOW = "below"
# The name of an array that a row has learnt from its prompts, [Lg, B, ...].
LEARNT = "learnt"


def bind(codec: Codec, arrays: CodecArrays) -> Codec:
    """Bind a codec to the arrays that it needs beside the rows; unchanged if it needs none.

    A codec that needs arrays has a method `bind(arrays)` that returns a bound codec; wrappers pass the arrays
    on.

    arrays: by key, of the layers on the rows' leading axes, [*l, ...] for rows [*l, B, K, S, H]:
        fitted arrays of the model, by their digest;
        observations of a row's own prompts, by the key of the observation in the codec's `learns`
        (`kvjax.store.orthogonal_error`);
        if `sees_below` is true, the decoded keys and values of the same tokens in the layer below, under
        `BELOW` (`kvjax.store.predicted`).
    """
    return codec.bind(arrays)


def at_layer(codec: Codec | None, layer: int) -> Codec | None:
    """Return the codec of a layer; a codec that differs between layers has a method `at`."""
    if codec is None:
        return None
    if (own := codec.at(layer)) is not codec:
        return at_layer(own, layer)
    return _with_parts(codec, lambda part: at_layer(part, layer))  # type: ignore[arg-type, return-value]


def _with_parts(codec: Codec, change: Callable[[Codec], Codec]) -> Codec:
    """Change the codecs in a codec's fields; return the codec itself if its fields hold none."""
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
        """Encode x like these codes: `layers` layers from `layer` on, or one layer without its axis."""

        def part(a: Array) -> Array:
            return a[layer] if layers is None else jax.lax.dynamic_slice_in_dim(a, layer, layers)

        return bind(self.codec, jax.tree.map(part, self.codec_arrays)).encode(x)


def layer_of(x: Shaped[Array, "Lg *r"], index: int | Array) -> Shaped[Array, "*r"]:
    """One layer of a stacked array, [B, K, S, W] for slots, in the memory order of a TPU.

    Slots with narrow rows are on its lanes. XLA would re-lay out all layers for a computation on one.
    """
    part = x[index]
    if x.ndim == 5 and platform() == "tpu" and on_lanes(x) and alone(x):
        return with_layout_constraint(part, Layout((0, 1, 3, 2)))
    return part


def dense(x: Array | Codes) -> Array:
    """Decode codes; return a plain array as it is.

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
    """Encode x with `codec`; without one, return x. arrays: the fitted arrays of the codec's words."""
    if codec is None:
        return x
    return Codes(bind(codec, arrays or {}).encode(x), codec, x.shape[-1], x.dtype.name)


def with_arrays(tree: Any, arrays: CodecArrays | tuple[()]) -> Any:
    """Attach the fitted arrays of its layers to a tree of codes, or of lists in pages of codes.

    Without arrays, the tree becomes what a cache stores.
    """
    has_codes = lambda x: hasattr(x, "codec_arrays")  # noqa: E731
    attach = lambda x: dataclasses.replace(x, codec_arrays=arrays or {}) if has_codes(x) else x  # noqa: E731
    return jax.tree.map(attach, tree, is_leaf=has_codes)
