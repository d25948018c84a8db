"""Codes with a number of bits for each layer that a fit has found."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.state.codes import Codec
from kvjax.store.affine import Affine
from kvjax.store.levels import without_arrays


@dataclasses.dataclass(frozen=True)
class LayerBits(Codec, FittedEncoding):
    """Encodes each layer like `codec`, in as many bits as were fitted for it (KVTuner, arXiv:2502.04420).

    of: which bits: the fitted whole numbers "key bits" [L] or "value bits" [L], 1, 2, 4 or 8. Raises
    ValueError for another `of`.

    >>> found = Fitted({"key bits": np.array([8, 2])}, "LayerBits", "")
    >>> LayerBits(Affine(4), "key", found).at(1).bits
    2
    """

    codec: Affine
    of: Literal["key", "value"]
    fitted: Fitted | None = None

    granule = 1
    by = "kvtuner"

    def __post_init__(self):
        if self.of not in ("key", "value"):
            raise ValueError(f"bits are of a 'key' or a 'value', got {self.of!r}")

    @property
    def says(self) -> str:
        return "Each layer has the number of bits that a fit found for it."

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if each of the model's layers does not have 1, 2, 4 or 8 bits."""
        assert self.fitted is not None
        name = f"{self.of} bits"
        check_sizes(self, "bits", "layers", name, (model.layers,))
        if not np.isin(found := self.fitted.arrays[name], (1, 2, 4, 8)).all():
            raise InputError(f"its {name} are {found.tolist()}, expected 1, 2, 4 or 8 for each layer")

    def at(self, layer: int) -> Affine:
        """Return the codec of a layer; layers count from 0. Without fitted bits, it is `codec` itself."""
        bits = () if self.fitted is None else self.fitted.arrays.get(f"{self.of} bits", ())
        return dataclasses.replace(self.codec, bits=int(bits[layer])) if layer < len(bits) else self.codec

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)
