"""Softmax attention with learned decays of the logits, or with reflections between key and query."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, l2_norm, linear, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.kept_tokens import KeptTokens, kept_of, state_of
from kvjax.ops.attention.forgetting import forgetting_attention
from kvjax.ops.attention.path_attention import path_attention
from kvjax.ops.recurrent.convolution import short_conv


@dataclasses.dataclass(frozen=True)
class Forgetting(KeptTokens):
    """The Forgetting Transformer's layer (FoX; Lin et al., 2025, arXiv:2503.02130), without positions.

    softmax(q_t k_s / sqrt(K) + sum_{s < l <= t} g_l) v with g = log sigmoid(x W_f + b_f) per query head. With
    `norm`, queries and keys have RMSNorms per head, as in the paper's "Pro" block, whose shifts of keys and
    values and whose gated output are not implemented. It keeps k, v and how much every slot has decayed
    since.
    """

    norm: bool = False
    grows = frozenset({"k", "v", "since"})
    in_segments = True

    axes = KeptTokens.axes | {"forget_gate": ("embed", "heads")}

    def shapes(self, config: Config) -> Shapes:
        gates: Shapes = {"forget_gate": (config.d_model, self.heads), "forget_gate_bias": (self.heads,)}
        norms: Shapes = {"q_norm": (self.key_dim,), "k_norm": (self.key_dim,)} if self.norm else {}
        return super().shapes(config) | gates | norms

    state_axes = {"since": (None, "heads")}

    def state(self, config: Config) -> Shapes:
        return super().state(config) | {"since": (0, self.heads)}

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        if self.norm:
            q, k = (rms_norm(y, p[n], layer.config.norm_eps) for y, n in ((q, "q_norm"), (k, "k_norm")))
        g = jax.nn.log_sigmoid(linear(p, "forget_gate", x).astype(jnp.float32))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            out, new = forgetting_attention(
                q, k, v, g, mask=mask, segments=memory.segments, **kept_of(past, ("k", "v", "since"))
            )
            return out, state_of(new, {"k": x.dtype, "v": x.dtype})

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left


@dataclasses.dataclass(frozen=True)
class Path(KeptTokens):
    """PaTH attention's layer (Yang et al., 2025, arXiv:2505.16381), its positions products of reflections.

    P_l = I - beta_l w_l w_l' with w of unit length, from a low rank of x and a short convolution with silu,
    and beta = 2 sigmoid(x W_b). With `forgets`, logits also decay by gates (PaTH-FoX). Every token reflects
    all kept keys, so keys are float32. Deviation: the text of the paper was not at hand; the low rank
    (`rank`, None: of key_dim; 32 there) and the convolution's width of 3 are those of flash-linear-attention.
    """

    rank: int | None = None
    conv: int = 3
    forgets: bool = False
    grows = frozenset({"k", "v", "since"})
    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups not in (None, self.heads):
            raise ValueError(f"every head has reflections of its own: leave groups out, got {self.groups}")

    axes = KeptTokens.axes | {
        "w_down": ("embed", None),
        "w_up": (None, "heads"),
        "conv": (None, None),
        "beta": ("embed", "heads"),
        "forget_gate": ("embed", "heads"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, width, rank = config.d_model, self.heads * self.key_dim, self.rank or self.key_dim
        path: Shapes = {"w_down": (d, rank), "w_up": (rank, width), "conv": (self.conv, width)}
        path |= {"beta": (d, self.heads), "beta_bias": (self.heads,)}
        gates: Shapes = {"forget_gate": (d, self.heads), "forget_gate_bias": (self.heads,)}
        return super().shapes(config) | path | (gates if self.forgets else {})

    state_axes = {"since": (None, "heads"), "tail": ()}

    def state(self, config: Config) -> Shapes:
        tail = {"tail": (self.conv, self.heads * self.key_dim)}
        return super().state(config) | {"since": (0, self.heads)} | tail

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        low = x @ p["w_down"] @ p["w_up"]
        beta = 2 * jax.nn.sigmoid(linear(p, "beta", x).astype(jnp.float32))
        g = jax.nn.log_sigmoid(linear(p, "forget_gate", x).astype(jnp.float32)) if self.forgets else None

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            tail = None if past is None else past["tail"]
            y, tail = short_conv(low, p["conv"], tail=tail, mask=mask, segments=memory.segments)
            w = l2_norm(jax.nn.silu(y).astype(jnp.float32).reshape(q.shape))
            out, new = path_attention(
                q, k, v, w, beta, g, mask=mask, segments=memory.segments, **kept_of(past, ("k", "v", "since"))
            )
            return out, state_of(new, {"v": x.dtype}) | {"tail": tail}

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left
