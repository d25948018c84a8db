"""Mamba-2: state-space heads, each with one decay per token, after a short convolution."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.fingerprint import ADDED
from kvjax.models.layers import Params, Shapes, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent, convolved, how_it_runs
from kvjax.ops.base.dtypes import wide
from kvjax.ops.recurrent import linear_attention as ops


@dataclasses.dataclass(frozen=True)
class Mamba2(Recurrent):
    """Mamba-2's layer (arXiv:2405.21060): heads of `value_dim` channels, `key_dim` states, `groups` of B, C.

    x, B and C pass one short convolution with a bias; y is multiplied by silu(z) and then normalised in
    `norm_groups` equal parts of its channels. The authors' code has one part for each of `groups`.

    normed: whether y is normalised after its gate ("gated"), before it ("first") or not ("no"). multipliers:
    factors on the projections z, x, B, C and dt, out_scale: the factor on the output (Falcon-H1,
    arXiv:2507.22448).
    """

    conv: int = 4
    norm_groups: int = 1
    normed: Literal["gated", "first", "no"] = dataclasses.field(default="gated", metadata=ADDED)
    multipliers: tuple[float, ...] = dataclasses.field(default=(), metadata=ADDED)
    out_scale: float = dataclasses.field(default=1.0, metadata=ADDED)
    in_segments = True

    axes = {
        "z": ("embed", "heads"),
        "dt": ("embed", "heads"),
        "xbc": ("embed", None),
        "o": ("heads", "embed"),
        "conv": (None, None),
        "conv_bias": (None,),
        **dict.fromkeys(("a_log", "dt_bias", "skip"), ("heads",)),
    }

    def check(self, config: Config) -> None:
        super().check(config)
        if self.norm_groups < 1 or self.heads * self.value_dim % self.norm_groups:
            channels = self.heads * self.value_dim
            raise ValueError(f"{channels} channels cannot be normalised in {self.norm_groups} equal parts")
        if len(self.multipliers) not in (0, 5):
            raise ValueError(f"{len(self.multipliers)} multipliers were given, expected 5: of z, x, B, C, dt")

    def shapes(self, config: Config) -> Shapes:
        d, inner, bc = config.d_model, self.heads * self.value_dim, self.key_heads * self.key_dim
        shapes: Shapes = {"z": (d, inner), "xbc": (d, inner + 2 * bc), "dt": (d, self.heads), "o": (inner, d)}
        shapes |= {"conv": (self.conv, inner + 2 * bc), "conv_bias": (inner + 2 * bc,)}
        shapes |= {} if self.normed == "no" else {"out_norm": (inner,)}
        return shapes | {name: (self.heads,) for name in ("a_log", "dt_bias", "skip")}

    state_axes = {"S": ("heads",), "tail": ()}

    def state(self, config: Config) -> Shapes:
        width = self.heads * self.value_dim + 2 * self.key_heads * self.key_dim
        return {"S": (self.heads, self.value_dim, self.key_dim), "tail": (self.conv, width)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        b, t, _ = x.shape
        flat, dt, z = self._projected(p, x)
        inner, bc = self.heads * self.value_dim, self.key_heads * self.key_dim

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            y, tail = convolved(flat, p["conv"], p["conv_bias"], memory, past, mask)
            values = y[..., :inner].reshape(b, t, self.heads, self.value_dim)
            keys = y[..., inner : inner + bc].reshape(b, t, self.key_heads, self.key_dim)
            queries = y[..., inner + bc :].reshape(keys.shape)
            out, new = self.remember(p, x, (values, dt, keys, queries), memory, past, mask)
            return out, new | {"tail": tail}

        out, state, left = memory.recur(layer, step, state)
        # Rounded once, after the norm, as in the authors' kernel.
        y, gate = out.astype(wide(x)).reshape(b, t, inner), jax.nn.silu(z.astype(wide(x)))
        y = y if self.normed == "first" else y * gate
        if self.normed != "no":
            parts, weight = y.reshape(b, t, self.norm_groups, -1), p["out_norm"].reshape(self.norm_groups, -1)
            y = rms_norm(parts, weight, layer.config.norm_eps).reshape(y.shape)
        y = linear(p, "o", (y * gate if self.normed == "first" else y).astype(x.dtype))
        return y if self.out_scale == 1 else y * jnp.asarray(self.out_scale, y.dtype), state, left

    def _projected(self, p: Params, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        """Project the inputs of the convolution, dt and z, with their multipliers."""
        flat, dt, z = x @ p["xbc"], (x @ p["dt"]).astype(jnp.float32), x @ p["z"]
        if not self.multipliers:
            return flat, dt, z
        inner, bc = self.heads * self.value_dim, self.key_heads * self.key_dim
        of_z, *of_xbc, of_dt = self.multipliers
        scale = np.repeat(of_xbc, (inner, bc, bc))
        return flat * jnp.asarray(scale, flat.dtype)[None, None], dt * of_dt, z * jnp.asarray(of_z, z.dtype)

    def remember(
        self,
        p: Params,
        x: Array,
        fed: tuple[Array, ...],
        memory: Memory,
        past: RecurrentState | None,
        mask: Array,
    ) -> tuple[Array, RecurrentState]:
        """Return (y, new state) of the recurrence over x, dt, B and C."""
        rates = (p[name].astype(jnp.float32) for name in ("a_log", "skip", "dt_bias"))
        out, new = ops.ssd(*fed, *rates, **how_it_runs(memory, past, mask))
        return out, {"S": new}
