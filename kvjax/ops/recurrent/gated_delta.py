"""The general recurrence of linear attentions, with kernels: sequences, their gradients, and single tokens.

`kvjax.ops.recurrent.recurrence` defines the result for all of its members: RetNet, GLA, Mamba-2,
DeltaNet, Gated DeltaNet, KDA, Comba, GDN-2. q, k, v and erase may be bfloat16 here; states and log decays are
float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import asked_of_one, each_device, specs_of
from kvjax.ops.base.dispatch import form
from kvjax.ops.base.dtypes import wide
from kvjax.ops.base.packed_sequences import segment_starts
from kvjax.ops.recurrent import recurrence
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState, stacked
from kvjax.pallas_kernels.gated_delta import kernel_tpu as tpu
from kvjax.pallas_kernels.gated_delta.backward_tpu import backward
from kvjax.pallas_kernels.gated_delta.chunk import HeadChunk
from kvjax.pallas_kernels.gated_delta.decode_tpu import decode

LANES, SUBLANES, LARGEST_CHUNK, SPAN, STEP_NUMBERS = 128, 8, 128, 16, 2**18
# A log decay that forgets everything, for a segment's first token; finite, so that sums stay finite.
FORGET = -1e30
# Logical axes of one token's arrays and of states, of a sequence's arrays, and of the states of all layers.
HEADS: Axes = ("batch", "heads")
SEQUENCE: Axes = ("batch", None, "heads")
STACK: Axes = (None, *HEADS)


def gated_delta(
    tokens: RecurrenceInputs,
    state: Float[Array, "B H K V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    *,
    implementation: str | None = None,
    on: OnMesh | None = None,
    least: float | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`recurrence.chunked`: (outputs in the dtype of v, final state in float32), from `state` or zeros.

    implementation: "reference", "tpu" or "tpu interpret"; None takes the kernel if it  can run. For the
    gradient, the kernel stores the state before every 16th chunk and recomputes the others. Raises
    NotImplementedError if a forced one cannot run. on: the mesh that rows and heads are split over, by its
    rules; the kernel then runs on every device's own. least: a lower bound of all log decays, with which the
    reference may need fewer exponentials.

    >>> x = jnp.ones((1, 3, 1, 2)) * 0.5**0.5
    >>> out, state = gated_delta(RecurrenceInputs(x, x, x, -x, x))
    >>> out.shape, state.shape
    ((1, 3, 1, 2), (1, 1, 2, 2))
    """

    def form_of(tokens: RecurrenceInputs, state: Array | None) -> str:
        return form("gated_delta", implementation, tokens, state, tpu=refusal(tokens))

    of_tokens, of_state = (specs_of(on, axes, x) for axes, x in ((SEQUENCE, tokens), (HEADS, state)))
    chosen = asked_of_one(on, form_of, (of_tokens, of_state), (tokens, state))
    if chosen == "reference":
        out, state = recurrence.chunked(widened(tokens), state, segments, least=least)
        return out.astype(tokens.v.dtype), state
    call = partial(tpu_gated_delta, interpret=chosen != "tpu")
    specs = of_tokens, of_state, specs_of(on, HEADS[:1], segments)
    made = specs_of(on, SEQUENCE, tokens.v), specs_of(on, HEADS, tokens.v[:, 0])
    return each_device(on, call, specs, made)(tokens, state, segments)


