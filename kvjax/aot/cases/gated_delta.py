"""The recurrence of linear attentions: sequences of 8192 tokens, their gradients, and one token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.aot.case import Case
from kvjax.aot.hardware import Device
from kvjax.ops.recurrent.gated_delta import (
    STEP_NUMBERS,
    SUBLANES,
    heads_together,
    tpu_gated_delta,
    tpu_gated_delta_step,
)
from kvjax.ops.recurrent.log_linear_decode import tpu_log_linear_decode
from kvjax.ops.recurrent.log_linear_levels import LevelState, levels_for
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, stacked
from kvjax.pallas_kernels.gated_delta.backward_tpu import backward
from kvjax.pallas_kernels.gated_delta.chunk import HeadChunk
from kvjax.pallas_kernels.gated_delta.kernel_tpu import Sizes

BATCH, TIME, HEADS, WIDTH = 4, 8192, 16, 128


def _tokens(by_channel: bool, dtype: Any) -> tuple[Any, ...]:
    """q, k, v, g, erase as projections make them, heads side by side."""
    wide = jax.ShapeDtypeStruct((BATCH, TIME, HEADS * WIDTH), dtype)
    g = jax.ShapeDtypeStruct((BATCH, TIME, HEADS * (WIDTH if by_channel else 1)), jnp.float32)
    return wide, wide, wide, g, wide


def _bytes(*xs: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in xs)


def _flops(chunk: int) -> int:
    """Operations of the forward pass: products with k, the state, the inverse, the solve, the output."""
    pairs, state, rows = (2 * chunk * n for n in (2 * chunk * WIDTH, 3 * WIDTH * WIDTH, 2 * chunk * WIDTH))
    inverse = 2 * 2 * chunk**3 // 6
    return BATCH * HEADS * TIME // chunk * (pairs + state + rows + inverse)


def _run(tokens: tuple[Any, ...], state: Any, **how: Any) -> tuple[Any, Any]:
    by_head = (x.reshape(BATCH, TIME, HEADS, -1) for x in tokens)
    out, state = tpu_gated_delta(RecurrenceInputs(*by_head), state, **how)
    return out.reshape(BATCH, TIME, -1), state


STATE = jax.ShapeDtypeStruct((BATCH, HEADS, WIDTH, WIDTH), jnp.float32)


def sequence(device: Device, *, by_channel: bool, dtype: Any = jnp.bfloat16, chunk: int = 128) -> Case:
    """Run the forward pass of Gated DeltaNet, or with decays per channel of KDA."""
    tokens, together = _tokens(by_channel, dtype), heads_together(HEADS, WIDTH * WIDTH, dtype == jnp.float32)
    return Case(
        partial(_run, chunk=chunk), (tokens, STATE),
        _bytes(*tokens, tokens[0], STATE, STATE), _flops(chunk), 0, "gated_delta_chunks",
        trips={"1": BATCH * HEADS // together * TIME // chunk}, profiles=False,
    )  # fmt: skip


def gradient(
    device: Device,
    *,
    by_channel: bool,
    dtype: Any = jnp.bfloat16,
    chunk: int = 128,
    span: int = 16,
) -> Case:
    """Run the backward pass of `sequence`."""
    tokens, exact = _tokens(by_channel, dtype), dtype == jnp.float32
    together = heads_together(HEADS, WIDTH * WIDTH, exact)
    saved = jax.ShapeDtypeStruct((BATCH, HEADS, TIME // chunk // span, WIDTH, WIDTH), jnp.float32)
    sizes = Sizes(HEADS, chunk, together, TIME, exact, span)

    def run(tokens: tuple[Any, ...], saved: Any, dout: Any, dstate: Any) -> Any:
        q, k, v, g, p = tokens
        if not by_channel:
            g = jnp.moveaxis(g, 1, 2).reshape(BATCH, HEADS, -1, 1, chunk)
        return backward(HeadChunk(q, k, v, g, p), saved, dout, dstate, sizes=sizes)

    # The kernel makes two passes over every span, to recompute its states and for gradients: half of the
    # steps each. Every span is read twice, except q and the gradient of the outputs.
    moved = _bytes(*tokens) * 3 - _bytes(tokens[0]) + _bytes(tokens[0], saved, STATE, STATE)
    return Case(
        run, (tokens, saved, tokens[0], STATE), moved, 3 * _flops(chunk), 0,
        "gated_delta_gradient", trips={"1": BATCH * HEADS // together * TIME // chunk}, profiles=False,
    )  # fmt: skip


def token(
    device: Device,
    *,
    by_channel: bool,
    rows: int = 64,
    heads: int = 32,
) -> Case:
    """One token of many rows; the states are donated."""
    wide = jax.ShapeDtypeStruct((rows, heads, WIDTH), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((rows, heads, WIDTH if by_channel else 1), jnp.float32)
    state = jax.ShapeDtypeStruct((rows, heads, WIDTH, WIDTH), jnp.float32)

    def run(state: Any, *token: Any) -> tuple[Any, Any]:
        out, new = tpu_gated_delta_step(stacked(state), RecurrenceInputs(*token))
        return out, new.own()

    return Case(
        run, (state, wide, wide, wide, g, wide), _bytes(state, state, wide, wide, wide, wide, wide, g),
        rows * heads * 6 * WIDTH * WIDTH, _bytes(state), "gated_delta_step",
        trips={"1": rows * heads * WIDTH * WIDTH // STEP_NUMBERS}, profiles=False, donated=(0,),
    )  # fmt: skip


def levels(device: Device, *, by_channel: bool, rows: int = 16, heads: int = 32) -> Case:
    """One token of log-linear attention: of the 14 levels of 8192 tokens, it visits half and one."""
    count, visited = levels_for(TIME), levels_for(TIME) // 2 + 1
    wide = jax.ShapeDtypeStruct((rows, heads, WIDTH), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((rows, heads, WIDTH if by_channel else 1), jnp.float32)
    state = jax.ShapeDtypeStruct((rows, count, heads, WIDTH, WIDTH), jnp.float32)
    scales = jax.ShapeDtypeStruct((rows, heads, count), jnp.float32)

    def run(levels: Any, following: Any, scales: Any, *token: Any) -> Any:
        return tpu_log_linear_decode(LevelState(levels, following), RecurrenceInputs(*token), scales)

    moved = 2 * _bytes(state) // count * visited
    return Case(
        run, (state, jax.ShapeDtypeStruct((rows,), jnp.int32), scales, wide, wide, wide, g, wide),
        moved + _bytes(scales, wide, wide, wide, wide, wide, g),
        rows * heads * visited * 6 * WIDTH * WIDTH, _bytes(state), "log_linear_step",
        trips={"1": rows * heads // SUBLANES * visited}, profiles=False, donated=(0,),
    )  # fmt: skip


KINDS = {
    "bfloat16": dict(by_channel=False),
    "bfloat16-kda": dict(by_channel=True),
    "float32": dict(by_channel=False, dtype=jnp.float32),
    "float32-kda": dict(by_channel=True, dtype=jnp.float32),
}
CASES: dict[str, Callable[[Device], Case]] = {
    **{f"gated_delta-{name}": partial(sequence, **kind) for name, kind in KINDS.items()},
    "gated_delta-bfloat16-chunk64": partial(sequence, by_channel=False, chunk=64),
    "gated_delta-bfloat16-kda-chunk64": partial(sequence, by_channel=True, chunk=64),
    **{f"gated_delta-gradient-{name}": partial(gradient, **kind) for name, kind in KINDS.items()},
    "gated_delta-step": partial(token, by_channel=False),
    "gated_delta-step-kda": partial(token, by_channel=True),
    "gated_delta-levels": partial(levels, by_channel=False),
    "gated_delta-levels-kda": partial(levels, by_channel=True),
}
