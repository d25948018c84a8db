"""AltUp and LAuReL: hidden states of several streams, of which a layer computes the first."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.mesh.on_mesh import Axes
from kvjax.models.config import Config
from kvjax.models.layer_embeddings import LAYER_EMBEDDINGS
from kvjax.models.layer_part import LayerPart
from kvjax.models.layers import Params, Shapes, linear, rms_norm
from kvjax.ops.base.dtypes import wide

# Below this mean square, a stream is not scaled up to the size of the first.
_LEAST = 1e-5


class Streams(LayerPart):
    """Alternating updates (AltUp, arXiv:2301.13310) around a layer, as Gemma 3n has them.

    A hidden state has `Config.streams` parts x_i of D channels. With the router m(y) = tanh(norm(y) W_r / D),

        p_i = x_i + sum_j (m(x_0) W_p)_ij x_j
        y = layer(p_0)
        x_i' = p_i + (1 + (m(y) W_c)_i) (y - p_0)

    The layer's embeddings of the token, computed from s * x_0', are added to x_1', x_2', ...
    """

    axes = {
        "stream_router": ("embed", None),
        "stream_predict": (None, None),
        "stream_correct": (None, None),
        "stream_scale": (None,),
        "laurel_left": ("embed", None),
        "laurel_right": (None, "embed"),
    }

    def shapes(self, config: Config) -> Shapes:
        """Return the name and shape of every parameter of a layer."""
        d, n, rank = config.d_model, config.streams, config.laurel
        out: Shapes = {}
        if n > 1:
            out |= {"stream_router_norm": (d,), "stream_router": (d, n), "stream_scale": (d,)}
            out |= {"stream_predict": (n, n * n), "stream_correct": (n, n)}
        if rank:
            out |= {"laurel_left": (d, rank), "laurel_right": (rank, d), "laurel_post_norm": (d,)}
        return out

    def predicted(self, p: Params, x: Float[Array, "B T ID"], config: Config) -> Float[Array, "B T I D"]:
        """Predict the streams before a layer; the first is the layer's input."""
        n = config.streams
        parts = x.reshape(*x.shape[:2], n, config.d_model)
        mixed = linear(p, "stream_predict", self._routed(p, parts[:, :, 0], config))
        return parts + jnp.einsum("btij,btjd->btid", mixed.reshape(*x.shape[:2], n, n), parts)

    def corrected(
        self,
        p: Params,
        predicted: Float[Array, "B T I D"],
        y: Float[Array, "B T D"],
        embedded: Float[Array, "B T P"] | None,
        config: Config,
    ) -> Float[Array, "B T ID"]:
        """Correct the streams after a layer whose output is y."""
        share = 1 + linear(p, "stream_correct", self._routed(p, y, config))
        out = predicted + share[..., None] * (y - predicted[:, :, 0])[:, :, None]
        if embedded is not None:
            first = out[:, :, 0] * p["stream_scale"][None, None]
            said = LAYER_EMBEDDINGS.said(p, first, embedded, config)
            out = out.at[:, :, 1:].add(said[:, :, None])
        return out.reshape(*y.shape[:2], -1)

    def _routed(self, p: Params, y: Float[Array, "B T D"], config: Config) -> Float[Array, "B T I"]:
        y = rms_norm(y, p["stream_router_norm"], config.norm_eps, config.norm_offset) * config.d_model**-1.0
        routed = linear(p, "stream_router", y)
        return jnp.tanh(routed.astype(wide(y))).astype(y.dtype)

    def beside(self, p: Params, x: Array, read: Float[Array, "B T D"], config: Config) -> Array:
        """(x + read + norm(read W_1 W_2)) / sqrt(2), x with attention added (LAuReL, arXiv:2411.07501)."""
        low = linear(p, "laurel_right", linear(p, "laurel_left", read))
        low = rms_norm(low, p["laurel_post_norm"], config.norm_eps, config.norm_offset)
        return (x + (read + low)) * 2**-0.5


STREAMS = Streams()


def stream_shapes(config: Config) -> Shapes:
    """Return the name and shape of the matrices that make streams of embeddings and that take them back."""
    d = config.d_model
    return {f"stream_{way}_{i}": (d, d) for way in ("in", "out") for i in range(1, config.streams)}


def stream_axes(config: Config) -> dict[str, Axes]:
    """Return the logical axes of `stream_shapes`."""
    return dict.fromkeys(stream_shapes(config), ("embed", None))


def split(params: Params, x: Float[Array, "B T D"], config: Config) -> Float[Array, "B T ID"]:
    """Split embeddings into streams: x itself, and x W_i with the mean square of x."""
    others = [_sized(linear(params, f"stream_in_{i}", x), x) for i in range(1, config.streams)]
    return jnp.concatenate([x, *others], -1)


def joined(params: Params, x: Float[Array, "B T ID"], config: Config) -> Float[Array, "B T D"]:
    """Compute the mean of the streams: the first, and x_i W_i with its mean square."""
    first, *rest = jnp.split(x, config.streams, -1)
    others = [_sized(linear(params, f"stream_out_{i + 1}", y), first) for i, y in enumerate(rest)]
    return sum(others, first) / config.streams


def _sized(y: Float[Array, "B T D"], like: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Scale y to the root mean square of `like`."""
    size, own = (jnp.mean(jnp.square(z.astype(wide(z))), -1, keepdims=True) for z in (like, y))
    return (y.astype(own.dtype) * jnp.sqrt(size) / jnp.sqrt(jnp.maximum(own, _LEAST))).astype(y.dtype)
