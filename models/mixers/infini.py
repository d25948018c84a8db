"""Infini-attention: softmax within a segment, a linear memory of all segments before it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.recurrent import Recurrent
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate
from kvjax.ops.recurrent.convolution import answered
from kvjax.ops.recurrent.infini import InfiniState, infini_attention


@dataclasses.dataclass(frozen=True)
class Infini(Recurrent):
    """Infini-attention's layer (Munkhdalai et al., 2024, arXiv:2404.07143): constant memory at any length.

    A learned share per head mixes the memory's output with that of the open segment of `segment` tokens,
    whose keys are rotated by the config's RoPE; those of the memory are not. delta: only what the memory does
    not recall is written. RecurrentState: `memory` and `opened` (what the open segment will add), [heads,
    key_dim, value_dim + 1], the open segment's `k`, `v` and `length`, and the last token's output, `answer`.
    """

    segment: int = 2048
    delta: bool = True
    in_segments = True

    def check(self, config: Config) -> None:
        if self.groups is not None or self.segment < 1 or self.key_dim % 2:
            raise ValueError(
                "every head has a memory of its own, of segments of at least one token and keys that turn in "
                f"pairs: got groups={self.groups}, segment={self.segment}, key_dim={self.key_dim}"
            )

    axes = Recurrent.axes | {"memory_share": ("heads",)}

    def shapes(self, config: Config) -> Shapes:
        shapes = {name: shape for name, shape in super().shapes(config).items() if name != "out_norm"}
        return shapes | {"memory_share": (self.heads,)}

    state_axes = {
        "memory": ("heads",),
        "opened": ("heads",),
        "k": (None, "heads"),
        "v": (None, "heads"),
        "length": (),
        "answer": (),
    }

    def state(self, config: Config) -> Shapes:
        memory = (self.heads, self.key_dim, self.value_dim + 1)
        return {
            "memory": memory,
            "opened": memory,
            "k": (self.segment, self.heads, self.key_dim),
            "v": (self.segment, self.heads, self.value_dim),
            "length": (),
            "answer": (config.d_model,),
        }

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.split(*(linear(p, name, x) for name in "qkv"))
        cos, sin = angles(layer.config.rope, memory.pos[..., None], self.key_dim, dtype=wide(x))
        near_q, near_k = rotate(q, cos, sin), rotate(k, cos, sin)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            start = None if past is None else InfiniState(*(past[n] for n in InfiniState._fields))
            out, new = infini_attention(
                q, k, v, p["memory_share"], segment_tokens=self.segment, delta=self.delta,
                q_local=near_q, k_local=near_k, initial_state=start, mask=mask,
                segments=memory.segments,
            )  # fmt: skip
            y = linear(p, "o", out.astype(x.dtype).reshape(*x.shape[:2], -1))
            y, answer = answered(y, jnp.zeros_like(x[:, 0]) if past is None else past["answer"], mask)
            new = new._replace(k=new.k.astype(x.dtype), v=new.v.astype(x.dtype))
            return y, new._asdict() | {"answer": answer}

        return memory.recur(layer, step, state)
