"""Native sparse attention as a layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.base.ranges import Count, Whole
from kvjax.models.config import Config
from kvjax.models.layers import Params, Shapes, linear
from kvjax.models.mixer import GroupState, Layer, Left, Memory, RecurrentState
from kvjax.models.mixers.kept_tokens import KeptTokens, kept_of, rotated, state_of
from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.native_sparse import BlockSizes, blocks_of, native_sparse_attention


@dataclasses.dataclass(frozen=True)
class NativeSparse(KeptTokens):
    """NSA, Native Sparse Attention (Yuan et al., 2025, arXiv:2502.11089, eq. 5-12).

        o = sum_c g_c Attn(q, K_c), c one of compressed blocks, selected blocks and a window, g = sigmoid(x W)
        phi(k_1 .. k_l) = mean k_i + W_2 silu(W_1 [k_1 + e_1; ...; k_l + e_l])

    Compressed blocks have `compress` tokens, one every `stride` tokens. A query reads `top` blocks of `block`
    tokens, for all query heads of a KV head: the `initial` first, the `local` newest, and those to whose
    compressed blocks it attends most. window: the newest tokens. phi compresses keys, which are rotated, and
    values, by one MLP each for all KV heads. It keeps k and v, and compresses anew in every step. No method
    may compress them, because blocks are of neighbours.

    Deviations: the branches share keys and values (the paper gives each its own), and phi has the mean as a
    skip connection, so that trained attention can be converted.
    """

    compress: Count = 32
    stride: Count = 16
    block: Count = 64
    top: Count = 16
    initial: Whole = 1
    local: Whole = 2
    window: Count = 512
    # Blocks are those of a row, so several texts cannot share one.
    in_segments = False

    @property
    def sizes(self) -> BlockSizes:
        """Of its blocks."""
        return BlockSizes(*(getattr(self, name) for name in BlockSizes._fields))

    def check(self, config: Config) -> None:
        super().check(config)
        for name in ("compress", "block"):
            if getattr(self, name) % self.stride:
                raise ValueError(
                    f"{name} must be a multiple of stride={self.stride}, got {getattr(self, name)}"
                )
        if self.local < 1 or self.top < self.initial + self.local:
            raise ValueError(
                f"top={self.top} blocks hold the initial={self.initial} and local={self.local} ones: "
                "expected local of at least 1 and top of at least their sum"
            )

    axes = KeptTokens.axes | {
        "branch_gate": ("embed", None),
        **{f"phi_{x}_{n}": (None, None) for x in "kv" for n in ("place", "in", "out")},
    }

    def shapes(self, config: Config) -> Shapes:
        phi: Shapes = {}
        for x, width in (("k", self.key_dim), ("v", self.value_dim)):
            phi |= {
                f"phi_{x}_place": (self.compress, width),
                f"phi_{x}_in": (self.compress * width, width),
                f"phi_{x}_out": (width, width),
            }
        gates: Shapes = {
            "branch_gate": (config.d_model, self.heads * 3),
            "branch_gate_bias": (self.heads * 3,),
        }
        return super().shapes(config) | gates | phi

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        q, k, v = self.projected(p, x)
        q, k = (rotated(layer.config, y, memory.pos) for y in (q, k))
        gates = jax.nn.sigmoid(linear(p, "branch_gate", x)).reshape(*x.shape[:2], self.heads, 3)

        def step(past: RecurrentState | None, mask: Bool[Array, "B T"]) -> tuple[Array, RecurrentState]:
            held = kept_of(past, ("k", "v"))
            before, capacity = held.get("initial_state"), held.get("capacity")
            slots, at = cache.append({"k": k, "v": v}, before, None, mask, capacity)
            compressed = self.phi(p, "k", slots.kept["k"]), self.phi(p, "v", slots.kept["v"])
            out = native_sparse_attention(q, gates, slots, at, compressed, self.sizes)
            out = cache.checked(out, at.slot[..., None], slots.capacity)
            return out, state_of(slots, {"k": x.dtype, "v": x.dtype})

        out, state, left = memory.recur(layer, step, state)
        return self.out(p, out, x), state, left

    def phi(self, p: Params, of: str, x: Float[Array, "B S H K"]) -> Float[Array, "B M H K"]:
        """Compress keys (of="k") or values of blocks of tokens."""
        blocks = jnp.swapaxes(blocks_of(x, self.sizes), 2, 3)
        placed = (blocks + p[f"phi_{of}_place"][None, None, None]).reshape(*blocks.shape[:3], -1)
        return blocks.mean(-2) + jax.nn.silu(placed @ p[f"phi_{of}_in"]) @ p[f"phi_{of}_out"]
