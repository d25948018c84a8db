"""Joins separately read texts into one past: `join`, which rotates keys to their new positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.api.blend import blended, check_texts
from kvjax.api.chunks import bucket, tokens_that_fit, with_room
from kvjax.api.links import check_links, linked
from kvjax.api.prefill import bare_cache, check_cache, check_reach, labelled
from kvjax.api.prepare import made
from kvjax.api.rollback import Added
from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import whole_tiles
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.kinds import over_layers
from kvjax.hosts.arrays import fetch
from kvjax.models.attending import rotated
from kvjax.models.mixers.attention import mixer_of
from kvjax.models.model import Model, check_single
from kvjax.ops.base.rope import Rope
from kvjax.pure import decoding
from kvjax.state.cache import Cache, GroupState, Slots
from kvjax.state.codes import Codes, width_of
from kvjax.steps.shared.run import Run


def join(
    model: Model,
    caches: Sequence[Cache],
    *,
    room: int = 0,
    texts: Sequence[Sequence[Sequence[int]]] | None = None,
    recompute: float = 0.0,
    links: Fitted | str | None = None,
) -> Cache:
    """Join caches of texts that were read separately, as if each text followed the one before it.

    Documents that many prompts share are read once each, and joined in the order of a prompt. Keys are
    rotated from their old positions to the new ones; nothing is computed again, so a text has not attended to
    those before it. This is how retrieved documents are reused in Prompt Cache (Gim et al., 2023,
    arXiv:2311.04934), Block-Attention (Ma et al., 2024, arXiv:2409.15355) and KVLink (Yang et al., 2025,
    arXiv:2502.16002). Models that were trained for it keep their accuracy, and others lose some.

    `recompute` recovers part of the loss (CacheBlend, Yao et al., 2024, arXiv:2405.16444). The first two
    layers read all tokens over all texts; the tokens whose values in the second layer differ most from those
    in the caches are then read again in all layers. As in the authors' code, tokens are chosen once, where
    the paper chooses anew in every layer; and every token attends to all before it, where the authors' mask
    counts from the end of the text.

    `links` recovers part of it by learned tokens after each text (KVLink). They attend to all texts and links
    before them, and later tokens attend to them. As in the paper, each text has links of its own.

    Args:
        model: the model that read the texts.
        caches: one for each text, all with equally many rows and under the same method, which may have
            compressed them. They stay usable.
        room: free slots to allocate for further tokens.
        texts: the token ids that caches were read from, texts[i][b] for row b of cache i; for `recompute`.
        recompute: the share of each row's tokens that are read again.
        links: what `kvjax.fit_links` gave for the model, or its file.

    Returns:
        One cache. Row b holds the slots of row b of all caches; its next position is the sum of theirs, and
        of the links.

    Raises:
        InputError: for no cache, caches of other models, methods or numbers of rows, or that a step consumed;
            if layers carry a state, slots are encoded or in pages, or have traces; if the rotation depends on
            the length of the text; and beyond the model's last position.
            With `recompute`, also for texts of other lengths, compressed caches, layers that share slots, and
            links. With `links`, also for those of another model or of fewer texts, and layers that share
            slots.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> texts = [kvjax.prefill(model, [ids])[1] for ids in ([1, 2, 3], [4, 5])]
    >>> cache = kvjax.join(model, texts, room=4)
    >>> cache.next.tolist(), kvjax.kept_positions(cache)[0][0, 0, :5].tolist()
    ([5], [0, 1, 2, 3, 4])
    """
    check_single(model, "join the caches of one decoder")
    room = whole_number("room", room, 0, "tokens that may follow")
    caches = list(caches)
    if not caches:
        raise InputError("caches is empty, expected one for each text: give what kvjax.prefill returned")
    for cache in caches:
        check_cache(model, cache)
    method = caches[0].method
    model = made(model, method)
    between = None if links is None else check_links(model, links, len(caches))
    if between is not None and (recompute or texts is not None):
        raise InputError("recompute and links were given, expected one of them: leave the other out")
    gap = 0 if between is None else between.shape[1]
    joined, run, ends = spaced(model, caches, gap, room)
    again = None if recompute == 0 and texts is None else check_texts(model, caches, texts, recompute)
    gms = run.groups(model.params)
    if again is not None:
        joined = blended(model, joined, *again, recompute)
    if between is not None:
        joined = linked(run, model.params, joined, ends, between)
    joined = labelled(with_room(gms, joined, room), method or Method(), model)
    spare = int(fetch(tokens_that_fit(gms, joined)).min())
    return dataclasses.replace(joined, spare=spare, added=Added(gms, np.zeros_like(ends[-1])))


def spaced(
    model: Model, caches: Sequence[Cache], gap: int, room: int
) -> tuple[Cache, Run, Int[np.ndarray, "texts B"]]:
    """Join the slots of caches with `gap` positions after each, and return where each text ends.

    model: as made for the caches' method. room: of further tokens, which must have positions.
    """
    first = caches[0]
    _check_alike(caches)
    _check_rotation(model)
    run = decoding(model, first.method, None)
    gms = run.groups(model.params)
    _check_slots(gms, caches)
    lengths = np.stack([fetch(cache.next) for cache in caches])
    ends = np.cumsum(lengths + gap, 0) - gap
    check_reach(model, int(ends[-1].max()) + gap + room, first.method or Method())
    ropes = tuple(
        None if run.unrotated else _unscaled(mixer_of(model.config, gm.first).rope(model.config, gm.first))
        for gm in gms
    )
    bare = [bare_cache(cache) for cache in caches]
    used = fetch(_used([[_tail(group).pos for group in cache.groups] for cache in bare]))
    sizes = tuple(
        whole_tiles(bucket(max(int(n), 1)), width_of(_tail(group).k))
        for n, group in zip(np.sum(used, 0), first.groups, strict=True)
    )
    joined = _joined(bare, jnp.asarray(ends - lengths, jnp.int32), ropes, sizes)
    return dataclasses.replace(joined, next=joined.next + gap), run, ends


def _check_alike(caches: Sequence[Cache]) -> None:
    first = caches[0]
    for number, cache in enumerate(caches):
        rows, others = cache.next.shape[0], first.next.shape[0]
        if rows != others:
            raise InputError(
                f"cache {number} has {rows} rows, cache 0 has {others}, expected as many: copy rows with "
                "kvjax.take_rows"
            )
        if cache.method != first.method:
            raise InputError(
                f"cache {number} is of {cache.method!r:.60}, cache 0 of {first.method!r:.60}, expected one "
                "method: read all texts with it"
            )


def _check_rotation(model: Model) -> None:
    """Raise InputError if the keys of a model cannot be rotated to other positions."""
    if model.config.rope.by_length:
        raise InputError(
            f"the rotation of {model.name} ({model.config.rope.kind}) depends on the length of a text, "
            "expected one by position alone: read the texts together"
        )
    if model.on_mesh is not None:
        raise InputError(
            f"{model.name} lies on several devices, expected one: join caches of an unsplit model"
        )


def _check_slots(gms: Sequence[GroupMethod], caches: Sequence[Cache]) -> None:
    """Raise InputError for a cache whose slots cannot be appended to others, with the layer."""
    for number, cache in enumerate(caches):
        for gm, group in zip(gms, cache.groups, strict=True):
            if why := _unjoinable(gm, group):
                raise InputError(f"layer {gm.first} of cache {number} {why}: read the texts together")


def _unjoinable(gm: GroupMethod, group: GroupState) -> str:
    """Why the slots of a group cannot be appended to others; empty if they can."""
    if group.state is not None:
        return "has a recurrent state, which includes its text"
    if gm.evicting:
        return "loses slots while decoding"
    if gm.keep is not None and not gm.keep.phase.steady:
        return "rotates keys by their rank among slots"
    slots = group.tail
    if slots is None or group.bodies or group.sinks is not None:
        return "holds slots in pages, codes or apart from others"
    if isinstance(slots.k, Codes) or isinstance(slots.v, Codes):
        return "holds encoded slots"
    if slots.traces or slots.summary or slots.sums or slots.near is not None or slots.far or group.rows:
        return "holds what its method remembers of slots"
    return "" if gm.lasting else "holds slots in pages, codes or apart from others"


def _tail(group: GroupState) -> Slots:
    """Return the slots of a group that can be joined."""
    assert group.tail is not None
    return group.tail


def _unscaled(rope: Rope) -> Rope:
    """Remove from a rotation the factor that is already applied to keys."""
    return dataclasses.replace(rope, attention_factor=1.0) if rope.kind == "yarn" else rope


@jax.jit
def _used(tails: list[list[Int[Array, "_ _ _ _"]]]) -> list[list[Int[Array, ""]]]:
    """Return the most live slots of a KV head in every cache and group."""
    return [[(pos >= 0).sum(-1).max() for pos in groups] for groups in tails]


@partial(jax.jit, static_argnames=("ropes", "sizes"))
def _joined(
    caches: list[Cache], starts: Int[Array, "n B"], ropes: tuple[Rope | None, ...], sizes: tuple[int, ...]
) -> Cache:
    """Join the slots of all caches, rotated and in order; `sizes` per group."""
    groups = []
    for i, (rope, size) in enumerate(zip(ropes, sizes, strict=True)):
        moved = [
            _moved(_tail(cache.groups[i]), start, rope) for cache, start in zip(caches, starts, strict=True)
        ]
        groups.append(
            GroupState(tail=_in_order(jax.tree.map(lambda *x: jnp.concatenate(x, 3), *moved), size))
        )
    last = starts[-1] + caches[-1].next
    return dataclasses.replace(caches[0], groups=tuple(groups), next=last)


def _moved(slots: Slots, start: Int[Array, "B"], rope: Rope | None) -> Slots:
    """Slots rotated to a text that begins at `start` of every row."""
    by = start[:, None, None]
    pos = jnp.where(slots.pos >= 0, slots.pos + by[None], -1)
    if rope is None:
        return dataclasses.replace(slots, pos=pos)
    rotate = lambda k: rotated(rope, k, jnp.broadcast_to(by, (len(start), 1, k.shape[2])), start)  # noqa: E731
    return dataclasses.replace(slots, pos=pos, k=over_layers(rotate, slots.k))


def _in_order(slots: Slots, size: int) -> Slots:
    """Order the slots by position, in `size` slots per KV head; empty ones last."""
    order = jnp.argsort(jnp.where(slots.pos < 0, jnp.iinfo(jnp.int32).max, slots.pos), axis=3, stable=True)[
        ..., :size
    ]

    def take(x: Array) -> Array:
        index = order.reshape(*order.shape, *(1,) * (x.ndim - order.ndim))
        return jnp.take_along_axis(x, index, axis=3)

    return jax.tree.map(take, slots)
