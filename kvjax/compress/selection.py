"""Selection: a layer's slots are scored, protected and ranked, and evicted slots are merged into kept ones.

One routine for prompts (`kvjax.compress.select`, whose allocations look at all layers between the two halves,
`ranked` and `folded`), for a token's own step and for other triggers (`select`). Slots are given as a
`View`: of one segment or of the union of several.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar import Keep
from kvjax.grammar.calls import merged, protected, scored
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec, Observed, SelectionTrace, Trace, View
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.select import top
from kvjax.ops.base.rope import Rope

# Available in a token's own step: its query, and the attention that slots received from it.
NEWEST, RECEIVED = key_of(Queries(1)), key_of(Mass("sum"))
# Higher than any score computed by a model, and finite.
_HIGHEST = 1e30


class Selected(NamedTuple):
    """The result of a selection, in the given order of slots.

    gone: the evicted slots. changed: by name, the arrays that merges and traces changed ("traces" is a dict).
    rows: what rows carry for the merge. lost: rows in which a live slot's score was NaN, which cannot be
    ranked.
    """

    gone: Bool[Array, "B K S"]
    changed: dict[str, Any]
    rows: dict[str, Any]
    lost: Bool[Array, "B"]


def select(
    keep: Keep,
    traces: tuple[Trace, ...],
    view: View,
    seen: Observed,
    due: Bool[Array, "B"],
    carried: dict[str, Any],
    stored: Float[Array, "B K S H"] | None = None,
) -> Selected:
    """Select the slots of one layer that a decode step evicts, in the rows that are due.

    With `at_once`, after every token, it is the worst slot beyond the budget, or the slots below a threshold;
    else all slots that are not among the budget's best. carried: what rows carry, by the key of the word.
    stored: keys before rotation, for a merge that takes these instead of the view's.
    """
    assert keep.score is not None
    given, back = view if stored is None else view._replace(k=stored), None
    if not keep.when.at_once or keep.score.ordered or (keep.merge is not None and keep.merge.ordered):
        order, back = orders(view.pos)
        view, seen = _in_order(view, seen, order)
        stored = None if stored is None else taken(stored, order)
    view = judged(traces, view, seen)
    score = ranked(keep, view, seen)
    lost = not_numbers(score, view.pos) & due
    gone = (_worst if keep.when.at_once else _beyond)(keep, score, view.pos, seen.n) & due[:, None, None]
    rows: dict[str, Any] = {}
    if keep.merge is not None:
        stay = (view.pos >= 0) & ~gone
        view = view if stored is None else view._replace(k=stored)
        view, rows = folded(keep, view, stay, seen, carried, one=keep.when.at_once and not _several(keep))
    names = [] if keep.merge is None else [name for name in keep.merge.writes if name != "traces"]
    new = {name: x for name in (*names, "traces") if (x := getattr(view, name)) is not None}
    if back is not None:
        gone, new = jax.tree.map(lambda x: taken(x, back), (gone, new))
    changed = jax.tree.map(
        lambda x, old: jnp.where(due.reshape(-1, *(1,) * (x.ndim - 1)), x, old),
        new,
        {name: getattr(given, name) for name in new},
    )
    return Selected(gone, changed, rows, lost)


def ranked(keep: Keep, view: View, seen: Observed, score: Any = None) -> Float[Array, "B K S"]:
    """Compute the scores of a layer's slots, +inf where a pattern protects and -inf where a slot is empty.

    score: the output of the keep's score, if it was computed on another view.
    """
    s = (scored(keep.score, view, seen) if score is None else score).astype(jnp.float32)
    # Protected slots rank even before slots to which a score gives infinity, as `stage` does.
    s = jnp.minimum(s, _HIGHEST) if keep.protect else s
    for pattern in keep.protect:
        s = jnp.where(protected(pattern, view.pos, seen.length, seen.n), jnp.inf, s)
    return jnp.where(view.pos < 0, -jnp.inf, s)


def folded(
    keep: Keep,
    view: View,
    stay: Bool[Array, "B K S"],
    seen: Observed,
    carried: dict[str, Any],
    *,
    one: bool = False,
) -> tuple[View, dict[str, Any]]:
    """Merge evicted live slots of the view into those that stay, by the keep's merge.

    Also returns what rows carry for the merge. one: at most one slot per KV head is evicted.
    """
    slots, gone = view.pos.shape[-1], (view.pos >= 0) & ~stay
    if one:
        leaving = jnp.where(gone.any(-1), jnp.argmax(gone, -1), slots).astype(jnp.int32)[..., None]
    else:
        slot = jax.lax.broadcasted_iota(jnp.int32, gone.shape, gone.ndim - 1)
        leaving = jnp.where(gone, slot, slots)
    return merged(keep.merge, view, stay, leaving, seen, carried)


def _worst(
    keep: Keep, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], n: Int[Array, "B"]
) -> Bool[Array, "B K S"]:
    """Find the slots below a threshold, or the slot with the lowest score in heads beyond their budget.

    A merge of one slot at a time gets the first one below a threshold, and the others after later tokens.
    """
    live = pos >= 0
    threshold = keep.allocate.threshold
    if threshold is not None:
        below = live & (score < threshold)
        return below if keep.merge is None or _several(keep) else below & (jnp.cumsum(below, -1) == 1)
    worst = _lowest(jnp.where(live, score, jnp.inf), pos)[..., None]
    return live & (pos == worst) & (live.sum(-1) > n[:, None])[..., None]


def _several(keep: Keep) -> bool:
    """Whether a token's own step may evict several slots of a KV head, which are then merged together."""
    return keep.allocate.threshold is not None and keep.merge is not None and not keep.merge.one_by_one


