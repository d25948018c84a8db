"""HGRN's layer: a gated sum per channel, without heads, keys or queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.ops.recurrent.hgrn import hgrn


@dataclasses.dataclass(frozen=True)
class Hgrn(Mixer):
    """HGRN's layer (Qin et al., 2023, arXiv:2311.04823): h = a h + (1 - a) c, y = (norm(h) * g) W_o.

    c = silu(x W_c), g = silu(x W_g) and a = lower_bound + (1 - lower_bound) sigmoid(x W_a), `width` channels.
    The paper's lower bounds grow with depth from 0: give each layer its own. Deviations: h is real, as in
    flash-linear-attention, while the paper's is complex and also rotates by an angle per channel; and lower
    bounds are given, while the paper learns them.
    """

    width: int
    lower_bound: float = 0.0
    in_segments = True

    def check(self, config: Config) -> None:
        if not 0 <= self.lower_bound < 1:
            raise ValueError(f"lower_bound must be in [0, 1), got {self.lower_bound}")

    axes = {**dict.fromkeys(("candidate", "keep", "out_gate"), ("embed", None)), "out": (None, "embed")}

    def shapes(self, config: Config) -> Shapes:
        d, e = config.d_model, self.width
        inner: Shapes = {name: (d, e) for name in ("candidate", "keep", "out_gate")}
        return inner | {"out": (e, d), "out_norm": (e,)}

    state_axes = {"h": ()}

    def state(self, config: Config) -> Shapes:
        return {"h": (self.width,)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        f = (x @ p["keep"]).astype(jnp.float32)
        decay = self.lower_bound + (1 - self.lower_bound) * jax.nn.sigmoid(f)
        # The logarithm of a sigmoid is finite even if the sigmoid is zero.
        g = jnp.log(decay) if self.lower_bound else jax.nn.log_sigmoid(f)
        new = (1 - decay) * jax.nn.silu((x @ p["candidate"]).astype(jnp.float32))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = None if past is None else past["h"]
            out, last = hgrn(new, g, initial_state=start, mask=mask, segments=memory.segments)
            return out, {"h": last}

        out, state, left = memory.recur(layer, step, state)
        y = rms_norm(out, p["out_norm"], layer.config.norm_eps).astype(x.dtype)
        return linear(p, "out", y * jax.nn.silu(x @ p["out_gate"])), state, left
