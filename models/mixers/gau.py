"""FLASH's gated attention unit: attention and feed-forward in one layer, with one head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, last_axis
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, RecurrentState
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate
from kvjax.ops.recurrent.convolution import answered
from kvjax.ops.recurrent.gau import GAUState, mixed_chunk_attention


@dataclasses.dataclass(frozen=True)
class GatedUnit(Mixer):
    """FLASH's gated attention unit (Hua et al., 2022, arXiv:2202.10447): O = (U * A V) W_o.

    U, V and Z are silu(x W). The queries and keys of both attentions, squared ReLU inside chunks of `chunk`
    tokens and linear over the chunks before, are scaled and shifted copies of Z, rotated by position. Two
    such layers without feed-forwards (`NoMLP`) replace an attention and a feed-forward layer. Deviation: no
    relative position bias beside the rotation.
    """

    width: int
    key_dim: int = 128
    chunk: int = 256
    in_segments = True

    def check(self, config: Config) -> None:
        if self.chunk < 1 or self.key_dim % 2:
            raise ValueError(
                f"chunks have at least one token and keys turn in pairs: got chunk={self.chunk}, "
                f"key_dim={self.key_dim}"
            )

    axes = {
        **dict.fromkeys(("unit_gate", "unit_value", "unit_key"), ("embed", None)),
        "copy_scale": (None, None),
        "copy_shift": (None,),
        "unit_out": (None, "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, z = config.d_model, self.key_dim
        return {
            "unit_gate": (d, self.width),
            "unit_value": (d, self.width),
            "unit_key": (d, z),
            "copy_scale": (4, z),
            "copy_shift": (4 * z,),
            "unit_out": (self.width, d),
        }

    state_axes = {"total": ("heads",), "quad_k": (), "lin_k": (), "values": (), "length": (), "answer": ()}

    def state(self, config: Config) -> Shapes:
        keys = (self.chunk, self.key_dim)
        return {
            # One head, in which codecs encode matrices.
            "total": (1, self.key_dim, self.width),
            "quad_k": keys,
            "lin_k": keys,
            "values": (self.chunk, self.width),
            "length": (),
            "answer": (config.d_model,),
        }

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        gate, v, z = (jax.nn.silu(x @ p[name]) for name in ("unit_gate", "unit_value", "unit_key"))
        shift = p["copy_shift"].reshape(4, self.key_dim)
        copies = [z * last_axis(p["copy_scale"][i], z) + last_axis(shift[i], z) for i in range(4)]
        cos, sin = angles(layer.config.rope, memory.pos, self.key_dim, dtype=wide(z))
        quad_q, quad_k, lin_q, lin_k = (rotate(y, cos, sin) for y in copies)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = None
            if past is not None:
                slots = (past[n] for n in ("quad_k", "lin_k", "values", "length"))
                start = GAUState(past["total"][:, 0], *slots)
            out, new = mixed_chunk_attention(
                quad_q,
                quad_k,
                lin_q,
                lin_k,
                v,
                chunk=self.chunk,
                initial_state=start,
                mask=mask,
                segments=memory.segments,
            )
            y = (gate * out.astype(x.dtype)) @ p["unit_out"]
            # A full chunk has been added to the sum, so its last token cannot be read again.
            y, answer = answered(y, jnp.zeros_like(x[:, 0]) if past is None else past["answer"], mask)
            slots = (part.astype(x.dtype) for part in (new.quad_k, new.lin_k, new.v))
            names = ("total", "quad_k", "lin_k", "values", "length", "answer")
            return y, dict(zip(names, (new.total[:, None], *slots, new.length, answer), strict=True))

        return memory.recur(layer, step, state)
