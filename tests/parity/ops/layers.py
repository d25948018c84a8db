"""OPS of whole decoders: which layer's keys and values every layer reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.transformer import hidden
from kvjax.ops.base.rope import Rope

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


OPS: dict[str, Callable[..., Arrays]] = {"cross_layer_kv": _cross_layer}
