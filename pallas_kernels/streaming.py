"""Shared by the TPU decode kernels: slots streamed through two buffers, and a running softmax.

An index of grid axis 1 is a KV head. Its slots are processed piece by piece ("steps"), each copied from HBM
while the piece before it is computed. The last piece of a head starts the first copy of the next head, so
that memory never idles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LANES, SUBLANES = 128, 8
NEG_INF = float("-inf")
# copies(ahead, s, slot, act) calls act with every copy of step s into buffer `slot`: of this head, or of the
# next one if `ahead`.
Copies = Callable[[Any, Any, Any, Callable[[Any], None]], None]


class Running(NamedTuple):
    """Scratch memory of a softmax so far, per query.

    The largest logit and the sum of exponentials, both [R, 128] with equal lanes, and the weighted sum of
    values [R, V].
    """

    top: Any
    total: Any
    acc: Any


def spec_of_list(lists: int, per_core: int, *shape: int, ahead: int = 0, **options: Any) -> pl.BlockSpec:
    """Specify the part of an operand [heads, *shape] for a grid step's head, or `ahead` places later.

    The grid is (core, head of the core). If there is no later head, it is the last one's.
    """

    def at(core: Any, j: Any, *_: Any) -> tuple[Any, ...]:
        return (jnp.minimum(core * per_core + j + ahead, lists - 1), *(0,) * len(shape))

    return pl.BlockSpec((1, *shape), at, **options)


def start(copy: Any) -> None:
    copy.start()


def wait(copy: Any) -> None:
    copy.wait()


def pick(ahead: Any, own: Any, other: Any) -> Any:
    """`own` for this head, or `other` for the next one if `ahead`.

    Choosing between scalars takes fewer instructions than emitting the copies of many pages twice.
    """
    return (own, other)[ahead] if isinstance(ahead, int) else jnp.where(ahead, other, own)


def stream(
    turn: Any,
    span: tuple[Any, Any],
    begin_next: Any,
    more: Any,
    copies: Copies,
    visit: Callable[[Any, Any], None],
) -> None:
    """Call visit(s, slot) for all steps s of `span` in order, once their copies are in buffer `slot`.

    turn: int32 [1] in SMEM, the index of the next buffer. begin_next: first step of the next head; more:
    whether this core has a next head. For a step that does not exist, `copies` must call nothing.
    """
    begin, steps = span[0], jnp.maximum(span[1] - span[0], 0)
    head, none = pl.program_id(1) == 0, steps == 0
    first = jnp.where(head, 0, turn[0])

    @pl.when(head | (none & more))
    def _() -> None:
        copies(none, jnp.where(none, begin_next, begin), first, start)

    def step(i: Any, carry: Any) -> Any:
        slot = jax.lax.rem(first + i, 2)
        last = i + 1 == steps

        @pl.when(jnp.logical_not(last) | more)
        def _() -> None:
            copies(last, jnp.where(last, begin_next, begin + i + 1), 1 - slot, start)

        copies(0, begin + i, slot, wait)
        visit(begin + i, slot)
        return carry

    jax.lax.fori_loop(0, steps, step, 0)
    turn[0] = jax.lax.rem(first + steps, 2)


def each(live: Any, most: int, whole: Callable[[], None], one: Callable[[Any], None]) -> None:
    """Call whole() if all of `most` pieces are live, else one(n) for n < live."""
    pl.when(live >= most)(whole)

    @pl.when(live < most)
    def _() -> None:
        jax.lax.fori_loop(0, live, lambda n, carry: (one(n), carry)[1], 0)


def blank(piece: Callable[[Any], Any], size: int, most: int, live: Any, axis: int = 0) -> None:
    """Write zeros into the slots from `live` on, of `most` pieces of `size` slots each.

    Their weight is zero, but memory after a head's end may hold NaN, and zero times NaN is NaN. axis: the
    slot axis of a piece.
    """
    shape = (size, 1) if axis == 0 else (1, size)

    def one(n: Any, carry: Any) -> Any:
        rows = piece(n)
        real = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + n * size < live
        rows[...] = jnp.where(real, rows[...], jnp.zeros((), rows.dtype))
        return carry

    jax.lax.fori_loop(jnp.minimum(live // size, most), most, one, 0)


def product(a: Any, b: Any, axis: int) -> Any:
    """Multiply a's last axis with axis `axis` of b, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32, precision=precision
    )


def clear(r: Running) -> None:
    r.top[...] = jnp.full_like(r.top, NEG_INF)
    r.total[...] = jnp.zeros_like(r.total)
    r.acc[...] = jnp.zeros_like(r.acc)


def weigh(r: Running, z: Any) -> tuple[Any, Any]:
    """(weights [R, S], factor for `r.acc`) of logits z, -inf where hidden; updates `r.top`, `r.total`."""
    old = r.top[:, :1]
    top = jnp.maximum(old, z.max(-1, keepdims=True))
    safe = jnp.where(top == NEG_INF, 0.0, top)
    p, fade = jnp.exp(z - safe), jnp.exp(old - safe)
    r.top[...] = jnp.broadcast_to(top, r.top.shape)
    r.total[...] = r.total[...] * fade + p.sum(-1, keepdims=True)
    return p, fade


def fold(r: Running, z: Any, v: Any, axis: int = 0) -> None:
    """Add logits z [R, S], -inf where hidden, and finite values v, whose `axis` is S, to `r`."""
    p, fade = weigh(r, z)
    r.acc[...] = r.acc[...] * fade + product(p.astype(v.dtype), v, axis)


def finish(r: Running, out: Any, lse: Any) -> None:
    """Write out [1, R, V] and lse [1, R, 128]; 0 and -inf where a query saw nothing."""
    total = r.total[:, :1]
    safe = jnp.where(total == 0.0, 1.0, total)
    out[0] = (r.acc[...] / safe).astype(out.dtype)
    lse[0] = jnp.broadcast_to(jnp.where(total == 0.0, NEG_INF, r.top[:, :1] + jnp.log(safe)), lse.shape[1:])


def spread(scores: Any, lse: Any, mass: Any, span: tuple[Any, Any], block: int) -> None:
    """Write mass [1, 1, S], the probability of every slot summed over the queries, block by block of `span`.

    scores [R, S]: the logits that were folded, -inf where hidden. lse [1, R, 128]: the result of `finish`.
    """
    base = lse[0][:, :1]
    base = jnp.where(base == NEG_INF, 0.0, base)

    def write(s: Any, carry: Any) -> Any:
        at = pl.ds(pl.multiple_of(s * block, block), block)
        mass[0, :, at] = jnp.exp(scores[:, at] - base).sum(0, keepdims=True)
        return carry

    jax.lax.fori_loop(*span, write, 0)
