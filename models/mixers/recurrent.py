"""Linear attentions with a state of constant size: decays, deltas, short convolutions, gated norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, l2_norm, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate
from kvjax.ops.recurrent import linear_attention as ops
from kvjax.ops.recurrent.convolution import short_conv
from kvjax.ops.recurrent.slot_attention import GSAState, gsa
from kvjax.state.axes import pinned_to


def how_it_runs(memory: Memory, past: RecurrentState | None, mask: Bool[Array, "B T"]) -> dict[str, Any]:
    """Collect the arguments, beside their tokens, of operations with a state `S`."""
    return dict(
        mask=mask, initial_state=None if past is None else past["S"], segments=memory.segments,
        implementation=memory.implementation, on=memory.on_mesh,
    )  # fmt: skip


def convolved(
    x: Float[Array, "B T C"], weight: Float[Array, "W C"], bias: Float[Array, "C"] | None, memory: Memory,
    past: RecurrentState | None, mask: Bool[Array, "B T"], *, active: bool = True,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:  # fmt: skip
    """Return the short convolution of x after the state's tail, with silu if active, and the new tail."""

    def whole(x: Array) -> Array:
        # Tails are replicated, so that new tokens are communicated rather than tails.
        return pinned_to(x, memory.on_mesh, "batch", None, None)

    tail = None if past is None else past["tail"]
    y, tail = short_conv(whole(x), weight, bias, tail=tail, mask=mask, segments=memory.segments)
    return whole(jax.nn.silu(y) if active else y), tail


