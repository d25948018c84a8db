"""Attention that stores latents of groups of KV heads and computes keys from them before rotation."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, last_axis, linear, linear_to_heads, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import angles, rotate


@dataclasses.dataclass(frozen=True)
class GroupedLatent(Mixer):
    """Grouped-head low rank (Palu, arXiv:2407.21118, section 3): a key and a value latent per group of heads.

        h_k = x A_k, k_j = RoPE(h_k B_j + b_j), h_v = x A_v, out_n = sum_s p_ns h_v_s

    for the KV heads j of a group and the query heads n that read them. The cache holds h_k and h_v of every
    group. Keys are computed from their latents and rotated by the positions of their slots, in prefills and
    in steps. Values are never computed: the output matrix takes heads of `value_rank` channels, and includes
    the values' up-projections. Biases, and norms of a head, act on the computed keys; the bias of values is
    part of the output's. A norm over all heads divides a token's latents before they are stored, since groups
    may keep different tokens; there is none beside biases.

    group: KV heads that share a latent. key_rank, value_rank: channels of the latents. Methods that compare
    stored keys in steps or rotate them by rank do not fit latents; rotation of kind "dynamic" is refused.
    """

    group: int
    key_rank: int
    value_rank: int

    def check(self, config: Config) -> None:
        if self.group < 1 or config.kv_heads % self.group:
            raise ValueError(
                f"{config.kv_heads} KV heads cannot be cut into groups of {self.group}: choose a number that "
                "divides them"
            )
        width = self.group * config.head_dim
        for name in ("key_rank", "value_rank"):
            if not 1 <= getattr(self, name) <= width:
                raise ValueError(
                    f"{name} must be from 1 to {width}, the channels of {self.group} heads, got "
                    f"{getattr(self, name)}"
                )
        if config.qk_norm == "full" and config.qkv_bias:
            raise ValueError(
                "GroupedLatent takes no biases of keys beside qk_norm='full', a norm over all heads"
            )
        if kinds := {r.kind for r in (config.rope, config.rope_local) if r and r.by_length}:
            raise ValueError(
                f"GroupedLatent turns keys by position and cannot follow a rope of kind {min(kinds)!r}"
            )

    def _groups(self, config: Config) -> int:
        return config.kv_heads // self.group

    axes = {
        "q": ("embed", "heads"),
        "k_down": ("embed", "kv_heads"),
        "k_up": ("kv_heads", None, None),
        "k_bias": ("kv_heads",),
        "v_down": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, h, groups = config.d_model, config.head_dim, self._groups(config)
        shapes: Shapes = {
            "q": (d, config.heads * h),
            "k_down": (d, groups * self.key_rank),
            "k_up": (groups, self.key_rank, self.group * h),
            "v_down": (d, groups * self.value_rank),
            "o": (config.heads * self.value_rank, d),
        }
        if config.qk_norm:
            head = config.qk_norm == "head"
            shapes |= {"q_norm": (h if head else config.heads * h,)}
            shapes |= {"k_norm": (h if head else config.kv_heads * h,)}
        if config.qkv_bias:
            shapes |= {"q_bias": (config.heads * h,), "k_bias": (config.kv_heads * h,)}
        return shapes | ({"o_bias": (d,)} if config.o_bias or config.qkv_bias else {})

    def slots(self, config: Config) -> SlotShape:
        ranks = (self.key_rank, self.value_rank)
        return SlotShape(self._groups(config), *ranks, config.scale, factors=True, expands=True)

    def stored_form(self, config: Config) -> str:
        return "latents divided" if config.qk_norm == "full" else ""

    def met(
        self, p: Params, config: Config, window: int | None, k: Array, v: Array, pos: Int[Array, "B G S"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        k, v = self._computed(p, config, k, v)
        return _rotated(config, window, k, jnp.repeat(pos, self.group, axis=1)), v

    def _computed(
        self, p: Params, config: Config, k: Float[Array, "B G S R"], v: Float[Array, "B G S V"]
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S V"]]:
        """Compute the keys before rotation, and every head's latent of values."""
        up = _up(p, k)
        if config.qk_norm == "full":
            weight = config.norm_offset + p["k_norm"].astype(wide(up))
            keys = _split(config, (up * last_axis(weight, up)).astype(up.dtype))
        else:
            bias = p.get("k_bias")
            keys = _heads(p, "k", up if bias is None else up + last_axis(bias, up), config)
        return keys, jnp.repeat(v, self.group, axis=1)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config = layer.config
        b, t, _ = x.shape

        def latents(name: str) -> Float[Array, "B G T R"]:
            down = linear_to_heads(p, name, x).reshape(b, t, self._groups(config), -1)
            return jnp.swapaxes(down, 1, 2)

        rotate = partial(_rotated, config, layer.window)
        asked = rotate(_heads(p, "q", linear_to_heads(p, "q", x), config), layer.pos[:, None])
        expand = Expand(lambda rotated: rotated, partial(self._computed, p, config), None, rotate=rotate)
        keys = latents("k_down")
        if config.qk_norm == "full":
            keys = _divided(p, config, keys)
        projected = Projected(asked, keys, latents("v_down"), x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        return linear(p, "o", jnp.swapaxes(out, 1, 2).reshape(b, t, -1)), state, left


def _rotated(
    config: Config, window: int | None, heads: Float[Array, "B X S H"], pos: Int[Array, "B #X S"]
) -> Float[Array, "B X S H"]:
    """Heads rotated by their positions, as in layers with this window."""
    rope = config.rope if window is None else config.rope_local or config.rope
    return rotate(heads, *angles(rope, pos, config.head_dim, dtype=wide(heads)), rope.start)


def _up(p: Params, latents: Float[Array, "B G S R"]) -> Float[Array, "B S E"]:
    """Compute the keys of all heads side by side, without biases and norms."""
    up = jnp.einsum("bgsr,gre->bsge", latents, p["k_up"])
    return up.reshape(latents.shape[0], latents.shape[2], -1)


def _divided(p: Params, config: Config, latents: Float[Array, "B G S R"]) -> Float[Array, "B G S R"]:
    """Divide the latents of each token by the root mean square of its keys over all heads."""
    up = _up(p, latents).astype(wide(latents))
    square = jnp.square(up).mean(-1)[:, None, :, None] + config.norm_eps
    return (latents.astype(wide(latents)) * jax.lax.rsqrt(square)).astype(latents.dtype)


def _split(config: Config, y: Float[Array, "B S E"]) -> Float[Array, "B X S H"]:
    return jnp.swapaxes(y.reshape(*y.shape[:2], -1, config.head_dim), 1, 2)


def _heads(p: Params, name: str, y: Float[Array, "B S E"], config: Config) -> Float[Array, "B X S H"]:
    """Heads of a projection, QK-normalised if the model does so."""
    norm = p.get(f"{name}_norm")
    if norm is not None and config.qk_norm == "full":
        y = rms_norm(y, norm, config.norm_eps, config.norm_offset)
    heads = _split(config, y)
    if norm is not None and config.qk_norm == "head":
        heads = rms_norm(heads, norm, config.norm_eps, config.norm_offset)
    return heads
