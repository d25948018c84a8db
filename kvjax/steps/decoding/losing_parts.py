"""The parts of a group from which decode steps may evict, as one view, with results written back to each.

An encoded body and the tail after it compete: the worst slot of both is evicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.selection import Selected, grown
from kvjax.compress.summaries import rewritten, sums_without
from kvjax.grammar.calls import merges_unrotated
from kvjax.grammar.kinds import View
from kvjax.ops.base.memory import in_host, to_host
from kvjax.ops.base.rope import Rope
from kvjax.state.cache import GroupState, Pages, Slots
from kvjax.state.codes import Codes
from kvjax.steps.shared.rotate import rotated_keys, rotations_over, unrotated_merges
from kvjax.steps.shared.run import Run


def tail_of(group: GroupState) -> Slots:
    """Return the slots that new tokens are written to."""
    assert group.tail is not None
    return group.tail


def losing(gm: GroupMethod, group: GroupState) -> dict[int, Slots]:
    """Return the parts of a group from which slots may be evicted, by their number among all its parts.

    They are the tail, and before it the first tokens and the codes, if there are some.
    """
    body = None if not gm.split else group.bodies[-1]
    found = {i: x for i, x in enumerate(group.parts) if any(x is y for y in (body, group.sinks, group.tail))}
    assert all(isinstance(part, Slots) for part in found.values())
    return found  # type: ignore[return-value]


def view_of(
    run: Run,
    gm: GroupMethod,
    rope: Rope,
    group: GroupState,
    parts: dict[int, Slots],
    index: int | Array,
    length: Int[Array, "B"],
    pools: tuple[Pages, ...],
    received: Sequence[dict[str, Array]] = (),
) -> View:
    """One layer of the `losing` parts of a group, with keys as the newest query meets them, in any order.

    received: what the slots of all parts of the group received from that query, which updates traces.
    """
    rotation = None
    if run.unrotated:
        rotation = rotations_over(run, length - 1, group.parts, index, pools, group.rows)[0]
    views = []
    for i, part in parts.items():
        got = received[i - len(group.parts)] if received else {}
        one = part.layer(index)
        keys = one.keys()
        keys = keys if rotation is None else rotated_keys(rope, keys, rotation, i, length)
        views.append(View(keys.k, keys.v, one.pos, one.bias, grown(gm.traces, one.traces, got), got))
    return views[0] if len(views) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=2), *views)


def as_stored(
    run: Run, gm: GroupMethod, rope: Rope, group: GroupState, parts: dict[int, Slots], index: int | Array,
    view: View, found: Selected, length: Int[Array, "B"], pools: tuple[Pages, ...],
) -> Selected:  # fmt: skip
    """Return what a merging keep found in a `view_of` one layer, with keys as the parts store them."""
    if not run.unrotated or "k" not in found.changed or merges_unrotated(gm.keep):
        return found
    turns = rotations_over(run, length - 1, group.parts, index, pools, group.rows)[0].keys
    lists = view.pos.shape[1]
    each = [jnp.broadcast_to(x, (x.shape[0], lists, x.shape[2])) for x in turns]
    mine = jnp.concatenate([each[i] for i in parts], axis=2)
    stored = _stored_keys(parts, index)
    k = unrotated_merges(rope, found.changed["k"], view, stored, mine, length)
    return found._replace(changed=found.changed | {"k": k})


def keys_of_merge(gm: GroupMethod, parts: dict[int, Slots], index: int | Array) -> Array | None:
    """Return stored keys of a `view_of` one layer, for a merge that takes them before rotation; else None."""
    return _stored_keys(parts, index) if merges_unrotated(gm.keep) else None


def _stored_keys(parts: dict[int, Slots], index: int | Array) -> Array:
    return jnp.concatenate([part.layer(index).keys().k for part in parts.values()], axis=2)


def emptied(
    gm: GroupMethod, parts: dict[int, Slots], index: int | Array, found: Selected
) -> dict[int, Slots]:
    """Empty the evicted slots of the parts of a `view_of` one layer, and write what merges changed."""
    changed = {name: x for name, x in found.changed.items() if name != "traces"}
    # Codes of several tokens cannot be written slot by slot.
    assert not changed or all(_by_slot(part) for part in parts.values())
    out, at = {}, 0
    for i, part in parts.items():
        mine = slice(at, at + part.capacity)
        gone, at = found.gone[..., mine], at + part.capacity
        put = lambda x, new, fill, gone=gone: x.at[index].set(jnp.where(gone, fill, new))  # noqa: E731
        said = {
            name: put(x, found.changed["traces"][name][..., mine], 0.0) for name, x in part.traces.items()
        }
        sums = sums_without(gm, part, gone, index) if part.sums else {}
        if changed:
            part = replace_layer(part, index, **{name: x[:, :, mine] for name, x in changed.items()})
        part = dataclasses.replace(part, pos=put(part.pos, part.pos[index], -1), traces=said, sums=sums)
        out[i] = rewritten(gm, part, index) if changed else part
    return out


def _by_slot(part: Slots) -> bool:
    """Whether every slot of a part is encoded by itself, or not encoded."""
    return all(x.codec.granule == 1 for x in (part.k, part.v) if isinstance(x, Codes))


def held(parts: dict[int, Slots]) -> Int[Array, "Lg B K"]:
    """How many slots every KV head holds in the `losing` parts."""
    return sum(((part.pos >= 0).sum(-1, dtype=jnp.int32) for part in parts.values()), jnp.int32(0))


def _put(x: Array, new: Array, index: int | Array) -> Array:
    """Replace one layer of the array, also if it is in host memory."""
    if not in_host(x):
        return x.at[index].set(new)
    return jax.lax.dynamic_update_slice_in_dim(x, to_host(new[None].astype(x.dtype)), index, 0)


def replace_layer(slots: Slots, index: int | Array, **leaves: Any) -> Slots:
    """Write one layer's arrays back, encoded if the segment is encoded."""

    def put(old: Any, new: Array) -> Any:
        if not isinstance(old, Codes):
            return _put(old, new, index)
        fresh = old.encoded(new, index)
        return dataclasses.replace(old, data={n: _put(x, fresh[n], index) for n, x in old.data.items()})

    written = {n: put(getattr(slots, n), x) for n, x in leaves.items() if getattr(slots, n) is not None}
    return dataclasses.replace(slots, **written)
