"""Which codes can lie in pages, and the codes of 8 bits that kernels read there."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kvjax.grammar import Store
from kvjax.grammar.fitted import fitted_words, learns, sees_below
from kvjax.ops.base.bit_packing import halves
from kvjax.state.code_forms import ROWS, Form, is_steady
from kvjax.state.codes import Codec, at_layer

PAYLOAD = "int8"
NUMBERS = ("key_scale", "key_zero", "value_scale", "value_zero")


def codes_refusal(store: Store, layers: int) -> str:
    """Why a store's codes cannot lie in pages, whatever the page; empty if they can."""
    if store.sinks or store.unrotated:
        return "first tokens are stored apart, or keys unrotated"
    both = store.keys, store.values
    if any(True for _ in fitted_words(both)) or learns(both) or sees_below(both) or _takes_arrays(both):
        return "its codes depend on more than the tokens that they encode"
    if any(at_layer(codec, i) != codec for codec in both for i in range(layers)):
        return "its codes differ between layers"
    return ""


def _takes_arrays(word: Any) -> bool:
    """Whether a codec takes arrays, or shares them with another layer, or one of its parts does."""
    if isinstance(word, tuple):
        return any(map(_takes_arrays, word))
    if not dataclasses.is_dataclass(word):
        return False
    own = isinstance(word, Codec) and (type(word).bind is not Codec.bind or word.borrows)
    return own or any(_takes_arrays(getattr(word, field.name)) for field in dataclasses.fields(word))


def is_of_rows(store: Store, width: int) -> bool:
    """Whether a store has 8-bit codes with a scale and a zero per token, which kernels read in pages."""
    if store.residual or store.sinks:
        return False
    return all(_form(codec, width) == ROWS and is_steady(codec) for codec in (store.keys, store.values))


def _form(codec: Codec | None, width: int) -> Form | None:
    return None if codec is None else codec.form(width)


def coded(
    store: Store, k: Float[Array, "*b T H"], v: Float[Array, "*b T H"]
) -> tuple[Shaped[Array, "*b T H"], Shaped[Array, "*b T H"], dict[str, Array]]:
    """Encode keys and values for pages: their codes, and their scales and zeros (`NUMBERS`) [*b, T].

    Pages hold signed codes: x = scale * code + zero with code - 128, and zero + 128 scale.
    """
    found, numbers = [], {}
    for name, codec, x in (("key", store.keys, k), ("value", store.values, v)):
        assert codec is not None
        data = codec.encode(x)
        scale, zero = halves(data["scale_zero"])
        found.append((data["codes"].astype(jnp.int32) - 128).astype(jnp.int8))
        numbers |= {f"{name}_scale": scale, f"{name}_zero": zero + 128 * scale}
    return found[0], found[1], numbers
