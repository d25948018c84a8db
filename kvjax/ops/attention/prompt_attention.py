"""Attention of many new tokens over a cache and over themselves: in strips, or by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.mesh.per_device import asked_of_one, axes_of_queries, each_device, specs_of
from kvjax.ops.attention import attention_stats as stats
from kvjax.ops.attention import flash_prefill as flash
from kvjax.ops.attention.in_common import row_by_row, side_by_side
from kvjax.ops.attention.strips import STRIP, attend_in_strips, causal_in_strips
from kvjax.ops.attention.union import Keys, Masses, Reduction, attend, merge, newer_queries
from kvjax.ops.base.dispatch import form, kernels_may_run


def causal_attention(
    q: Float[Array, "B N T H"],
    new: Keys,
    past: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
    implementation: str | None = None,
    on: OnMesh | None = None,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """Attention of T new tokens over `past` sets and over themselves; returns (out, lse, masses).

    Masses come as (one per past set ..., the new set); `mass` and `clip` are those of
    `kvjax.ops.attention.union.weigh`. The new keys must be in the order of the queries.

    implementation: "reference" (`kvjax.ops.attention.strips`), "tpu" or "tpu interpret", which are
    `flash_prefill` of every set, and `attention_stats` for the masses; None takes the kernels where they can
    run. Raises NotImplementedError if forced ones cannot. on: the mesh that rows and heads are split over,
    by its rules; kernels then run on every device's own.

    >>> x, pos = jnp.ones((1, 1, 3, 8)), jnp.arange(3)[None]
    >>> summed = (Reduction("sum"),)
    >>> _, _, ((found,),) = causal_attention(x, Keys(x, x, pos[:, None]), (), pos, scale=1.0, mass=summed)
    >>> [round(x, 2) for x in found[0, 0].tolist()]
    [1.83, 0.83, 0.33]
    """
    options: dict[str, Any] = dict(scale=scale, window=window, softcap=softcap)
    if not kernels_may_run(implementation):
        return causal_in_strips(q, new, past, q_pos, mass=mass, clip=clip, **options)

    def form_of(q: Array, *sets: Keys) -> str:
        return form("prompt attention", implementation, q, sets, tpu=refusal(q, sets, mass, clip))

    args, axes = (
        (q, q_pos, *past, new),
        None if on is None else _axes_of_queries(on, (*past, new), bool(mass)),
    )
    specs: list[Any] = []
    if on is None or axes is None:
        chosen = form_of(q, *past, new)
    else:
        of_sets = (specs_of(on, ("batch", "kv_heads"), keys) for keys in args[2:])
        specs = [specs_of(on, axes, q), specs_of(on, ("batch",), q_pos), *of_sets]
        chosen = asked_of_one(on, form_of, [specs[0], *specs[2:]], (q, *past, new))
    if chosen == "reference":
        return causal_in_strips(q, new, past, q_pos, mass=mass, clip=clip, **options)
    call = partial(_by_kernels, mass=mass, implementation=chosen, **options)
    if on is None or axes is None:
        return call(*args)
    return each_device(on, call, specs, on.spec(axes, q.shape[:2]))(*args)


def _axes_of_queries(on: OnMesh, sets: Sequence[Keys], mass: bool) -> Axes | None:
    """As `axes_of_queries`, for sets that are all split alike; None otherwise."""
    found = {axes_of_queries(on, keys.k.shape[1], mass=mass) for keys in sets}
    return found.pop() if len(found) == 1 else None


def _by_kernels(
    q: Array, q_pos: Array, *sets: Keys, mass: tuple[Reduction, ...], implementation: str, **options: Any
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    options |= dict(implementation=implementation)
    parts = [_part(q, s, q_pos, **options) for s in sets]
    out, lse = merge(parts) if len(parts) > 1 else parts[0]
    if not mass:
        return out, lse, ()
    return out, lse, tuple(received(q, s, lse, q_pos, mass, **options) for s in sets)


def attention_over(
    q: Float[Array, "B N T H"],
    sets: Sequence[Keys],
    q_pos: Int[Array, "B T"],
    *,
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
    implementation: str | None = None,
    strip: int = STRIP,
    **options: Any,
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"], tuple[Masses, ...]]:
    """`causal_attention` over sets with keys in any order; the reference takes `strip` queries at a time.

    >>> x, pos = jnp.ones((1, 1, 3, 8)), jnp.arange(3)[None]
    >>> out, lse, _ = attention_over(x, [Keys(x, x, pos[:, None, ::-1])], pos, scale=0.0)
    >>> jnp.exp(lse).round().tolist()
    [[[1.0, 2.0, 3.0]]]
    """
    chosen = form("prompt attention", implementation, q, sets, tpu=refusal(q, sets, mass, clip))
    if chosen == "reference":
        return attend_in_strips(q, sets, q_pos, mass=mass, clip=clip, size=strip, **options)
    return _by_kernels(q, q_pos, *sets, mass=mass, implementation=chosen, **options)


def past_attention(
    q: Float[Array, "R N T H"],
    keys: Keys,
    q_pos: Int[Array, "R T"],
    **options: Any,
) -> tuple[Float[Array, "R N T V"], Float[Array, "R N T"]]:
    """Return (out, lse) of new tokens over keys [B, ...] that each R / B rows share, and that are read once.

    options: of `attention_over`.

    >>> x, pos = jnp.ones((1, 1, 3, 8)), jnp.arange(3)[None]
    >>> q = jnp.ones((4, 1, 2, 8))
    >>> out, lse = past_attention(q, Keys(x, x, pos[:, None]), jnp.full((4, 2), 3), scale=0.0)
    >>> out.shape, jnp.exp(lse).round().tolist()[3]
    ((4, 1, 2, 8), [[3.0, 3.0]])
    """
    rows, lists = q.shape[0], keys.k.shape[0]
    q, q_pos = side_by_side(q, lists), q_pos.reshape(lists, -1)
    out, lse, _ = attention_over(q, (keys,), q_pos, **options)
    return row_by_row(out, rows), row_by_row(lse, rows)


def refusal(
    q: Array,
    sets: Sequence[Keys],
    mass: tuple[Reduction, ...] = (),
    clip: tuple[float, float] | None = None,
) -> str:
    """Why the TPU kernels cannot attend to these sets; empty if they can."""
    if clip is not None:
        return "the softmax is clipped"
    for s in sets:
        if s.pos is not None and s.bias is not None:
            return "slots have biases"
        if s.until is not None:
            return "slots are hidden from some queries on"
        why = "" if s.pos is None else flash.refusal(q, s.k, s.v, s.pos)
        why = why or ("" if not mass else stats.refusal(q, s.k))
        if why:
            return why
    return ""


def _part(
    q: Array, keys: Keys, q_pos: Array, *, implementation: str, **options: Any
) -> tuple[Float[Array, "B N T V"], Float[Array, "B N T"]]:
    """(out, lse) over one set. A set that every query sees has only a slot or two, and needs no kernel."""
    if keys.pos is None:
        return attend(q, keys, q_pos, **options)[:2]
    return flash.flash_prefill(q, keys.k, keys.v, q_pos, keys.pos, implementation=implementation, **options)


def received(
    q: Float[Array, "B N T H"],
    keys: Keys,
    lse: Float[Array, "B N T"],
    q_pos: Int[Array, "B T"],
    mass: tuple[Reduction, ...],
    *,
    window: int | None,
    strip: int = STRIP,
    **options: Any,
) -> Masses:
    """Compute the attention that every slot of a set received from queries whose attention has this `lse`.

    options: scale, softcap and implementation; strip: as of `attention_over`.
    Slots that every query sees count as position 0, without a window.
    """
    k_pos = keys.pos
    if k_pos is None:
        k_pos, window = jnp.zeros((q.shape[0], 1, keys.k.shape[2]), jnp.int32), None
    newer = newer_queries(q_pos, mass)
    found: dict[Reduction, Array] = {}
    # A pass over the keys computes counts by one threshold only, and decayed sums at one rate only.
    for threshold, fade in dict.fromkeys(map(_numbers, mass)):
        mine = {r: "weighted" if fade else r.kind for r in mass if _numbers(r) == (threshold, fade)}
        weights = None
        if fade is not None and newer is not None:
            weights = jnp.power(jnp.float32(fade), newer.astype(jnp.float32))
        seen = stats.attention_stats(
            q, keys.k, lse, q_pos, k_pos, keys.bias, want=tuple(mine.values()), window=window,
            threshold=threshold, weights=weights, strip=strip, **options,
        )  # fmt: skip
        found |= {r: seen[name] for r, name in mine.items()}
    return tuple(found[r] for r in mass)


def _numbers(r: Reduction) -> tuple[float | None, float | None]:
    """Return the threshold and the rate for which a reduction needs a pass of its own; None for none."""
    return r.threshold if r.kind == "count" else None, r.fade if r.fade != 1.0 else None