def gated_delta_step(
    state: Float[Array, "B H K V"] | StackedState,
    token: RecurrenceInputs,
    *,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"] | StackedState]:
    """`recurrence.step`: one token per row, its arrays without the time axis: (output as v, new state).

    The kernel reads and writes every state once, in place if it is donated; of a `StackedState`, which is
    returned as one, it touches only one layer. implementation, errors and on as in `gated_delta`.

    >>> x = jnp.ones((1, 1, 2)) * 0.5**0.5
    >>> out, state = gated_delta_step(jnp.zeros((1, 1, 2, 2)), RecurrenceInputs(x, x, x, -x, x))
    >>> round(out[0, 0, 0].item(), 3)
    0.707
    """
    stack, on = stacked(state), on and on.with_whole_layers

    def form_of(layers: Array, token: RecurrenceInputs) -> str:
        return form("gated_delta_step", implementation, layers, token, tpu=step_refusal(layers, token))

    specs = specs_of(on, STACK, stack.layers), specs_of(on, HEADS, token)
    chosen = asked_of_one(on, form_of, specs, (stack.layers, token))
    if chosen == "reference":
        out, own = recurrence.step(stack.own(), widened(token))
        out, new = out.astype(token.v.dtype), stack.replaced(own)
    else:

        def call(layers: Array, token: RecurrenceInputs, layer: Array) -> tuple[Array, Array]:
            out, new = tpu_gated_delta_step(StackedState(layers, layer), token, interpret=chosen != "tpu")
            return out, new.layers

        layer = jnp.asarray(stack.layer)
        here = each_device(
            on, call, (*specs, specs_of(on, (), layer)), (specs_of(on, HEADS, token.v), specs[0])
        )
        out, layers = here(stack.layers, token, layer)
        new = stack._replace(layers=layers)
    return out, new.like(state)


def refusal(tokens: RecurrenceInputs) -> str:
    """Why the TPU kernels cannot take these tokens; empty if they can."""
    arrays = (tokens.q, tokens.k, tokens.v, tokens.erase, tokens.removal)
    kinds = {x.dtype.name for x in arrays if x is not None}
    if len(kinds) > 1 or not kinds <= {"float32", "bfloat16"}:
        return f"tokens of {' and '.join(sorted(kinds))}, expected all float32 or all bfloat16"
    if tokens.log_decay.dtype != jnp.float32:
        return f"log decays of {tokens.log_decay.dtype}, expected float32"
    if max(tokens.k.shape[-1], tokens.v.shape[-1]) > 2 * LANES:
        return f"heads of {tokens.k.shape[-1]} x {tokens.v.shape[-1]}, expected at most 256 x 256"
    return "" if tokens.k.size else "there are no tokens"


def step_refusal(state: Array, token: RecurrenceInputs) -> str:
    """Why the TPU kernel cannot take these states [..., K, V] and token; empty if it can."""
    if token.removal is not None:
        return "a token that erases along another key than it writes to"
    if state.dtype != jnp.float32:
        return f"states of {state.dtype}, expected float32"
    keys, values = state.shape[-2:]
    if keys % SUBLANES or values % LANES:
        return f"states of {keys} x {values} would be copied, expected multiples of {SUBLANES} x {LANES}"
    return refusal(token)


def widened(tokens: RecurrenceInputs) -> RecurrenceInputs:
    """Widen the tokens to promote(float32, tokens), as the reference takes them."""
    dtype = wide(tokens.v, tokens.log_decay)
    return jax.tree.map(lambda x: x.astype(dtype), tokens)


def tpu_gated_delta(
    tokens: RecurrenceInputs, state: Array | None = None, segments: Array | None = None, *,
    chunk: int | None = None, span: int = SPAN, interpret: Any = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run the kernels on the operands of `gated_delta`.

    chunk: tokens per grid step, a power of two from 8 on; span: how many chunks there are between states
    stored for the gradient. A token with a removal key counts as two tokens.
    """
    if tokens.removal is not None:
        twice = None if segments is None else jnp.repeat(segments, 2, axis=1)
        one = recurrence.with_one_key(tokens)
        out, last = tpu_gated_delta(one, state, twice, chunk=chunk, span=span, interpret=interpret)
        return out[:, 1::2], last
    b, t, h, keys = tokens.k.shape
    values = tokens.v.shape[-1]
    size = chunk or min(LARGEST_CHUNK, max(16, 1 << (t - 1).bit_length()))
    start = jnp.zeros((b, h, keys, values)) if state is None else state.astype(jnp.float32)
    start = jnp.pad(start, [(0, 0)] * 2 + [(0, -keys % LANES), (0, -values % LANES)])
    g = tokens.log_decay
    if segments is not None:
        g = jnp.where(segment_starts(segments, (b, t))[..., None, None], FORGET, g)
    if g.shape[-1] == 1:
        g = jnp.pad(jnp.moveaxis(g[..., 0], 1, 2), [(0, 0), (0, 0), (0, -t % size)])
        g = g.reshape(b, h, -1, 1, size)
    else:
        g = _flat(g)
    q, k, v, p = (None if x is None else _flat(x) for x in (tokens.q, tokens.k, tokens.v, tokens.erase))
    exact = tokens.k.dtype == jnp.float32
    together = heads_together(h, start.shape[2] * start.shape[3], exact)
    sizes = tpu.Sizes(h, size, together, t, exact, span)
    out, last = _chunks(sizes, interpret, HeadChunk(q, k, v, g, p), start)  # type: ignore[misc]
    return out.reshape(b, t, h, -1)[..., :values], last[:, :, :keys, :values]


def heads_together(heads: int, state: int, exact: bool) -> int:
    """Heads per grid step, to hide the latency of products: four of 128 x 128, or two of float32.

    >>> [heads_together(n, 128 * 128, exact=False) for n in (16, 6, 7)], heads_together(16, 128 * 128, True)
    ([4, 2, 1], 2)
    """
    most = max(1, (2 if exact else 4) * LANES * LANES // state)
    return max(n for n in (1, 2, 4) if heads % n == 0 and n <= most)


def tpu_gated_delta_step(
    state: StackedState, token: RecurrenceInputs, *, interpret: Any = False
) -> tuple[Array, StackedState]:
    """Run the kernel on the operands of `gated_delta_step`."""
    layers, b, h, keys, values = state.layers.shape
    # About a megabyte per copy.
    together = max(SUBLANES, STEP_NUMBERS // (keys * values) // SUBLANES * SUBLANES)
    g = jnp.broadcast_to(token.log_decay, token.k.shape)
    q, k, v, g, p = (None if x is None else x.reshape(b * h, -1) for x in token._replace(log_decay=g)[:5])
    out, new = decode(
        q, k, v, g, p,  # pyright: ignore[reportArgumentType]
        state.layers.reshape(layers, b * h, keys, values), jnp.asarray(state.layer, jnp.int32)[None],
        together=min(together, b * h), interpret=interpret,
    )  # fmt: skip
    return out.reshape(b, h, values), StackedState(new.reshape(state.layers.shape), state.layer)


def _flat(x: Array) -> Array:
    """Return [B, T, H * K] with K padded to whole lanes."""
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % LANES)])
    return x.reshape(*x.shape[:2], -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunks(sizes: tpu.Sizes, interpret: Any, tokens: HeadChunk, state: Array) -> tuple[Array, Array]:
    out, state = tpu.forward(tokens, state, sizes=sizes._replace(span=0), interpret=interpret)
    return out, state


def _chunks_forward(sizes: tpu.Sizes, interpret: Any, tokens: HeadChunk, state: Array) -> Any:
    out, state, saved = tpu.forward(tokens, state, sizes=sizes, interpret=interpret)
    return (out, state), (tokens, saved)


def _chunks_backward(sizes: tpu.Sizes, interpret: Any, kept: Any, given: Any) -> Any:
    return backward(*kept, *given, sizes=sizes, interpret=interpret)


_chunks.defvjp(_chunks_forward, _chunks_backward)
