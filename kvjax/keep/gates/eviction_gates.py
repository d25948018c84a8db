"""Eviction gates: a head keeps a token while its gate is above one half."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.fitted import ModelSizes, check_sizes
from kvjax.grammar.kinds import Inputs
from kvjax.keep.gates.gate import Gate, HiddenGate, gated

# How many queries of a gate attend to all its keys at a time.
STRIP = 256


@dataclasses.dataclass(frozen=True)
class EvictionGate(HiddenGate):
    """The log-odds that a head keeps a token, from the layer's input (arXiv:2506.05345, section 3).

    -(x w + b) of the layer's normalised input x; a token is evicted where round(sigmoid(x w + b)) is 1.
      fitted:
    "out" [L, D, K], "out_bias" [L, K].
    """

    by = "dms"

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        return -jnp.moveaxis(gated(arrays, inputs.hidden.astype(jnp.float32)), 2, 1)


@dataclasses.dataclass(frozen=True)
class AttentionGate(Gate):
    """The log-odds that a head keeps a token, from attention to tokens read with it (arXiv:2410.12876).

    sigmoid([softmax(q_j k_j' / sqrt(R)) v_j] over all J heads W_o + b), where q, k and v have R channels and
    are projected from the layer's input. The tokens read together are those of a prompt, a turn or a chunk; a
    generated token attends to itself only. fitted: "q", "k" and "v" [L, D, J, R], "out" [L, J, R, K],
    "out_bias" [L, K].
    """

    by = "attention-gate"

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the fitted arrays do not fit the model's sizes."""
        check_sizes(self, "gate", "layers, width", "q", (model.layers, model.width))
        check_sizes(self, "gate", "layers, KV heads", "out_bias", (model.layers, model.kv_heads))

    def of(self, arrays: dict[str, Array], inputs: Inputs) -> Float[Array, "B K T"]:
        logit = attention_gate(arrays, inputs.hidden.astype(jnp.float32), inputs.pos >= 0)
        return jax.nn.sigmoid(logit)


def attention_gate(
    arrays: dict[str, Array], x: Float[Array, "B T D"], live: Bool[Array, "B T"]
) -> Float[Array, "B K T"]:
    """Compute the log-odds that tokens are kept, given one layer's hidden states, in strips of queries."""
    q, k, v = (jnp.einsum("btd,djr->bjtr", x, arrays[name]) for name in "qkv")
    (b, heads, t, r), size = q.shape, min(STRIP, x.shape[1])
    strips = jnp.pad(q, ((0, 0), (0, 0), (0, -t % size), (0, 0))).reshape(b, heads, -1, size, r)

    def one(strip: Float[Array, "B J W R"]) -> Float[Array, "B K W"]:
        s = jnp.einsum("bjwr,bjtr->bjwt", strip, k) * r**-0.5
        p = jax.nn.softmax(jnp.where(live[:, None, None], s, -1e30), -1)
        return jnp.einsum("bjwr,jrk->bkw", jnp.einsum("bjwt,bjtr->bjwr", p, v), arrays["out"])

    each = jnp.moveaxis(jax.lax.map(one, jnp.moveaxis(strips, 2, 0)), 0, 2)
    return each.reshape(b, each.shape[1], -1)[..., :t] + arrays["out_bias"][None, :, None]
