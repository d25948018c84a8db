"""Attention sinks: learned sinks and biases, clipped softmax, and gates on the output.

A softmax always sums to one; a head with nothing to attend to needs somewhere to put its weight. Sinks and
key/value biases are one more slot, and one more slot is a correction of (out, lse) afterwards: no other
kernel, no longer cache. It works with `kvjax.ops.attention.union.attend` (which also takes learned
keys as a set of `Keys` without positions) as well as with `sink_attention` here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention import token_cache as cache
from kvjax.ops.attention.token_cache import QUERIES, Mask, Places, Segments, TokenCache
from kvjax.ops.base.dtypes import wide


def add_slot(
    out: Float[Array, "*s V"],
    lse: Float[Array, "*s"],
    score: Float[Array, "*#s"],
    value: Float[Array, "*#s V"] | None = None,
) -> tuple[Float[Array, "*s V"], Float[Array, "*s"]]:
    """Return (out, lse) of attention over one more slot with the logit `score`; its value is 0 unless given.

    out + sigmoid(score - lse) (value - out) and log(e^lse + e^score): the exact merge of partial attentions
    (FlashAttention, arXiv:2205.14135) with a part of one slot. Without a value e^score joins the denominator
    only, and out * sigmoid(lse - score) remains: a learned sink per query head, as in GPT-OSS (OpenAI, 2025,
    arXiv:2508.10925). score = 0 is the "softmax off by one", SoftMax1 or zero sink of StreamingLLM (Xiao et
    al., 2023, arXiv:2309.17453); that paper's learnable sink is a token at the start of the prompt, which
    needs no operation.

    The caller chooses layouts: a sink [N] is sink[None, :, None] for `attend` and sink[None, None] for
    [B, T, N]. Where lse is -inf (a query that sees nothing), the slot takes all the weight.

    >>> from kvjax.ops.attention.union import Keys, attend
    >>> one = jnp.ones((1, 1, 1, 1))
    >>> at = jnp.zeros((1, 1), jnp.int32)
    >>> out, lse, _ = attend(one, Keys(one, one, at[:, None]), at, scale=1.0)
    >>> add_slot(out, lse, jnp.ones((1, 1, 1)))[0].item()  # e / (e + e)
    0.5
    """
    dtype = wide(out, lse)
    old, lse, score = out.astype(dtype), lse.astype(dtype), score.astype(dtype)
    merged = old * jax.nn.sigmoid(lse - score)[..., None]
    if value is not None:
        merged = merged + value.astype(dtype) * jax.nn.sigmoid(score - lse)[..., None]
    return merged.astype(out.dtype), jnp.logaddexp(lse, score)


def add_kv_bias(
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    q: Float[Array, "B T N K"],
    k_bias: Float[Array, "N K"],
    v_bias: Float[Array, "N V"],
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Return (out, lse) with one more key k' and value v' per query head, visible to every query.

    Learned k', v' replace massive activations (Sun et al., 2024, arXiv:2402.17762). scale is that
    of the attention, K^-0.5 unless given.

    >>> x = jnp.ones((1, 1, 1, 2))
    >>> add_kv_bias(x, jnp.zeros((1, 1, 1)), x, jnp.zeros((1, 2)), 3 * x[0, 0])[0].ravel().tolist()
    [2.0, 2.0]
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    score = jnp.einsum("btnk,nk->btn", q.astype(lse.dtype), k_bias.astype(lse.dtype)) * factor
    return add_slot(out, lse, score, v_bias[None, None])


def sink_attention(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    sink: Float[Array, "N"],
    *,
    window: int | None = None,
    initial_state: TokenCache | None = None,
    capacity: int | None = None,
    segments: Segments = None,
    mask: Mask = None,
    recurrent: bool = False,
    scale: float | None = None,
) -> tuple[Float[Array, "B T N V"], TokenCache]:
    """Causal attention with a learned sink logit per query head (`add_slot`), over the last `window` tokens.

    The layer of GPT-OSS (arXiv:2508.10925): windows of 128 in every other layer, the token itself included.
    scale is K^-0.5 unless given. The state keeps k and v in promote(float32, input), also those outside the
    window, unlike a ring buffer. One query at a time with `recurrent`, otherwise many. Segments do not see
    each other; tokens that mask leaves out are not kept. The number of slots is as in
    `kvjax.ops.attention.token_cache`.

    >>> x = jnp.ones((1, 3, 1, 1))
    >>> o, state = sink_attention(x, x, x, jnp.ones(1), window=1)
    >>> o.ravel().tolist()
    [0.5, 0.5, 0.5]
    """
    dtype = wide(v)
    q, k, v, sink = (x.astype(dtype) for x in (q, k, v, sink))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    slots, at = cache.append({"k": k, "v": v}, initial_state, segments, mask, capacity)

    def some(q: Array, at: Places) -> Array:
        visible = cache.seen(at, cache.stored(slots), window)
        out, lse = cache.attend(q, slots.kept["k"], slots.kept["v"], visible, scale=factor)
        return add_slot(out, lse, sink[None, None])[0]

    out = cache.over_queries(some, q, at, 1 if recurrent else QUERIES)
    return cache.checked(out, at.slot[..., None], slots.capacity), slots


def clipped_softmax(
    scores: Float[Array, "B N T S"], *, gamma: float, zeta: float = 1.0
) -> Float[Array, "B N T S"]:
    """clip((zeta - gamma) softmax(scores) + gamma, 0, 1) with gamma <= 0 and zeta >= 1.

    Probabilities may be exactly 0 (and 1) at finite logits, so heads that do nothing need no outliers
    (Quantizable Transformers; Bondarenko, Nagel & Blankevoort, 2023, arXiv:2306.12929, section 4). The
    paper's gamma is -alpha / T for sequences of length T, alpha from 2 to 4. Invisible keys have the score
    -inf and get 0. Rows do not sum to one, so partial results cannot be merged by their normalisers.

    >>> clipped_softmax(jnp.asarray([[[[0.0, 4.0, -jnp.inf]]]]), gamma=-0.125, zeta=1.125).ravel().tolist()
    [0.0, 1.0, 0.0]
    """
    if gamma > 0 or zeta < 1:
        raise ValueError(f"clipped softmax needs gamma <= 0 and zeta >= 1, got gamma {gamma} and zeta {zeta}")
    p, _ = cache.softmax(scores, ~jnp.isneginf(scores))
    return jnp.clip((zeta - gamma) * p + gamma, 0.0, 1.0)


def gated_output(out: Float[Array, "*s V"], gate: Float[Array, "*s"]) -> Float[Array, "*s V"]:
    """sigmoid(gate) out, one gate per token and head: gated attention (arXiv:2306.12929, section 4).

    gate is a small function of that head's input, a linear map or a small MLP, and its bias starts it near
    open.

    >>> gated_output(jnp.ones((1, 2)), jnp.zeros(1)).tolist()
    [[0.5, 0.5]]
    """
    return out * jax.nn.sigmoid(gate)[..., None].astype(out.dtype)
