"""MesaNet's layer: at every token the ridge regression of all values on all keys so far."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, l2_norm, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.recurrent.convolution import short_conv
from kvjax.ops.recurrent.mesa import MesaState, mesa


@dataclasses.dataclass(frozen=True)
class Mesa(Recurrent):
    """MesaNet's layer (von Oswald et al., 2025, arXiv:2506.05233): o = Hkv' (Hkk + diag(ridge))^-1 q.

    q and k pass short convolutions with silu and have unit length; e^g = sigmoid(x W_g + b_g), beta =
    sigmoid(x W_b + b_b), ridge = least + softplus(r). iterations: conjugate gradient steps per token; None
    solves exactly. Deviation: the text of the paper was not at hand. Which projections pass a convolution,
    the lower bound and the norm of every head are those of flash-linear-attention.
    """

    conv: int = 4
    iterations: int | None = None
    least: float = 0.25
    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head solves a system of its own: leave groups out, got {self.groups}")

    axes = Recurrent.axes | {
        "decay": ("embed", "heads"),
        "beta": ("embed", "heads"),
        "ridge": ("heads",),
        "conv": (None, None),
    }

    def shapes(self, config: Config) -> Shapes:
        d, keys = config.d_model, self.heads * self.key_dim
        gates: Shapes = {"decay": (d, self.heads), "beta": (d, self.heads), "ridge": (keys,)}
        gates |= {name + "_bias": (self.heads,) for name in ("decay", "beta")}
        return super().shapes(config) | gates | {"conv": (self.conv, 2 * keys)}

    state_axes = {"kk": ("heads",), "kv": ("heads",), "tail": ()}

    def state(self, config: Config) -> Shapes:
        keys = self.heads * self.key_dim
        return {
            "kk": (self.heads, self.key_dim, self.key_dim),
            "kv": (self.heads, self.key_dim, self.value_dim),
            "tail": (self.conv, 2 * keys),
        }

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        flat = jnp.concatenate([linear(p, "q", x), linear(p, "k", x)], -1)
        v, keys = linear(p, "v", x), self.heads * self.key_dim
        g = jax.nn.log_sigmoid(linear(p, "decay", x).astype(jnp.float32))
        beta = jax.nn.sigmoid(linear(p, "beta", x).astype(jnp.float32))
        ridge = self.least + jax.nn.softplus(p["ridge"].astype(jnp.float32)).reshape(self.heads, -1)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            y, tail = short_conv(
                flat,
                p["conv"],
                tail=None if past is None else past["tail"],
                mask=mask,
                segments=memory.segments,
            )
            y = jax.nn.silu(y)
            q, k, values = self.split(y[..., :keys], y[..., keys:], v)
            start = None if past is None else MesaState(past["kk"], past["kv"])
            out, new = mesa(
                l2_norm(q), l2_norm(k), values, g, beta, ridge,
                initial_state=start, mask=mask, segments=memory.segments, iterations=self.iterations,
            )  # fmt: skip
            # The op symmetrises the state that it continues, which does not change a symmetric one.
            kk = (new.kk + jnp.swapaxes(new.kk, 2, 3)) / 2
            return out, {"kk": kk, "kv": new.kv, "tail": tail}

        out, state, left = memory.recur(layer, step, state)
        return linear(p, "o", self.joined(p, out, layer.config, x)), state, left
