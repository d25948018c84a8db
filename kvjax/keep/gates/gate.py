"""Gates: small networks that predict, when a token is read, how much it will matter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs, Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import BOTH
from kvjax.keep.observations.trace import ConstantTrace


@dataclasses.dataclass(frozen=True)
class Gate(Observation, FittedWord):
    """The base class of gates: one number per KV head and token, from what its layer computed for the token.

    A subclass declares the arrays it is fitted to and computes the number (`of`). looks: whether it reads
    keys or values, as plain attention has them.
    """

    fitted: Fitted | None = None
    by = ""
    looks = False
    phases = BOTH

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        raise NotImplementedError

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        """Build the gate of one layer, whose arrays are in float32."""
        raise NotImplementedError

    def __call__(self, inputs: Inputs) -> Float[Array, "B K T"]:
        assert self.fitted is not None
        arrays = inputs.fitted[self.fitted.digest]
        return self.of({name: x.astype(jnp.float32) for name, x in arrays.items()}, inputs)


@dataclasses.dataclass(frozen=True)
class HiddenGate(Gate):
    """The log of a token's importance to each head, from the layer's input (KVzap, arXiv:2601.07891).

    A linear map or, if the arrays have a hidden layer, a network with one GELU layer. fitted: "out"
    [L, X, K] and "out_bias" [L, K] with X = D; or X = the hidden width, with "in" [L, D, X] and "in_bias"
    [L, X] before them.
    """

    by = "kvzap"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        assert self.fitted is not None
        first = "in" if "in" in self.fitted.arrays else "out"
        check_sizes(self, "gate", "layers, width", first, (model.layers, model.width))
        check_sizes(self, "gate", "layers, KV heads", "out_bias", (model.layers, model.kv_heads))

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        return jnp.moveaxis(gated(arrays, inputs.hidden.astype(jnp.float32)), 2, 1)


def gated(arrays: dict[str, Array], x: Float[Array, "*b D"]) -> Float[Array, "*b K"]:
    """Apply the gate of one layer to hidden states."""

    def affine(name: str, x: Array) -> Array:
        bias = arrays[f"{name}_bias"]
        return x @ arrays[name] + bias.reshape(*(1,) * (x.ndim - 1), -1)

    if "in" in arrays:
        x = jax.nn.gelu(affine("in", x), approximate=False)
    return affine("out", x)


@dataclasses.dataclass(frozen=True)
class Gated(Word):
    """The value of a gate for a token, computed when the token was read."""

    gate: Gate

    @property
    def looks(self) -> bool:
        return self.gate.looks

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({ConstantTrace(self.gate)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return view.of(ConstantTrace(self.gate))
