"""Building blocks of mixers and feed-forwards: norms, linear maps, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.base.dispatch import alone, platform
from kvjax.ops.base.dtypes import wide

Params = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


def last_axis(weight: Array, like: Array) -> Array:
    """Reshape a vector to broadcast along the last axis of `like`."""
    return weight.reshape((1,) * (like.ndim - weight.ndim) + weight.shape)


def rms_norm(x: Array, weight: Array | None, eps: float, offset: float = 0.0) -> Array:
    """RMSNorm (arXiv:1910.07467) in promote(float32, x): x / rms(x) * (offset + weight), weight optional."""
    y = x.astype(wide(x))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * last_axis(offset + weight.astype(y.dtype), y)
    return y.astype(x.dtype)


def stream_norm(x: Array, p: Params, name: str, config: Any) -> Array:
    """Compute the norm p[name] of a config's hidden states: RMSNorm, or LayerNorm where they are `centred`.

    A bias is p[name_bias], if there is one.

    >>> from types import SimpleNamespace as Config
    >>> config = Config(norm_eps=0.0, norm_offset=0.0, centred=True)
    >>> p = {"norm": jnp.ones(2), "norm_bias": jnp.ones(2)}
    >>> stream_norm(jnp.array([1.0, 3.0]), p, "norm", config).tolist()
    [0.0, 2.0]
    """
    y, bias = x.astype(wide(x)), p.get(name + "_bias")
    y = y - y.mean(-1, keepdims=True) if config.centred else y
    y = rms_norm(y, p[name], config.norm_eps, config.norm_offset)
    return (y if bias is None else y + last_axis(bias.astype(y.dtype), y)).astype(x.dtype)


def group_norm(p: Params, name: str, x: Array, groups: int, eps: float) -> Array:
    """GroupNorm (arXiv:1803.08494) over equal parts of the last axis, weight p[name], bias p[name_bias].

    With one group it is LayerNorm (arXiv:1607.06450).
    """
    y = x.astype(wide(x)).reshape(*x.shape[:-1], groups, -1)
    y = y - y.mean(-1, keepdims=True)
    y = (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)).reshape(x.shape)
    weight, bias = (last_axis(p[n].astype(y.dtype), y) for n in (name, name + "_bias"))
    return (y * weight + bias).astype(x.dtype)


def l2_norm(x: Array, eps: float = 1e-6) -> Array:
    """Compute x / sqrt(sum x^2 + eps) over the last axis, in float32 or wider."""
    y = x.astype(wide(x))
    return (y * jax.lax.rsqrt((y * y).sum(-1, keepdims=True) + eps)).astype(x.dtype)


def linear_to_heads(p: Params, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
    """`linear` for results that are split into heads.

    The barrier is for steps of one token: without it, XLA for TPUs copies the weights at every step into a
    layout with the heads first.
    """
    y = linear(p, name, x)
    return jax.lax.optimization_barrier(y) if x.shape[1] == 1 else y


def linear(p: Params, name: str, x: Array) -> Array:
    """Compute x W + b with W = p[name], and b = p[name_bias] if there is one.

    XLA for GPUs computes one row times a small matrix as products that it writes to memory and then sums. A
    second row, of zeros, makes it a matrix product, which avoids that. XLA for CPUs computes the gradient of
    a product with more axes from a transposed copy of the following operations' gradient, which takes twice
    as long as with a single matrix.
    """
    flat = x.reshape(-1, x.shape[-1])
    if platform() == "gpu" and len(flat) == 1:
        y = (jnp.pad(flat, ((0, 1), (0, 0))) @ p[name])[:1].reshape(*x.shape[:-1], -1)
    elif platform() == "cpu" and alone(x, p[name]):
        y = (flat @ p[name]).reshape(*x.shape[:-1], -1)
    else:
        y = x @ p[name]
    bias = p.get(name + "_bias")
    return y if bias is None else y + last_axis(bias, y)