@dataclasses.dataclass(frozen=True)
class Recurrent(Mixer, abstract=True):
    """The base class of recurrent mixers: heads, and a state `S` [heads, key_dim, value_dim] in float32.

    groups: query and key heads, each serving heads / groups value heads (None: as many).
    """

    heads: int
    key_dim: int
    value_dim: int
    groups: int | None = None

    @property
    def key_heads(self) -> int:
        return self.groups or self.heads

    def check(self, config: Config) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.key_heads} key heads cannot serve {self.heads} value heads evenly")

    state_axes = {"S": ("heads",)}

    def state(self, config: Config) -> Shapes:
        return {"S": (self.heads, self.key_dim, self.value_dim)}

    axes = {
        "q": ("embed", "kv_heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "heads"),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, keys, values = config.d_model, self.key_heads * self.key_dim, self.heads * self.value_dim
        return {
            "q": (d, keys),
            "k": (d, keys),
            "v": (d, values),
            "o": (values, d),
            "out_norm": (self.value_dim,),
        }

    def split(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Split flat projections into heads."""
        b, t = q.shape[:2]
        keys, values = (b, t, self.key_heads, self.key_dim), (b, t, self.heads, self.value_dim)
        return q.reshape(keys), k.reshape(keys), v.reshape(values)

    def joined(self, p: Params, out: Float[Array, "B T H V"], config: Config, like: Array) -> Array:
        """Normalise every head, then concatenate all heads in the dtype of the layer's input `like`."""
        return rms_norm(out, p["out_norm"], config.norm_eps).astype(like.dtype).reshape(*like.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class Retention(Recurrent):
    """RetNet's layer (arXiv:2307.08621): rotated q and k, constant decays, norm per head, swish gate.

    With `gated`, the decay is YOCO's gated retention (arXiv:2405.05254): log sigmoid(x W) / 16 per head. The
    angles are those of the config's rotation; RetNet's own differ in their frequencies.
    """

    gated: bool = False
    in_place = frozenset({"S"})
    in_segments = True

    axes = Recurrent.axes | {"out_gate": ("embed", "heads"), "decay": ("embed", "heads")}

    def shapes(self, config: Config) -> Shapes:
        shapes = super().shapes(config) | {"out_gate": (config.d_model, self.heads * self.value_dim)}
        return shapes | ({"decay": (config.d_model, self.heads)} if self.gated else {})

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))
        cos, sin = angles(config.rope, memory.pos[..., None], self.key_dim, dtype=wide(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            how = how_it_runs(memory, past, mask)
            if self.gated:
                g = jax.nn.log_sigmoid((x @ p["decay"]).astype(jnp.float32)) / 16
                out, new = ops.gla(q, k, v, g, **how)
            else:
                out, new = ops.retention(q, k, v, **how)
            return out, {"S": new}

        out, state, left = memory.recur(layer, step, state)
        y = self.joined(p, out, config, x) * jax.nn.silu(x @ p["out_gate"])
        return linear(p, "o", y), state, left


@dataclasses.dataclass(frozen=True)
class GatedLinear(Recurrent):
    """GLA's layer (arXiv:2312.06635, section 4.4): a decay per key channel from a low rank, swish gate."""

    rank: int = 16
    in_place = frozenset({"S"})
    in_segments = True

    axes = Recurrent.axes | {
        "decay_down": ("embed", None),
        "decay_up": (None, "heads"),
        "out_gate": ("embed", "heads"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, keys = config.d_model, self.heads * self.key_dim
        decay = {"decay_down": (d, self.rank), "decay_up": (self.rank, keys), "decay_up_bias": (keys,)}
        return super().shapes(config) | decay | {"out_gate": (d, self.heads * self.value_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))
        low = linear(p, "decay_up", x @ p["decay_down"]).reshape(q.shape)
        g = jax.nn.log_sigmoid(low.astype(jnp.float32)) / 16

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            out, new = ops.gla(q, k, v, g, **how_it_runs(memory, past, mask))
            return out, {"S": new}

        out, state, left = memory.recur(layer, step, state)
        y = self.joined(p, out, layer.config, x) * jax.nn.silu(x @ p["out_gate"])
        return linear(p, "o", y), state, left


@dataclasses.dataclass(frozen=True)
class GatedSlot(Recurrent):
    """GSA's layer (arXiv:2409.07146): softmax over `count` slots per head, which forget and are written to.

        f = sigmoid(x W_f)^(1 / 8);  K = K Diag(f) + k (1 - f)', V = Diag(f) V + (1 - f) v'
        y = RMSNorm(silu(V' softmax(K' q))) W_o, with silu on q, k and v

    The text of the paper was not at hand: the activations, the absent scale and the norm over all heads
    together are those of the library flash-linear-attention.
    """

    count: int = 64
    in_segments = True

    axes = Recurrent.axes | {"forget": ("embed", "kv_heads")}

    def shapes(self, config: Config) -> Shapes:
        shapes = super().shapes(config) | {"forget": (config.d_model, self.key_heads * self.count)}
        return shapes | {"out_norm": (self.heads * self.value_dim,)}

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head has slots of its own: leave groups out, got groups={self.groups}")

    state_axes = {"K": ("heads",), "V": ("heads",)}

    def state(self, config: Config) -> Shapes:
        return {"K": (self.heads, self.key_dim, self.count), "V": (self.heads, self.count, self.value_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(jax.nn.silu(linear(p, name, x)) for name in "qkv"))
        low = (x @ p["forget"]).astype(jnp.float32).reshape(*x.shape[:2], self.heads, self.count)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = None if past is None else GSAState(past["K"], past["V"])
            # The op's own mask would also remove the query, which a token that is read again needs.
            g = jnp.where(mask[..., None, None], jax.nn.log_sigmoid(low) / 8, 0.0)
            out, new = gsa(
                q, k, v, -jnp.expm1(g), g, initial_state=start, segments=memory.segments, scale=1.0
            )
            return out, {"K": new.k, "V": new.v}

        out, state, left = memory.recur(layer, step, state)
        y = jax.nn.silu(out).reshape(*x.shape[:2], -1)
        y = rms_norm(y, p["out_norm"], layer.config.norm_eps).astype(x.dtype)
        return linear(p, "o", y), state, left


@dataclasses.dataclass(frozen=True)
class _Delta(Recurrent, abstract=True):
    """The base class of delta rules: q, k and v pass a short convolution, then q and k get unit length."""

    conv: int = 4
    in_place = frozenset({"S"})
    in_segments = True

    axes = Recurrent.axes | {"beta": ("embed", "heads"), "conv": (None, None)}

    def shapes(self, config: Config) -> Shapes:
        width = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        more = {"beta": (config.d_model, self.heads), "conv": (self.conv, width)}
        return super().shapes(config) | more

    state_axes = {"S": ("heads",), "tail": ()}

    def state(self, config: Config) -> Shapes:
        width = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        return super().state(config) | {"tail": (self.conv, width)}

    def run(
        self, p: Params, x: Array, g: Array, layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T H V"], GroupState, Left]:
        """Compute o of the gated delta rule with log decays g, which are per head or per key channel."""
        flat = jnp.concatenate([linear(p, name, x) for name in "qkv"], -1)
        beta = jax.nn.sigmoid((x @ p["beta"]).astype(jnp.float32))
        keys = self.key_heads * self.key_dim

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            y, tail = convolved(flat, p["conv"], None, memory, past, mask)
            q, k, v = self.split(y[..., :keys], y[..., keys : 2 * keys], y[..., 2 * keys :])
            fed = (l2_norm(q), l2_norm(k), v, g, beta)
            out, new = self.remember(p, x, fed, memory, past, mask)
            return out, new | {"tail": tail}

        return memory.recur(layer, step, state)

    def remember(
        self,
        p: Params,
        x: Array,
        fed: tuple[Array, ...],
        memory: Memory,
        past: RecurrentState | None,
        mask: Array,
    ) -> tuple[Array, RecurrentState]:
        """Return (o, new state) of the recurrence over q, k, v, g and beta."""
        out, new = ops.gated_delta_rule(*fed, **how_it_runs(memory, past, mask))
        return out, {"S": new}


@dataclasses.dataclass(frozen=True)
class GatedDelta(_Delta):
    """Gated DeltaNet's layer (arXiv:2412.06464, as in Qwen3-Next): one decay per value head, swish gate.

    g = -e^a_log softplus(x W + dt_bias); the norm of a head is multiplied by silu(x W_z).
    """

    axes = _Delta.axes | {
        "decay": ("embed", "heads"),
        "out_gate": ("embed", "heads"),
        "a_log": ("heads",),
        "dt_bias": ("heads",),
    }

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        decay: Shapes = {"decay": (d, self.heads), "a_log": (self.heads,), "dt_bias": (self.heads,)}
        return super().shapes(config) | decay | {"out_gate": (d, self.heads * self.value_dim)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        rate = jnp.exp(p["a_log"].astype(jnp.float32))[None, None]
        dt = (x @ p["decay"]).astype(jnp.float32) + p["dt_bias"].astype(jnp.float32)[None, None]
        out, state, left = self.run(p, x, -rate * jax.nn.softplus(dt), layer, memory, state)
        gate = jax.nn.silu((x @ p["out_gate"]).astype(jnp.float32))
        y = (self.joined(p, out, layer.config, x).astype(jnp.float32) * gate).astype(x.dtype)
        return linear(p, "o", y), state, left


@dataclasses.dataclass(frozen=True)
class KimiDelta(_Delta):
    """KDA's layer (Kimi Linear, arXiv:2510.26692, section 4): a decay per key channel, sigmoid gate.

    Decay and gate are low-rank projections, of rank value_dim unless given; the decay is `kda_gate` of
    `kvjax.ops`. gate_bias: the gate has a bias (fla's layer; the authors' checkpoints have none).
    """

    rank: int | None = None
    lower_bound: float | None = None
    gate_bias: bool = True

    axes = _Delta.axes | {
        "decay_down": ("embed", None),
        "out_gate_down": ("embed", None),
        "decay_up": (None, "heads"),
        "out_gate_up": (None, "heads"),
        "a_log": ("heads",),
        "dt_bias": ("heads",),
    }

    def shapes(self, config: Config) -> Shapes:
        d, r = config.d_model, self.rank or self.value_dim
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        shapes: Shapes = {
            "decay_down": (d, r),
            "decay_up": (r, keys),
            "a_log": (self.heads,),
            "dt_bias": (keys,),
        }
        gate: Shapes = {"out_gate_down": (d, r), "out_gate_up": (r, values)}
        gate |= {"out_gate_up_bias": (values,)} if self.gate_bias else {}
        return super().shapes(config) | shapes | gate

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        low = (x @ p["decay_down"] @ p["decay_up"]).astype(jnp.float32)
        low = low.reshape(*x.shape[:2], self.heads, self.key_dim)
        a_log, bias = (p[name].astype(jnp.float32) for name in ("a_log", "dt_bias"))
        g = ops.kda_gate(low, a_log, bias, lower_bound=self.lower_bound)
        out, state, left = self.run(p, x, g, layer, memory, state)
        gate = jax.nn.sigmoid(linear(p, "out_gate_up", x @ p["out_gate_down"]))
        return linear(p, "o", self.joined(p, out, layer.config, x) * gate), state, left
