"""OPS that are layers: decoders whose layers read each other, and mixers of one layer alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.models.attending import attend_new, new_keys, rotated
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP
from kvjax.models.hf_mixed.pieces import unpaired
from kvjax.models.layers import Params
from kvjax.models.mixer import GroupState, Layer, Left, Memory, Mixer, Projected
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.tensor_product import TensorProduct
from kvjax.models.transformer import hidden
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import NOTHING

Arrays = Mapping[str, Any]
HEADS, WINDOW = 2, 11  # of cross_layer_kv

# The source of every layer, its windowed layers, and where values come from.
MAPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "mha": ((0, 1, 2, 3, 4, 5), (), "own"),
    "cla2": ((0, 0, 2, 2, 4, 4), (), "own"),
    "mlkv2": ((0, 0, 0, 3, 3, 3), (), "own"),
    "yoco": ((0, 1, 2, 3, 3, 3), (0, 1, 2), "own"),
    "lckv_sandwich": ((0, 4, 4, 4, 4, 5), (), "own"),
    "svformer": ((0, 1, 2, 3, 4, 5), (), "first"),
    "resformer": ((0, 1, 2, 3, 4, 5), (), "half"),
}


def _mixer(layer: int, source: int, values: str) -> Attention:
    if layer == 0 or values == "own":
        return Attention(source=None if source == layer else source)
    return Attention(value_source=0) if values == "first" else Attention(value_mix=0.5)


def _cross_layer(x: Arrays, **how: Any) -> Arrays:
    """Tokens are the numbers of the given hidden states, which stand in the embedding."""
    b, t, d = x["x"].shape
    layers = x["Wq"].shape[0]
    width = x["Wq"].shape[-1] // HEADS
    names = {"q": "Wq", "k": "Wk", "v": "Wv", "o": "Wo", "up": "W1", "down": "W2"}
    out = {}
    for name, (sources, windowed, values) in MAPS.items():
        config = Config(
            vocab=b * t, d_model=d, layers=layers, heads=HEADS, kv_heads=HEADS, head_dim=width,
            d_ff=x["W1"].shape[-1], rope=Rope(kind="none"), mlps=(MLP(),) * layers,
            windows=tuple(WINDOW if i in windowed else None for i in range(layers)),
            mixers=tuple(_mixer(i, source, values) for i, source in enumerate(sources)),
        )  # fmt: skip
        ones = jnp.ones((1, d), x["x"].dtype)
        params = {"embed": x["x"].reshape(b * t, d), "norm": ones[0], "unembed": ones.T}
        params["layers"] = tuple(
            {
                n: x[w][i : i + 1]
                for n, w in names.items()
                if n in ("q", "o", "up", "down") or _owns(config, i, n)
            }
            | {"attn_norm": ones, "mlp_norm": ones}
            for i in range(layers)
        )
        out[f"o_{name}"] = hidden(params, jnp.arange(b * t, dtype=jnp.int32).reshape(b, t), config)
    return out


def _owns(config: Config, layer: int, name: str) -> bool:
    return name in config.mixers[layer].shapes(config)


def _alone(
    mixer: Mixer, config: Config, reads: Params, p: Params, x: Array, width: int, recurrent: bool = False
) -> tuple[Array, Keys]:
    """Compute heads' outputs [B, T, width] of a mixer without a cache, and what one would store of tokens.

    reads: the matrices that multiply x. Behind the channels of x the layer has `width` more, to which the
    output map takes the heads as they are. With recurrent=True it attends to what is stored, as a step of one
    token does, instead of expanding it.
    """
    own = x.shape[-1]
    p = p | {name: jnp.pad(w, [(0, width), (0, 0)]) for name, w in reads.items()}
    p["o"] = jnp.pad(jnp.eye(width, dtype=x.dtype), [(0, 0), (own, 0)])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, width)])
    pos = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    length = jnp.full(x.shape[:1], x.shape[1], jnp.int32)

    def attend(layer: Layer, asked: Projected, state: GroupState) -> tuple[Array, GroupState, Left]:
        q, k = rotated(layer.rope, asked.q, pos, length), rotated(layer.rope, asked.k, pos, length)
        new = new_keys(layer, k, asked.v, pos)
        if not recurrent:
            return attend_new(layer, asked, q, new, (), pos)[0], state, {"stored": new}
        out = attend_new(layer, asked._replace(expand=None), q, new, (), pos)[0]
        return asked.expand.outputs(out), state, {"stored": new}

    layer = Layer(0, 0, 0, None, mixer.rope(config, 0), mixer, config, pos)
    out, _, left = mixer(p, x, layer, Memory(pos, attend, None, None), NOTHING)
    return out[..., own:], left["stored"]


def _widened(x: Arrays) -> Arrays:
    return {name: a.astype(wide(a)) for name, a in x.items()}


def _mla(x: Arrays, *, recurrent: bool = False, turns: bool = True) -> Arrays:
    """Rotate the file's pairs of channels 2 i and 2 i + 1 as the layer's i and i + P / 2."""
    x = _widened(x)
    d, h, width = x["Wq"].shape
    (r, _, k), v, turning = x["Wuk"].shape, x["Wuv"].shape[-1], x["Wkr"].shape[-1]
    mixer = Latent(rank=r, rope_dim=turning, nope_dim=k, value_dim=v, turns=turns)
    config = Config(2, d, 1, h, h, 2, 2, mixers=(mixer,))
    order = unpaired(turning)
    reads = {
        "q": jnp.concatenate([x["Wq"][..., :k], x["Wq"][..., k + order]], -1).reshape(d, h * width),
        "kv_down": jnp.concatenate([x["Wkv"], x["Wkr"][:, order]], -1),
    }
    up = jnp.swapaxes(jnp.concatenate([x["Wuk"], x["Wuv"]], -1), 0, 1)
    p = {"latent_norm": x["kv_norm"], "kv_up": up}
    out, stored = _alone(mixer, config, reads, p, x["x"], h * v, recurrent)
    rows = stored.k[:, 0]
    rope = rows[..., r + np.argsort(order)]
    return {"o": out.reshape(*out.shape[:2], h, v), "cache_latent": rows[..., :r], "cache_rope": rope}


def _tpa(x: Arrays, *, turns: bool = True) -> Arrays:
    """Give the layer the factors as its input, of which its projections choose.

    The file turns pairs (i, i + K / 2) backwards, which is forwards where the halves change places. Heads of
    the layer have one width: the narrower ones of q and k, or of v, are filled up with zeros.
    """
    x = _widened(x)
    (b, t, h, _), k, v = x["a_q"].shape, x["b_k"].shape[-1], x["b_v"].shape[-1]
    ranks, width = {n: x[f"a_{n}"].shape[-1] for n in "qkv"}, max(k, v)
    mixer = TensorProduct(ranks["q"], ranks["k"], ranks["v"])
    rope = Rope(rotary_dim=k) if turns else Rope(kind="none")
    config = Config(2, 1, 1, h, h, width, 2, rope=rope, query_scale=k**-0.5, mixers=(mixer,))
    halves = np.roll(np.arange(k), k // 2)
    parts = []
    for n in "qkv":
        channels = x[f"b_{n}"] if n == "v" else x[f"b_{n}"][..., halves]
        channels = jnp.pad(channels, [(0, 0)] * 3 + [(0, width - channels.shape[-1])])
        parts += [jnp.swapaxes(x[f"a_{n}"], 2, 3).reshape(b, t, -1), channels.reshape(b, t, -1)]
    given = jnp.concatenate(parts, -1)
    chosen = jnp.eye(given.shape[-1], dtype=given.dtype)
    ends = np.cumsum([rank * (h + width) for rank in ranks.values()])
    reads = {f"{n}_factors": w for n, w in zip("qkv", jnp.split(chosen, ends[:-1], axis=1), strict=True)}
    out, stored = _alone(mixer, config, reads, {}, given, h * width)
    rotated = stored.k[:, 0, :, ranks["k"] * h :].reshape(b, t, ranks["k"], width)
    return {"o": out.reshape(b, t, h, width)[..., :v], "b_k_rotated": rotated[..., halves]}


OPS: dict[str, Callable[..., Arrays]] = {"cross_layer_kv": _cross_layer, "mla": _mla, "tpa": _tpa}
