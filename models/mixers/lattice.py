"""Lattice's layer: slots of unit length, each updated orthogonally to itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.recurrent.lattice import lattice


@dataclasses.dataclass(frozen=True)
class Lattice(Recurrent):
    """Lattice's layer (Karami et al., 2025, arXiv:2504.05646): `key_dim` slots per head, a step per token.

    k and q are coordinates over the slots: softmax(x W). The step size is sigmoid(x W_s) per head. A row
    starts from learned slots. Deviation: the text of the paper was not at hand. The decoding objective is
    implemented (`kvjax.ops.recurrent.lattice` says what is not); the softmax of the coordinates, the step and
    the norm of every head are our choice.
    """

    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head has slots of its own: leave groups out, got {self.groups}")

    axes = Recurrent.axes | {"beta": ("embed", "heads"), "slots": ("heads", None, None)}

    def shapes(self, config: Config) -> Shapes:
        slots = (self.heads, self.key_dim, self.value_dim)
        return super().shapes(config) | {"beta": (config.d_model, self.heads), "slots": slots}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))
        q, k = (jax.nn.softmax(y.astype(jnp.float32)) for y in (q, k))
        size = jax.nn.sigmoid((x @ p["beta"]).astype(jnp.float32))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = jnp.broadcast_to(p["slots"].astype(jnp.float32)[None], (x.shape[0], *p["slots"].shape))
            if past is not None:
                # An emptied row has zeros, which have no direction: it starts anew from learned slots.
                used = (past["S"] != 0).any((1, 2, 3))[:, None, None, None]
                start = jnp.where(used, past["S"], start)
            out, new = lattice(
                q, k, v, size, initial_state=start, slots=p["slots"], mask=mask, segments=memory.segments
            )
            return out, {"S": new}

        out, state, left = memory.recur(layer, step, state)
        return linear(p, "o", self.joined(p, out, layer.config, x)), state, left
