"""Mamba's block, and MixCon's Conba block, which is based on it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.ops.recurrent.convolution import short_conv
from kvjax.ops.recurrent.selective_scan import selective_scan


@dataclasses.dataclass(frozen=True)
class Mamba(Mixer):
    """Mamba's block (Gu and Dao, 2023, arXiv:2312.00752): a selective scan between two gates.

    [x ; z] = u W_in, x = silu(conv(x)), (dt, B, C) = x W_s, dt = softplus(dt W_dt + b), A = -e^a_log,
    h = e^(dt A) h + dt x B', y = h C + D x, out = (y silu(z)) W_out. `width` channels with `states` states
    each, dt from a `rank` (None: d_model / 16, rounded up). normed: RMSNorms of dt, B and C, as in Jamba
    (arXiv:2403.19887).
    """

    width: int
    states: int = 16
    rank: int | None = None
    conv: int = 4
    normed: bool = False
    in_segments = True

    def dt_rank(self, config: Config) -> int:
        return self.rank or -(-config.d_model // 16)

    axes = {
        "inner": ("embed", None),
        "inner_gate": ("embed", None),
        **dict.fromkeys(("selection", "dt_up", "a_log", "conv"), (None, None)),
        **dict.fromkeys(("dt_bias", "skip", "conv_bias"), (None,)),
        "out": (None, "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, rank = config.d_model, self.dt_rank(config)
        shapes: Shapes = {
            "inner": (d, self.width),
            "inner_gate": (d, self.width),
            "selection": (self.width, rank + 2 * self.states),
            "dt_up": (rank, self.width),
            "dt_bias": (self.width,),
            "a_log": (self.states, self.width),
            "skip": (self.width,),
            "conv": (self.conv, self.width),
            "conv_bias": (self.width,),
            "out": (self.width, d),
        }
        norms: Shapes = {"dt_norm": (rank,), "b_norm": (self.states,), "c_norm": (self.states,)}
        return shapes | (norms if self.normed else {})

    state_axes = {"h": (), "tail": ()}

    def state(self, config: Config) -> Shapes:
        return {"h": (self.width, self.states), "tail": (self.conv, self.width)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config, rank = layer.config, self.dt_rank(layer.config)
        inner, gate = x @ p["inner"], jax.nn.silu(x @ p["inner_gate"])
        rates, skip, bias = (p[n].astype(jnp.float32) for n in ("a_log", "skip", "dt_bias"))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start, tail = (None, None) if past is None else (past["h"], past["tail"])
            y, tail = short_conv(
                inner, p["conv"], p["conv_bias"], tail=tail, mask=mask, segments=memory.segments
            )
            y = jax.nn.silu(y)
            parts = jnp.split(y @ p["selection"], [rank, rank + self.states], axis=-1)
            if self.normed:
                names = ("dt_norm", "b_norm", "c_norm")
                parts = [rms_norm(z, p[n], config.norm_eps) for z, n in zip(parts, names, strict=True)]
            dt = jax.nn.softplus((parts[0] @ p["dt_up"]).astype(jnp.float32) + bias[None, None])
            out, new = selective_scan(
                y,
                dt,
                -jnp.exp(rates).T,
                parts[1],
                parts[2],
                skip,
                initial_state=start,
                mask=mask,
                segments=memory.segments,
            )
            return out, {"h": new, "tail": tail}

        out, state, left = memory.recur(layer, step, state)
        return self.closed(p, linear(p, "out", out.astype(x.dtype) * gate)), state, left

    def closed(self, p: Params, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Postprocess the block's output; a hook for subclasses."""
        return y


@dataclasses.dataclass(frozen=True)
class Conba(Mamba):
    """MixCon's Conba block: a `Mamba` with norms whose output y is scaled, delayed and fed back.

    y1 = y * (y W_s + b_s), y2 = y1 + (y1 W_d + b_d), out = y2 - y2 K: the control input -K e of the tracking
    error e = y2 for the target 0. MixCon (ECAI 2024, doi 10.3233/FAIA240593) has no preprint; these are the
    steps of its public model code. Deviations: that code makes W_s and W_d as wide as the states and K as
    wide as the channels, which fits its own output only where these widths are equal, so all three are
    d_model wide here; and it changes K by e e' at every call, across a batch, which no sequence could
    reproduce alone: K is learned by gradient instead.
    """

    normed: bool = True

    axes = Mamba.axes | dict.fromkeys(("state_scale", "delay", "control"), (None, None))

    def shapes(self, config: Config) -> Shapes:
        square, vector = (config.d_model, config.d_model), (config.d_model,)
        control: Shapes = {"state_scale": square, "state_scale_bias": vector, "delay": square}
        return super().shapes(config) | control | {"delay_bias": vector, "control": square}

    def closed(self, p: Params, y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        y = y * linear(p, "state_scale", y)
        y = y + linear(p, "delay", y)
        return y - y @ p["control"]
