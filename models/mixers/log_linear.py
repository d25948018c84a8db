"""Log-linear attention: layers whose memory is one state per power of two of distance.

Log-Linear Attention (Guo et al., 2025, arXiv:2506.04761). A layer has `levels` states instead of one, and a
token weights its read of level l by lambda_l = softplus(scale_l (x W)_l), per head. n tokens are separated as
in the paper if levels >= log2 n + 1; tokens further away share the topmost level. The text of the paper was
not at hand: lambda is that of flash-linear-attention's log-linear Mamba-2, for both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.mesh.on_mesh import Axes
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes
from kvjax.models.mixer import Memory, RecurrentState
from kvjax.models.mixers.mamba2 import Mamba2
from kvjax.models.mixers.recurrent import GatedDelta
from kvjax.ops.recurrent.log_linear import LevelState, log_linear_attention, log_linear_gated_delta


def level_shapes(config: Config, heads: int, levels: int) -> Shapes:
    return {"level": (config.d_model, heads * levels), "level_scale": (heads, levels)}


LEVEL_AXES: dict[str, Axes] = {"level": ("embed", "heads"), "level_scale": ("heads", None)}


def level_weights(p: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T H L"]:
    """softplus(scale_l (x W)_l), in float32."""
    scale = p["level_scale"].astype(jnp.float32)
    return jax.nn.softplus(
        (x @ p["level"]).astype(jnp.float32).reshape(*x.shape[:2], *scale.shape) * scale[None, None]
    )


def continuing(memory: Memory, past: RecurrentState | None, mask: Bool[Array, "B T"]) -> dict[str, Any]:
    """Arguments for the start of the operation: the state of earlier tokens, and their number.

    The number comes from the position of the first new token; a last token that is read again has been
    counted already. Kernels exist for single tokens alone, so `implementation` is passed on for those.
    """
    before = memory.pos[:, 0] + (~mask[:, 0]).astype(jnp.int32)
    state = None if past is None else LevelState(past["levels"], before)
    one = state is not None and memory.pos.shape[1] == 1
    forced = memory.implementation if one else None
    return dict(initial_state=state, segments=memory.segments, implementation=forced, on=memory.on_mesh)


@dataclasses.dataclass(frozen=True)
class LogLinearDelta(GatedDelta):
    """Log-linear Gated DeltaNet: every level is decayed and erased by e^g (I - beta k k')."""

    levels: int = 16
    in_place = frozenset({"levels"})

    axes = GatedDelta.axes | LEVEL_AXES

    def shapes(self, config: Config) -> Shapes:
        return super().shapes(config) | level_shapes(config, self.heads, self.levels)

    state_axes = {"levels": (None, "heads"), "tail": ()}

    def state(self, config: Config) -> Shapes:
        state = super().state(config)
        return {"levels": (self.levels, *state["S"]), "tail": state["tail"]}

    def remember(
        self,
        p: Params,
        x: Array,
        fed: tuple[Array, ...],
        memory: Memory,
        past: RecurrentState | None,
        mask: Array,
    ) -> tuple[Array, RecurrentState]:
        q, k, v, g, beta = fed
        out, new = log_linear_gated_delta(
            q, k, v, g, beta, level_weights(p, x), mask=mask, **continuing(memory, past, mask)
        )
        return out, {"levels": new.levels}


@dataclasses.dataclass(frozen=True)
class LogLinearMamba2(Mamba2):
    """Log-linear Mamba-2: every level decays by e^(-e^A dt), and y has D x added."""

    levels: int = 16
    in_place = frozenset({"levels"})

    axes = Mamba2.axes | LEVEL_AXES

    def shapes(self, config: Config) -> Shapes:
        return super().shapes(config) | level_shapes(config, self.heads, self.levels)

    state_axes = {"levels": (None, "heads"), "tail": ()}

    def state(self, config: Config) -> Shapes:
        levels = (self.levels, self.heads, self.key_dim, self.value_dim)
        return {"levels": levels, "tail": super().state(config)["tail"]}

    def remember(
        self,
        p: Params,
        x: Array,
        fed: tuple[Array, ...],
        memory: Memory,
        past: RecurrentState | None,
        mask: Array,
    ) -> tuple[Array, RecurrentState]:
        values, dt, keys, queries = fed
        a_log, skip, bias = (p[n].astype(jnp.float32)[None, None] for n in ("a_log", "skip", "dt_bias"))
        values, dt = values.astype(jnp.float32), jax.nn.softplus(dt + bias)
        out, new = log_linear_attention(
            queries, keys, values * dt[..., None], -jnp.exp(a_log) * dt, level_weights(p, x),
            mask=mask, **continuing(memory, past, mask),
        )  # fmt: skip
        return out + skip[..., None] * values, {"levels": new.levels}
