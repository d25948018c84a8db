"""Gates: small networks that say how much a token will matter, from its hidden state alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.fitted import Fitted, ModelSizes, check_sizes
from kvjax.keep.algebra import Word
from kvjax.keep.observe import BOTH
from kvjax.keep.trace import AtArrival
from kvjax.protocols import Inputs, Seen, Trace, View


@dataclasses.dataclass(frozen=True)
class HiddenGate:
    """log of a token's importance to each head, from the layer's input (KVzap, arXiv:2601.07891).

    A linear map or, where the arrays have a hidden layer, a network with one layer of GELUs. fitted: "out"
    [L, X, K] and "out_bias" [L, K] with X = D; or X = the hidden width, with "in" [L, D, X] and "in_bias"
    [L, X] before them.
    """

    fitted: Fitted | None = None
    by = "kvzap"
    phases = BOTH

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model."""
        assert self.fitted is not None
        first = "in" if "in" in self.fitted.arrays else "out"
        check_sizes(self, "gate", "layers, width", first, (model.layers, model.width))
        check_sizes(self, "gate", "layers, KV heads", "out_bias", (model.layers, model.kv_heads))

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T"]:
        assert self.fitted is not None
        arrays, x = inputs.fitted[self.fitted.digest], inputs.hidden.astype(jnp.float32)
        return jnp.moveaxis(gated(arrays, x), 2, 1)


def gated(arrays: dict[str, Array], x: Float[Array, "*b D"]) -> Float[Array, "*b K"]:
    """The gate of one layer on hidden states."""

    def affine(name: str, x: Array) -> Array:
        bias = arrays[f"{name}_bias"]
        return x @ arrays[name] + bias.reshape(*(1,) * (x.ndim - 1), -1)

    if "in" in arrays:
        x = jax.nn.gelu(affine("in", x), approximate=False)
    return affine("out", x)


@dataclasses.dataclass(frozen=True)
class Gated(Word):
    """What a gate said of a token when it was read."""

    gate: HiddenGate
    looks = False

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AtArrival(self.gate)})

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        return view.of(AtArrival(self.gate))
