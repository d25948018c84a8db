"""A user's own codec and read: how slots are encoded, and which of them a query attends to.

    kvjax compare --methods docs/examples/codec_and_read.py:float16 docs/examples/codec_and_read.py:largest \
        --tasks get --samples 2

docs/how-to/codec-and-read.md says what each of the two must provide.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.words import Amount, Budget, Codec, Method, RankedSlots, Slots, Store, Tokens, dense


@dataclasses.dataclass(frozen=True)
class Float16(Codec):
    """Stores every number in 16 bits, each token by itself."""

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        return {"x": x.astype(jnp.float16)}

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        return data["x"].astype(dtype)


def float16() -> Method:
    """Store keys and values as float16."""
    return Method(store=Store(keys=Float16(), values=Float16()))


@dataclasses.dataclass(frozen=True)
class LargestProducts(RankedSlots):
    """Selects the slots whose keys have the largest product with the queries, summed over a group's heads."""

    def score(self, q: Float[Array, "B N 1 H"], body: Slots, layer: int | Array) -> Float[Array, "B K S"]:
        k = dense(body.layer(layer).k).astype(jnp.float32)  # [B, K, S, H]; dense() decodes codes
        group = q.astype(jnp.float32).reshape(k.shape[0], k.shape[1], -1, k.shape[-1]).sum(2)
        return jnp.einsum("bkh,bksh->bks", group, k)


def largest(budget: Amount, *, newest: Tokens = 32) -> Method:
    """Each step attends to the slots with the largest products, and to the `newest` tokens."""
    return Method(read=LargestProducts(Budget(budget), newest))
