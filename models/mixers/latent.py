"""Multi-head latent attention: one latent and one rotary key per token, for all heads."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, linear, linear_to_heads, rms_norm
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected, SlotShape, Take
from kvjax.models.picking import Picking
from kvjax.ops.base.rope import Rope


@dataclasses.dataclass(frozen=True)
class Latent(Mixer):
    """MLA (DeepSeek-V2, arXiv:2405.04434, eq. 9-19): the cache holds c (`rank` wide) and k_r (`rope_dim`).

        c = norm(x W_dc), k_r = RoPE(x W_kr), k_h = [c W_uk_h ; k_r], v_h = c W_uv_h

    Prefill expands c to keys and values per head. Decoding absorbs W_uk into the query, q~_h = W_uk_h q_h,
    and W_uv into the output: it attends to the stored [c ; k_r] as one KV head with its first channels as
    values.

    q_rank: the queries come from a latent of this width too (None: from x). nope_dim, rope_dim: unrotated and
    rotated channels of a head; value_dim: channels of a head's values. turns: False leaves out the rotation
    (the NoPE layers of Kimi Linear, arXiv:2510.26692). scale: (nope_dim + rope_dim)^-0.5 unless given.
    source: the layer whose latents are read, with own up-projections (CLLA, arXiv:2410.15252). eps: of the
    latents' norms. normed: False leaves out the norm of c, and rope_heads: k_r is rotated as this many heads,
    for attention converted from another kind (`kvjax.train.conversion.latents`).
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int | None = None
    turns: bool = True
    scale: float | None = None
    source: Whole | None = None
    eps: float = 1e-6
    normed: bool = True
    rope_heads: int = 1

    def check(self, config: Config) -> None:
        if self.rope_dim % (2 * self.rope_heads):
            raise ValueError(
                f"rope_dim must be even in each of {self.rope_heads} heads: channels turn in pairs; got "
                f"{self.rope_dim}"
            )
        if self.rope_heads > 1 and config.rope.by_length:
            raise ValueError("a rotation by length has no rope_heads: its frequencies depend on the row")
        whole = config.heads * (self.nope_dim + self.value_dim)
        if self.rank > whole:
            raise ValueError(
                f"rank={self.rank} is larger than the {whole} channels of keys and values that it compresses"
            )

    @property
    def takes(self) -> dict[str, Take]:
        return {} if self.source is None else {"slots": Take("slots", self.source)}

    axes = {
        "q": ("embed", "heads"),
        "q_down": ("embed", None),
        "kv_down": ("embed", None),
        "q_up": (None, "heads"),
        "kv_up": ("heads", None, None),
        "o": ("heads", "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        d, n, width = config.d_model, config.heads, self.nope_dim + self.rope_dim
        shapes: Shapes = {
            # Decoding multiplies head by head; with heads side by side the matrix would be re-laid out.
            "kv_up": (n, self.rank, self.nope_dim + self.value_dim),
            "o": (n * self.value_dim, d),
        }
        if self.source is None:
            shapes |= {"kv_down": (d, self.rank + self.rope_dim)}
            shapes |= {"latent_norm": (self.rank,)} if self.normed else {}
        if config.o_bias:
            shapes["o_bias"] = (d,)
        if config.o_bias and self.source is None:
            shapes["kv_down_bias"] = (self.rank + self.rope_dim,)
        if self.q_rank is None:
            return shapes | {"q": (d, n * width)}
        if config.qkv_bias:
            shapes["q_down_bias"] = (self.q_rank,)
        return shapes | {
            "q_down": (d, self.q_rank),
            "q_latent_norm": (self.q_rank,),
            "q_up": (self.q_rank, n * width),
        }

    def slots(self, config: Config) -> SlotShape:
        scale = (self.nope_dim + self.rope_dim) ** -0.5 if self.scale is None else self.scale
        return SlotShape(1, self.rank + self.rope_dim, self.rank, scale, shared=True)

    def rope(self, config: Config, layer: int) -> Rope:
        if not self.turns:
            return Rope(kind="none")
        return dataclasses.replace(
            config.layer_rope(layer), rotary_dim=self.rope_dim, start=self.rank, copies=self.rope_heads
        )

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        return self.attended(p, x, layer, memory, state)

    def attended(
        self,
        p: Params,
        x: Float[Array, "B T D"],
        layer: Layer,
        memory: Memory,
        state: GroupState,
        picking: Picking | None = None,
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        """Run the layer, of queries that pick the tokens they attend to, if they do."""
        config = layer.config
        b, t, _ = x.shape
        n, nope = config.heads, self.nope_dim
        to_key, to_value = p["kv_up"][..., :nope], p["kv_up"][..., nope:]
        q = jnp.swapaxes(self._queries(p, x, config).reshape(b, t, n, -1), 1, 2)
        end = self.rank + self.rope_dim
        absorbed = jnp.einsum("bntd,nrd->bntr", q[..., :nope], to_key)

        def queries(turned: Float[Array, "B N T H"]) -> Array:
            return jnp.concatenate([q[..., :nope], turned[..., self.rank : end]], -1)

        def keys(k: Float[Array, "B 1 S H"], v: Array) -> tuple[Array, Array]:
            c = k[:, 0, :, : self.rank]
            turned = jnp.broadcast_to(k[..., self.rank : end], (k.shape[0], n, k.shape[2], self.rope_dim))
            expanded = jnp.einsum("bsr,nrd->bnsd", c, to_key)
            return jnp.concatenate([expanded, turned], -1), jnp.einsum("bsr,nrd->bnsd", c, to_value)

        def outputs(out: Float[Array, "B N T R"]) -> Array:
            return jnp.einsum("bntr,nrd->bntd", out, to_value)

        # Zeros for the channels stored after the rotated key, so they add nothing to the logits.
        zeros = jnp.zeros((b, n, t, layer.slots.key - end), q.dtype)
        asked = jnp.concatenate([absorbed, q[..., nope:], zeros], -1)
        stored = self.stored(p, x, config)
        expand = Expand(queries, keys, outputs)
        projected = Projected(asked, stored, None, x, expand=expand, picking=picking)
        out, state, left = memory.attend(layer, projected, state)
        out = jnp.swapaxes(out, 1, 2).reshape(b, t, -1)
        return linear(p, "o", out), state, left

    def stored(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Array | None:
        """Return [c ; k_r] of the new tokens, before rotation; None if another layer's are read."""
        if self.source is not None:
            return None
        down = linear(p, "kv_down", x)
        latent = down[..., : self.rank]
        latent = rms_norm(latent, p["latent_norm"], self.eps) if self.normed else latent
        return jnp.concatenate([latent, down[..., self.rank :]], -1)[:, None]

    def _queries(self, p: Params, x: Float[Array, "B T D"], config: Config) -> Array:
        if self.q_rank is None:
            return linear_to_heads(p, "q", x)
        return linear_to_heads(p, "q_up", self.query_latents(p, x))

    def query_latents(self, p: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T R"]:
        """Compute the latents from which queries come, with `q_rank`."""
        return rms_norm(linear(p, "q_down", x), p["q_latent_norm"], self.eps)
