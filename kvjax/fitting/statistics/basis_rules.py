"""The inputs of the rules that fit bases, and diagonal bases."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.ops.base.rope import Rope, partners
from kvjax.state.codes import Codec

Numbers = Float[np.ndarray, "L K T H"]


class BasisInputs(NamedTuple):
    """What a basis is for, and what its rule may use besides the rows.

    of: "key" or "value". rope: the rotation of the keys, None if it does not matter. codec: of the rows in
    the basis. keys: of the same tokens. queries: the mean of q q' over the query heads of each KV head; None
    for rules that use none.
    """

    of: Literal["key", "value"]
    rope: Rope | None
    codec: Codec
    keys: Numbers
    queries: Float[np.ndarray, "L K H H"] | None


def paired(most: Float[np.ndarray, "*b H"], rope: Rope | None) -> Float[np.ndarray, "*b H"]:
    """`most`, with the larger of both channels for each pair that RoPE rotates; unchanged without it."""
    return np.maximum(most, most[..., partners(most.shape[-1], rope)])


def scaled(by: Float[np.ndarray, "L K H"]) -> dict[str, np.ndarray]:
    """Return the basis in which channels are divided by `by`; a channel of zeros stays as it is."""
    by, one = np.where(by > 0, by, 1.0), np.eye(by.shape[-1])
    return {"matrix": by[..., None] * one, "inverse": one / by[..., None]}