def _lowest(score: Float[Array, "B K S"], pos: Int[Array, "B K S"]) -> Int[Array, "B K"]:
    """Find the position of the slot with the lowest score, the newest of equal ones; -1 if all are NaN.

    One reduction over pairs, because a compiler may compute a score twice and round it differently: then no
    score would equal the lowest one, and no slot would be evicted.
    """

    def lower(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        # Ties keep the older token, as at the end of a prefill.
        second = (b[0] < a[0]) | ((b[0] == a[0]) & (b[1] > a[1]))
        return jnp.where(second, b[0], a[0]), jnp.where(second, b[1], a[1])

    none = jnp.asarray(jnp.inf, score.dtype), jnp.asarray(-1, pos.dtype)
    return jax.lax.reduce((score, pos), none, lower, (2,))[1]


def _beyond(
    keep: Keep, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], n: Int[Array, "B"]
) -> Bool[Array, "B K S"]:
    """Find the live slots that are not among the n best of their KV head; the view is in position order."""
    return (pos >= 0) & ~top(score, jnp.broadcast_to(n[:, None], pos.shape[:2]))


# No trace asks for more than masses.
_UNUSED = AttentionSpec(1.0, None, Rope())


def grown(traces: tuple[Trace, ...], old: dict[str, Array], received: dict[str, Array]) -> dict[str, Array]:
    """Update the slots' traces after new queries, given the attention [..., S] that slots received from them.

    Traces that the slots do not have yet are not added. Traces of other methods with which a prompt is shared
    are dropped.
    """
    length = jnp.zeros(0, jnp.int32)
    seen = Observed(received, None, length, length, 0, _UNUSED)
    both = [t for t in traces if key_of(t) in old]
    return {key_of(t): t.grow(old[key_of(t)], seen) if received else old[key_of(t)] for t in both}


def judged(traces: tuple[Trace, ...], view: View, seen: Observed) -> View:
    """Record this selection in the traces of a layer's view."""
    new = {key_of(t): t.judge(view, seen) for t in traces if isinstance(t, SelectionTrace)}
    return view._replace(traces=view.traces | new)


def not_numbers(score: Float[Array, "B K S"], pos: Int[Array, "B K S"]) -> Bool[Array, "B"]:
    """Rows in which a live slot's score is NaN."""
    return (jnp.isnan(score) & (pos >= 0)).any((1, 2))


def _in_order(view: View, seen: Observed, order: Int[Array, "B K S"]) -> tuple[View, Observed]:
    """Put the slots of a view and its observations in another order."""
    there = lambda x: taken(x, order)  # noqa: E731
    masses = seen.observed | {name: there(x) for name, x in view.received.items()}
    mass = None if seen.mass is None else there(seen.mass)
    return jax.tree.map(there, view), seen._replace(observed=masses, mass=mass)


def orders(pos: Int[Array, "*b S"]) -> tuple[Int[Array, "*b S"], Int[Array, "*b S"]]:
    """Slots sorted by position, the empty ones last, and the inverse permutation."""
    order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)


def taken(x: Array, index: Int[Array, "B K S"]) -> Array:
    """Take the slots of x at `index`, KV head by KV head."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), axis=2)
