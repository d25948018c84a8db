"""Codes in pages: a method's own 8-bit codes, with a scale and a zero for every token and KV head."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from kvjax.grammar import Store
from kvjax.ops.base.bit_packing import halves
from kvjax.state.code_forms import ROWS, Form, is_steady
from kvjax.state.codes import Codec

PAYLOAD = "int8"
NUMBERS = ("key_scale", "key_zero", "value_scale", "value_zero")


def codes_refusal(store: Store, width: int) -> str:
    """Why codes of heads of `width` channels cannot be stored in pages; empty if they can."""
    if store.residual or store.sinks or store.unrotated:
        return "some tokens are stored uncoded, or keys are stored unrotated"
    if not all(_form(codec, width) == ROWS and is_steady(codec) for codec in (store.keys, store.values)):
        return "its codes are other than 8 bits with a scale and a zero per token"
    return ""


def _form(codec: Codec | None, width: int) -> Form | None:
    form = getattr(codec, "form", None)
    return None if form is None else form(width)


def coded(
    store: Store, k: Float[Array, "*b T H"], v: Float[Array, "*b T H"]
) -> tuple[Shaped[Array, "*b T H"], Shaped[Array, "*b T H"], dict[str, Array]]:
    """Keys and values as codes of pages, and their numbers `NUMBERS` [*b, T].

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
