"""GoldFinch: recurrent lower layers, and upper attention layers that share one cache of compressed rows.

GoldFinch (Goldstein et al., 2024, arXiv:2407.12077). Per token and for the whole model, the cache holds
`rank` numbers (the paper: D / 16) and the digits of the token's id.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.base.ranges import Whole
from kvjax.models.config import Config
from kvjax.models.expand import Expand
from kvjax.models.layers import Params, Shapes, group_norm, rms_norm
from kvjax.models.mixer import (
    GroupState,
    Layer,
    Left,
    Memory,
    Mixer,
    Projected,
    RecurrentState,
    SlotShape,
    Take,
)
from kvjax.models.mixers.rwkv import (
    TimeMix,
    ddlerp,
    low_rank,
    low_rank_axes,
    low_rank_shapes,
    share_axes,
    share_shapes,
    shares,
)
from kvjax.ops.recurrent import rwkv as ops

# The eps of the LayerNorms, as in the authors' code.
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class FinchC2(TimeMix):
    """The layers below (section 3.1): RWKV-6 with keys times 1 - decay, and a second value for the bonus.

        r, k, v, w, u = ddlerp(x_t, x_(t-1));  d = e^-e^w;  S = Diag(d) S + ((1 - d) * k W_k) (v W_v)'
        y = LayerNorm(S_(t-1)' r + u W_v + tanh(u A) B) W_o

    All heads are normalised together, and there is no gate. mix_rank, decay_rank, second_rank: the ranks of
    the interpolations, of w and of the second value.
    """

    mix_rank: int = 32
    decay_rank: int = 64
    second_rank: int = 64

    axes = TimeMix.axes | share_axes("rkvwu") | low_rank_axes("decay", "second")

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        shapes = super().shapes(config) | share_shapes("rkvwu", d, self.mix_rank)
        shapes |= low_rank_shapes("decay", d, self.decay_rank, self.width)
        return shapes | low_rank_shapes("second", d, self.second_rank, self.width, bias=False)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        def mix(before: Array, past: RecurrentState | None, mask: Array) -> tuple[Array, RecurrentState]:
            r, k, v, w, u = ddlerp(p, "rkvwu", x, before)
            decay = low_rank(p, "decay", w).astype(jnp.float32)
            key = (k @ p["k"]).astype(jnp.float32) * -jnp.expm1(-jnp.exp(decay))
            value = (v @ p["v"]).astype(jnp.float32)
            r, key, value, decay = self.split(r @ p["r"], key, value, decay)
            nothing = jnp.zeros((self.heads, self.head_dim), jnp.float32)
            start = None if past is None else past["S"]
            out, new = ops.rwkv6(
                r, key, value, decay, nothing, mask=mask, initial_state=start, segments=memory.segments
            )
            second = u @ p["v"] + low_rank(p, "second", u)
            y = out.reshape(second.shape) + second.astype(jnp.float32)
            return group_norm(p, "out_norm", y, 1, EPS).astype(x.dtype) @ p["o"], {"S": new}

        return self.run(mix, x, layer, memory, state)


@dataclasses.dataclass(frozen=True)
class Gold(Mixer):
    """The layers above (sections 3.2 to 3.4): keys and values rebuilt from one cache for all of them.

        c = h W_c, stored with the token's id;  n = RMSNorm(e) with e the token's embedding
        z = RMSNorm([e ; c] W_z);  k = LN(adapt(lerp(z_t, z_(t-1), share_k))), v likewise from n
        q = LN(x W_q),  y = LN(attention(q, k, v)) W_o;  adapt(x) = x + tanh(x C) D

    The first of these layers compresses h, its own input before the norm (kv_input: its own number); the
    others read it (source: that number). The shares of k and v move with n. rank: width of c; mix_rank,
    adapt_rank: the ranks of the shares and of `adapt`.

    It follows the authors' code in normalising e for the values, and the paper's equations in leaving out
    rotations. It differs in three points. Queries come from x_t alone and not from its mixture with x_(t-1),
    and the feed-forward must not shift either: these layers then keep nothing of their inputs, and a prefill
    ends below them (the paper runs its last 2G - 1 tokens through G such layers). Each layer has its own W_z,
    while the paper's layers share one.
    """

    rank: int
    mix_rank: int = 32
    adapt_rank: int = 64
    source: Whole | None = None
    kv_input: Whole | None = None
    # A key is computed also from the previous slot, found by its position.
    in_segments = False

    def check(self, config: Config) -> None:
        if (self.source is None) == (self.kv_input is None):
            raise ValueError(
                "a Gold layer either stores the cache (kv_input: its own number) or reads it (source: the "
                f"number of the layer that stores it), got kv_input={self.kv_input} and source={self.source}"
            )
        if config.heads * config.head_dim != config.d_model or config.kv_heads != config.heads:
            raise ValueError(
                "keys and values are as wide as embeddings: expected kv_heads = heads and d_model = heads * "
                f"head_dim, got kv_heads={config.kv_heads}, heads={config.heads}, head_dim={config.head_dim} "
                f"and d_model={config.d_model}"
            )
        for layer, mixer in enumerate(config.mixers):
            if isinstance(mixer, Gold) and config.window(layer) is not None:
                raise ValueError(f"layer {layer} has a window, and Gold's keys need the tokens before them")

    @property
    def takes(self) -> dict[str, Take]:
        embedding = {"embedding": Take("embedding", None)}
        if self.source is not None:
            return embedding | {"slots": Take("slots", self.source)}
        return embedding | {"tokens": Take("tokens", None), "kv input": Take("input", self.kv_input)}

    axes = {
        "q": ("embed", "heads"),
        "o": ("heads", "embed"),
        **dict.fromkeys(("compress", "adapt_k_down", "adapt_v_down"), ("embed", None)),
        **dict.fromkeys(("restore", "adapt_k_up", "adapt_v_up"), (None, None)),
    } | share_axes("kv")

    def shapes(self, config: Config) -> Shapes:
        d = config.d_model
        shapes: Shapes = {"q": (d, d), "o": (d, d), "restore": (d + self.rank, d)}
        if self.source is None:
            shapes["compress"] = (d, self.rank)
        for name in ("q", "k", "v", "out"):
            shapes |= {f"{name}_norm": (d,), f"{name}_norm_bias": (d,)}
        for name in ("adapt_k", "adapt_v"):
            shapes |= low_rank_shapes(name, d, self.adapt_rank, d, bias=False)
        return shapes | share_shapes("kv", d, self.mix_rank)

    def slots(self, config: Config) -> SlotShape:
        return SlotShape(1, self.rank, digits(config.vocab), config.scale, factors=True, ids=True)

    def __call__(
        self, p: Params, x: Float[Array, "B T D"], layer: Layer, memory: Memory, state: GroupState
    ) -> tuple[Float[Array, "B T D"], GroupState, Left]:
        config, embed = layer.config, layer.taken["embedding"]
        b, t, d = x.shape

        def heads(y: Float[Array, "B S D"], name: str) -> Float[Array, "B N S H"]:
            y = group_norm(p, f"{name}_norm", y, 1, EPS).reshape(b, -1, config.heads, config.head_dim)
            return jnp.swapaxes(y, 1, 2)

        def rows(c: Float[Array, "B 1 S R"], ids: Float[Array, "B 1 S I"]) -> tuple[Array, Array]:
            e = embed[from_digits(ids)] * jnp.asarray(config.embed_scale, embed.dtype)
            z = jnp.concatenate([e, c.astype(e.dtype)], -1) @ p["restore"]
            return rms_norm(z, None, config.norm_eps), rms_norm(e, None, config.norm_eps)

        def keys(z: Float[Array, "B 1 S E"], n: Float[Array, "B 1 S E"]) -> tuple[Array, Array]:
            (z, z_before), (n, n_before) = ((y[:, 0, :, :d], y[:, 0, :, d:]) for y in (z, n))
            share_k, share_v = shares(p, "kv", n, n_before)
            k, v = z + (z_before - z) * share_k, n + (n_before - n) * share_v
            return heads(k + low_rank(p, "adapt_k", k), "k"), heads(v + low_rank(p, "adapt_v", v), "v")

        k = v = None
        if self.kv_input is not None:
            k = (layer.taken["kv input"] @ p["compress"])[:, None]
            v = to_digits(layer.taken["tokens"], config.vocab).astype(k.dtype)[:, None]
        expand = Expand(lambda turned: turned, keys, None, rows)
        projected = Projected(heads(x @ p["q"], "q"), k, v, x, expand=expand)
        out, state, left = memory.attend(layer, projected, state)
        out = jnp.swapaxes(out, 1, 2).reshape(b, t, d)
        return group_norm(p, "out_norm", out, 1, EPS) @ p["o"], state, left


def digits(vocab: int) -> int:
    """How many base-256 digits a token id takes; bfloat16 is exact up to 256, float16 further."""
    return max(-(-(vocab - 1).bit_length() // 8), 1)


def to_digits(ids: Int[Array, "*b"], vocab: int) -> Int[Array, "*b I"]:
    """Token ids as digits to the base 256, the lowest first.

    >>> to_digits(jnp.asarray([3, 258]), 1000).tolist(), from_digits(jnp.asarray([[2.0, 1.0]])).tolist()
    ([[3, 0], [2, 1]], [258])
    """
    return jnp.stack([ids // 256**i % 256 for i in range(digits(vocab))], -1)


def from_digits(stored: Float[Array, "*b I"]) -> Int[Array, "*b"]:
    """Compute the ids of digits that are stored as numbers."""
    whole = stored.astype(jnp.int32)
    return sum((whole[..., i] * 256**i for i in range(whole.shape[-1])), jnp.zeros((), jnp.int32))
