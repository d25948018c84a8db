"""One token of log-linear attention, with a kernel; `log_linear_step` defines the result.

Of log2(T) levels, the kernel reads the non-empty ones, about half of them, and writes them in place.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import asked_of_one, each_device, specs_of
from kvjax.ops.base.dispatch import form
from kvjax.ops.recurrent.gated_delta import HEADS, LANES, SUBLANES, step_refusal, widened
from kvjax.ops.recurrent.log_linear_levels import LevelState, level, log_linear_step, without
from kvjax.ops.recurrent.recurrence import RecurrenceInputs, StackedState, stacked
from kvjax.pallas_kernels.gated_delta.levels_tpu import decode_levels

# Logical axes of the levels of all layers.
LEVELS: Axes = (None, "batch", None, "heads")


def log_linear_decode(
    state: LevelState,
    token: RecurrenceInputs,
    level_scales: Float[Array, "B H L"],
    mask: Bool[Array, "B"] | None = None,
    *,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B H V"], LevelState]:
    """`log_linear_step`: (output as v, new state) of one token per row, its arrays without the time axis.

    The kernel reads the levels that are in use at a row's position; the others must be empty, as they are in
    every state returned by `log_linear`. implementation: "reference", "tpu" or "tpu interpret"; None takes
    the kernel if it  can run. Raises NotImplementedError if a forced one cannot. on: the mesh that rows
    and heads are split over, by its rules; the kernel then runs on every device's own.

    >>> x, state = jnp.ones((1, 1, 1)), LevelState(jnp.zeros((1, 3, 1, 1, 1)), jnp.zeros(1, jnp.int32))
    >>> scales = jnp.asarray([[[1.0, 10.0, 100.0]]])
    >>> for t in range(3):  # at position 2: itself on level 0, the two others on level 2
    ...     o, state = log_linear_decode(state, RecurrenceInputs(x, x, x, 0 * x, None), scales)
    >>> o.item()
    201.0
    """
    stack, on = stacked(state.levels), on and on.with_whole_layers

    def form_of(layers: Array, token: RecurrenceInputs) -> str:
        why = step_refusal(layers, token)
        return form("log_linear_decode", implementation, layers, token, tpu=why)

    of_levels, of_token = specs_of(on, LEVELS, stack.layers), specs_of(on, HEADS, token)
    chosen = asked_of_one(on, form_of, (of_levels, of_token), (stack.layers, token))
    if chosen == "reference":
        out, new = log_linear_step(state, widened(token), level_scales, mask)
        return out.astype(token.v.dtype), new

    def call(layers: Array, layer: Array, following: Array, *fed: Any) -> tuple[Array, Array, Array]:
        mine = LevelState(StackedState(layers, layer), following)
        out, new = tpu_log_linear_decode(mine, *fed, interpret=chosen != "tpu")
        assert isinstance(new.levels, StackedState)
        return out, new.levels.layers, new.next

    args = stack.layers, jnp.asarray(stack.layer), state.next, token, level_scales, mask
    of_rows = specs_of(on, HEADS[:1], state.next)
    specs = of_levels, specs_of(on, (), args[1]), of_rows, *(specs_of(on, HEADS, x) for x in args[3:])
    made = specs_of(on, HEADS, token.v), of_levels, of_rows
    out, layers, following = each_device(on, call, specs, made)(*args)
    return out, LevelState(stack._replace(layers=layers).like(state.levels), following)


def tpu_log_linear_decode(
    state: LevelState, token: RecurrenceInputs, level_scales: Array, mask: Array | None = None, *,
    interpret: Any = False,
) -> tuple[Array, LevelState]:  # fmt: skip
    """Run the kernel on the operands of `log_linear_decode`."""
    stack, following = stacked(state.levels), state.next
    _, b, count, h, keys, values = stack.layers.shape
    real = jnp.ones((b,), bool) if mask is None else mask
    token = without(token, real)
    visits, counts, targets = visits_of(following, real, count)
    g = jnp.broadcast_to(token.log_decay, token.k.shape)
    together = SUBLANES if h % SUBLANES == 0 and keys * values <= 2 * LANES**2 else h
    out, levels = decode_levels(
        *token._replace(log_decay=g)[:5], jnp.moveaxis(level_scales, 2, 1)[..., None].astype(jnp.float32),
        stack.layers, jnp.asarray(stack.layer, jnp.int32)[None], visits, counts, targets,
        together=together, interpret=interpret,
    )  # fmt: skip
    new = StackedState(levels, stack.layer).like(state.levels)
    return out.astype(token.v.dtype), LevelState(new, following + real.astype(following.dtype))


def visits_of(
    following: Int[Array, "B"], real: Bool[Array, "B"], count: int
) -> tuple[Int[Array, "B L"], Int[Array, "B"], Int[Array, "B"]]:
    """(levels that each row visits, ascending, with the last one repeated; how many; the target level).

    At position 4, levels 0, 1 and 2 of the tokens before it become level 3.

    >>> visits, counts, targets = visits_of(jnp.asarray([4]), jnp.asarray([True]), 5)
    >>> visits.tolist(), counts.tolist(), targets.tolist()
    ([[0, 1, 2, 3, 3]], [4], [3])
    """
    number = jnp.arange(count, dtype=jnp.int32)[None]
    move = jnp.where(real & (following > 0), level(following, following - 1), 0)
    targets = jnp.minimum(move, count - 1)
    last = jnp.maximum(following - 1, 0)[:, None]
    # Level l is in use if bit l - 1 of the last position is set; the topmost has all higher bits.
    bits = last >> jnp.maximum(number - 1, 0)
    used = jnp.where(number == count - 1, bits > 0, (bits & 1) == 1)
    wanted = (number == 0) | used | (number == targets[:, None])
    counts = wanted.sum(1, dtype=jnp.int32)
    order = jnp.sort(jnp.where(wanted, number, count), 1)
    return jnp.minimum(order, jnp.max(jnp.where(wanted, number, 0), 1)[:, None]), counts, targets
