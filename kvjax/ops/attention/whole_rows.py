"""Causal attention of whole rows of tokens over themselves: on a GPU by cuDNN's kernel, with gradients.

The kernel is NVIDIA's form of FlashAttention-2 (Dao, 2023, arXiv:2307.08691), called through `jax.nn`.
Rows have no past, as in training and at the start of a prompt. Their tokens are in order, so indices within
the row decide visibility, and no positions are needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import asked_of_one, axes_of_queries, each_device, specs_of
from kvjax.ops.attention.strips import causal_in_strips
from kvjax.ops.attention.union import Keys
from kvjax.ops.base.dispatch import INTERPRET, alone, form, platform


def attend_whole_rows(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T V"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> Float[Array, "B N T V"]:
    """Causal attention of T tokens over themselves; a token sees at most `window` of them, its own included.

    implementation: "reference" (`kvjax.ops.attention.strips`), "gpu" (`jax.nn.dot_product_attention` by
    cuDNN) or "gpu interpret" (the same call without cuDNN, for tests); None takes cuDNN if it can run. Raises
    NotImplementedError if a forced form cannot. on: the mesh that rows and heads are split over, by its
    rules; every device then attends to its own.

    >>> x = jnp.arange(3.0).reshape(1, 1, 3, 1) * jnp.ones((1, 1, 3, 8))
    >>> attend_whole_rows(x, x, x, scale=0.0)[0, 0, :, 0].tolist()
    [0.0, 0.5, 1.0]
    """
    asked = implementation is None or not implementation.endswith(INTERPRET)

    def form_of(q: Array, k: Array, v: Array) -> str:
        why = refusal(q, k, v) or (unable(q, k, v, window) if asked else "")
        return form("attention of whole rows", implementation, q, k, v, gpu=why)

    on, specs = _split(on, q, k, v)
    chosen = asked_of_one(on, form_of, specs, (q, k, v))
    if chosen == "reference":
        pos = jnp.broadcast_to(jnp.arange(q.shape[2], dtype=jnp.int32), (q.shape[0], q.shape[2]))
        return causal_in_strips(q, Keys(k, v, pos[:, None]), (), pos, scale=scale, window=window)[0]
    call = _call("xla" if chosen.endswith(INTERPRET) else "cudnn", window)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return _rows_last(call(*map(_rows_last, (q, k, v)), scale=scale))

    return each_device(on, attend, specs, specs and specs[0])(q, k, v)


def _split(on: OnMesh | None, q: Array, k: Array, v: Array) -> tuple[OnMesh | None, list[Any]]:
    """Return the mesh and the specs of these arrays, if devices have their own KV heads; else None."""
    axes = None if on is None else axes_of_queries(on, k.shape[1], mass=False)
    if on is None or axes is None:
        return None, []
    return on, [specs_of(on, axes, q), *(specs_of(on, ("batch", "kv_heads"), x) for x in (k, v))]


def _rows_last(x: Array) -> Array:
    """Heads and tokens exchanged."""
    return jnp.swapaxes(x, 1, 2)


def _call(by: Any, window: int | None) -> Any:
    reach = None if window is None else (window - 1, 0)
    call = partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=reach, implementation=by)

    def attend(q: Array, k: Array, v: Array, scale: float) -> Array:
        with jax.numpy_dtype_promotion("standard"):  # jax promotes bfloat16 to float32 inside it
            return call(q, k, v, scale=scale)

    return attend


def can_run(
    q: Array, k: Array, v: Array, window: int | None, implementation: str | None = None,
    on: OnMesh | None = None,
) -> bool:  # fmt: skip
    """Whether cuDNN runs for these operands, unless `implementation` forces another form."""
    if implementation is not None or platform() != "gpu":
        return False

    def able(q: Array, k: Array, v: Array) -> bool:
        return alone(q, k, v) and not (refusal(q, k, v) or unable(q, k, v, window))

    on, specs = _split(on, q, k, v)
    return asked_of_one(on, able, specs, (q, k, v))


def refusal(q: Array, k: Array, v: Array) -> str:
    """Why cuDNN's attention cannot take these operands; empty if it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"q, k and v of {q.dtype}, {k.dtype} and {v.dtype}, expected bfloat16 or float16 of all"
    if q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3]:
        return f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}, expected one length and width"
    return ""


def unable(q: Array, k: Array, v: Array, window: int | None) -> str:
    """Why this jax, its cuDNN or its GPU cannot run it; empty if they can."""
    shapes = [jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:0:-1], x.shape[3]), x.dtype) for x in (q, k, v)]
    try:
        jax.eval_shape(partial(_call("cudnn", window), scale=1.0), *shapes)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""
