"""Gates that use more than the layer's input: a token's query, key and value, or learned sinks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.fitted import ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.gate import Gate
from kvjax.models.layers import rms_norm

# The epsilon of the authors' normalisations.
EPSILON = 1e-6
# The lower bound of Write-Gated KV's gates, whose logarithm is added to logits.
LEAST = 1e-3


@dataclasses.dataclass(frozen=True)
class RetainingHead(Gate):
    """How much answers will attend to a token, from its queries, keys and values (arXiv:2410.01805, 3.2).

    s = silu([q, k, v] W1) W2, of a token's queries, keys and values in all heads before rotation,
    concatenated. fitted: "in" [L, (N + 2 K) H, X] and "out" [L, X, K], with X hidden channels.
    """

    by = "locret"
    looks = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        width = (model.heads + 2 * model.kv_heads) * model.head_dim
        check_sizes(self, "retaining heads", "layers, channels", "in", (model.layers, width))
        assert self.fitted is not None
        hidden = self.fitted.arrays["in"].shape[-1]
        check_sizes(
            self, "retaining heads", "layers, hidden, KV heads", "out", (model.layers, hidden, model.kv_heads)
        )

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        assert inputs.v is not None
        return retained(arrays, inputs.q_raw, inputs.k_raw, inputs.v)


def retained(
    arrays: dict[str, Array],
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
) -> Float[Array, "B K T"]:
    """Apply the retaining head of one layer to unrotated queries and keys, and values."""
    b, t = q.shape[0], q.shape[2]
    each = (jnp.swapaxes(x.astype(jnp.float32), 1, 2).reshape(b, t, -1) for x in (q, k, v))
    hidden = jax.nn.silu(jnp.concatenate([*each], -1) @ arrays["in"])
    return jnp.moveaxis(hidden @ arrays["out"], 2, 1)


@dataclasses.dataclass(frozen=True)
class SinkGate(Gate):
    """KVzip's score, estimated as a token's attention to itself beside learned sinks (arXiv:2601.17668, 3.2).

    s = mean_g 1 / (1 + sum_j exp(b_j' q_g / sqrt(R) - k' q_g / sqrt(R) - c_g)), where q_g = rms(x W_q + a) of
    every query head g of a group and k = rms(x W_k) have R channels and are projected from the layer's input
    x, and b_j are learned sinks. fitted: "q" [L, D, K, G, R] with "q_bias" [L, K, G, R] and "q_norm" [L, R],
    "k" [L, D, K, R] with "k_norm" [L, R], "sinks" [L, K, J, R], "bias" [L, K, G].
    """

    by = "fast-kvzip"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.width, model.kv_heads, model.heads // model.kv_heads)
        check_sizes(self, "gate", "layers, width, KV heads, heads of each", "q", sizes)

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        return sink_gate(arrays, inputs.hidden.astype(jnp.float32))


def sink_gate(arrays: dict[str, Array], x: Float[Array, "B T D"]) -> Float[Array, "B K T"]:
    """Compute Fast KVzip's gate (`SinkGate`) in one layer, from the layer's input."""
    q = jnp.einsum("btd,dkgr->btkgr", x, arrays["q"]) + arrays["q_bias"][None, None]
    k = jnp.einsum("btd,dkr->btkr", x, arrays["k"])
    q, k = (rms_norm(y, arrays[f"{name}_norm"], EPSILON) for name, y in (("q", q), ("k", k)))
    scale = k.shape[-1] ** -0.5
    mine = jnp.einsum("btkr,btkgr->bktg", k, q) * scale + arrays["bias"][None, :, None]
    sinks = jnp.einsum("kjr,btkgr->bktgj", arrays["sinks"], q) * scale
    # 1 / (1 + sum exp(sinks - mine)), written as a sigmoid, so that large logits do not overflow.
    return jax.nn.sigmoid(mine - jax.nn.logsumexp(sinks, -1)).mean(-1)


@dataclasses.dataclass(frozen=True)
class WriteGate(Gate):
    """Whether a token is worth keeping beyond a window, from its key (arXiv:2512.17452, 3.2).

    g = max(sigmoid(gelu([rms(k), rms(k')] W1 + b1) W2 + b2), 0.001), for every KV head by itself; k is its
    key before rotation, k' after it. fitted: "norm" [L, 2, H], "in" [L, K, 2 H, X], "in_bias" [L, K, X],
    "out" [L, K, X], "out_bias" [L, K], with X hidden channels.
    """

    by = "wg-kv"
    looks = True

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        sizes = (model.layers, model.kv_heads, 2 * model.head_dim)
        check_sizes(self, "gates", "layers, KV heads, channels of two keys", "in", sizes)

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        assert inputs.k is not None
        return write_gate(arrays, inputs.k_raw, inputs.k)


def write_gate(
    arrays: dict[str, Array], raw: Float[Array, "B K T H"], k: Float[Array, "B K T H"]
) -> Float[Array, "B K T"]:
    """Compute Write-Gated KV's gate (`WriteGate`) in one layer, from keys before and after rotation."""
    keys = zip((raw, k), arrays["norm"], strict=True)
    x = jnp.concatenate([rms_norm(y.astype(jnp.float32), w, EPSILON) for y, w in keys], -1)
    x = jnp.einsum("bkth,khx->bktx", x, arrays["in"]) + arrays["in_bias"][None, :, None]
    x = jax.nn.gelu(x, approximate=False)
    logit = jnp.einsum("bktx,kx->bkt", x, arrays["out"]) + arrays["out_bias"][None, :, None]
    return jnp.maximum(jax.nn.sigmoid(logit), LEAST)
