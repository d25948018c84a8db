"""Rows as sums of a few vectors of a dictionary, found one after the other (CSR)."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.base.errors import InputError
from kvjax.grammar.fitted import Fitted, FittedEncoding, ModelSizes, check_sizes
from kvjax.state.codes import Codec, CodecArrays
from kvjax.store.coupled import piecewise
from kvjax.store.levels import without_arrays

# The largest float8 (e4m3): casting a larger number gives NaN.
_MOST = 448.0


@dataclasses.dataclass(frozen=True)
class Atoms(Codec, FittedEncoding):
    """x ~ sum_i c_i d_i of `count` atoms d_i of a fitted dictionary (arXiv:2412.11741, section 3).

    Matching pursuit: each atom is the one with the largest |<d, r>| for the remainder r, c = <d, r> is
    rounded to float8 (e4m3), and c d is subtracted from r. of: the fitted array "key atoms" or "value atoms"
    [L, N, H] of unit vectors, at most 65536, shared by the heads of a layer. Stored are "atoms" uint16 and
    "weights" float8 [*b, S, count]. Raises ValueError for a count below 1 and another `of`.
    """

    count: int
    of: Literal["key", "value"]
    fitted: Fitted | None = None

    granule = 1
    by = "csr"
    # The pursuit of a decoded row may choose other atoms.
    steady = False

    def __post_init__(self):
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"a row is a sum of at least 1 atom, got {self.count!r}")
        if self.of not in ("key", "value"):
            raise ValueError(f"a dictionary is of a 'key' or a 'value', got {self.of!r}")

    @property
    def says(self) -> str:
        return f"{self.count} atoms of a fitted dictionary a row, 24 bits each."

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        assert self.fitted is not None
        name = f"{self.of} atoms"
        check_sizes(self, "dictionary", "layers", name, (model.layers,))
        many, channels = self.fitted.arrays[name].shape[1:]
        if channels != model.head_dim or not 1 <= many <= 65536:
            raise InputError(
                f"it was fitted with {many} atoms of {channels} channels, and 1 to 65536 of {model.head_dim} "
                f"were expected: run `kvjax fit {self.by}` on this model"
            )

    def bind(self, arrays: CodecArrays) -> Codec:
        if self.fitted is None or self.fitted.digest not in arrays:
            return self
        return Pursuit(self.count, arrays[self.fitted.digest][f"{self.of} atoms"])

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        without_arrays(self)

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        without_arrays(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Pursuit(Codec):
    """Sums of `count` of the atoms [*l, N, H] of a layer, for rows [*l, B, K, S, H].

    >>> codec = Pursuit(2, jnp.eye(3)[None])
    >>> data = codec.encode(jnp.array([1.0, -4.0, 2.0]).reshape(1, 1, 1, 1, 3))
    >>> codec.decode(data, 3, jnp.float32).ravel().tolist()
    [0.0, -4.0, 2.0]
    """

    count: int
    atoms: Float[Array, "*l N H"]

    granule = 1

    def encode(self, x: Float[Array, "*b S H"]) -> dict[str, Array]:
        atoms = self.atoms.astype(jnp.float32)
        if x.shape[-1] != atoms.shape[-1]:
            raise ValueError(
                f"atoms were fitted for rows of {atoms.shape[-1]} channels, these have {x.shape[-1]}"
            )

        def pursued(rows: Float[Array, "*b S H"]) -> Float[Array, "*b S C"]:
            left, indices, weights = rows.astype(jnp.float32), [], []
            for _ in range(self.count):
                met = jnp.einsum("...bksh,...nh->...bksn", left, atoms, precision="highest")
                best = jnp.abs(met).argmax(-1).astype(jnp.int32)
                weight = jnp.take_along_axis(met, best[..., None], -1)
                weight = jnp.clip(weight, -_MOST, _MOST).astype(jnp.float8_e4m3fn).astype(jnp.float32)
                left = left - weight * self._picked(best)
                # Whole numbers up to 65536 are exact in float32.
                indices, weights = [*indices, best[..., None].astype(jnp.float32)], [*weights, weight]
            return jnp.concatenate([*indices, *weights], -1)

        found = piecewise(pursued, x)
        return {
            "atoms": found[..., : self.count].astype(jnp.uint16),
            "weights": found[..., self.count :].astype(jnp.float8_e4m3fn),
        }

    def decode(self, data: dict[str, Array], width: int, dtype: DTypeLike) -> Float[Array, "*b S H"]:
        out = jnp.zeros((*data["atoms"].shape[:-1], width), jnp.float32)
        for i in range(self.count):
            weight = data["weights"][..., i : i + 1].astype(jnp.float32)
            out = out + weight * self._picked(data["atoms"][..., i].astype(jnp.int32))
        return out.astype(dtype)

    def _picked(self, index: Array) -> Float[Array, "*b S H"]:
        """Gather atoms of each layer by their indices [*l, B, K, S]."""
        *lead, many, width = self.atoms.shape
        first = np.arange(math.prod(lead), dtype=np.int32).reshape(lead) * many
        first = first.reshape(*lead, *(1,) * (index.ndim - len(lead)))
        return self.atoms.astype(jnp.float32).reshape(-1, width)[jnp.asarray(first) + index]
