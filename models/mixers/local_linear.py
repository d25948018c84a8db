"""Local linear attention as a layer: per query a regression of the values on the keys it attends to."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.kept_tokens import KeptTokens, kept_of, rotated, state_of
from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.local_linear import local_linear_attention, parallax


@dataclasses.dataclass(frozen=True)
class LocalLinear(KeptTokens):
    """Local Linear Attention (Zuo et al., 2025, arXiv:2510.01450), or Parallax (2605.29157) with `learned`.

    o = E_p[v] - Cov_p(v, k) r with p the softmax of rotated queries and keys. r solves the ridge regression
    of the paper, exactly or by `iterations` steps of conjugate gradients; Parallax has r = x W_r, rotated
    like queries. It keeps k and v. No method may compress them, since a regression on fewer keys has another
    solution.
    """

    ridge: float = 0.1
    iterations: int | None = None
    learned: bool = False
    in_segments = True

    def check(self, config: Config) -> None:
        super().check(config)
        if self.ridge <= 0:
            raise ValueError(
                f"ridge must be > 0, because few keys do not determine a slope; got {self.ridge}"
            )

    axes = KeptTokens.axes | {"probe": ("embed", "heads")}

    def shapes(self, config: Config) -> Shapes:
        probe: Shapes = {"probe": (config.d_model, self.heads * self.key_dim)} if self.learned else {}
        return super().shapes(config) | probe

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        q, k = (rotated(layer.config, y, memory.pos) for y in (q, k))

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            held = kept_of(past, ("k", "v"))
            before, capacity = held.get("initial_state"), held.get("capacity")
            slots, at = cache.append({"k": k, "v": v}, before, memory.segments, mask, capacity)
            where: dict[str, Any] = dict(
                q_pos=at.slot,
                k_pos=jnp.where(_used(slots), _numbers(slots), -1)[:, None],
                segments=memory.segments,
            )
            new = slots.kept["k"], slots.kept["v"]
            if self.learned:
                r = rotated(layer.config, linear(p, "probe", x).reshape(q.shape), memory.pos)
                out = parallax(q, r, *new, **where)
            else:
                out = local_linear_attention(q, *new, ridge=self.ridge, iterations=self.iterations, **where)
            out = cache.checked(out, at.slot[..., None], slots.capacity)
            return out, state_of(slots, {"k": x.dtype, "v": x.dtype})

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left


def _numbers(slots: cache.TokenCache) -> Array:
    return jnp.arange(slots.capacity, dtype=jnp.int32)[None]


def _used(slots: cache.TokenCache) -> Bool[Array, "B S"]:
    return _numbers(slots) < slots.count[:, None]
