"""Fitted and learnt arrays of codecs and reads, attached to groups and codes while a program runs."""

from __future__ import annotations

from typing import Any

import jax

from kvjax.compress.computed_keys import COMPUTED
from kvjax.compress.group import GroupMethod
from kvjax.grammar.fitted import fitted_words
from kvjax.grammar.keys import key_of
from kvjax.models.layers import Params
from kvjax.models.stacking import groups_in, layers_of_groups
from kvjax.state.cache import Cache, GroupState, Paged, Pages
from kvjax.state.codes import LEARNT, Codec, CodecArrays, Codes, with_arrays


def groups_with_arrays(
    gms: tuple[GroupMethod, ...], params: Params, cache: Cache | None = None
) -> tuple[GroupMethod, ...]:
    """Attach to the groups the fitted arrays of their own layers for their codecs and reads.

    Also with what the rows of the cache have learnt, and the parameters from which keys are computed for a
    read. The given groups if none has such arrays.
    """
    if "fitted" not in params and not any(gm.fitted or gm.learns or gm.computed for gm in gms):
        return gms
    sizes = [group.size for group in groups_in(params)]
    stored = [()] * len(gms) if cache is None else [_codecs_in(g, cache.pools) for g in cache.groups]
    found = [_fitted_arrays(gm, n, params, own) for gm, n, own in zip(gms, sizes, stored, strict=True)]
    gms = tuple(gm.replaced(codec_arrays=x) if x else gm for gm, x in zip(gms, found, strict=True))
    gms = tuple(_computing(gm, p) for gm, p in zip(gms, layers_of_groups(params), strict=True))
    if cache is None:
        return gms
    return tuple(with_learnt(gm, group.rows) for gm, group in zip(gms, cache.groups, strict=True))


def _computing(gm: GroupMethod, params: Params) -> GroupMethod:
    """Return the group with the parameters by which it computes keys for a read."""
    if gm.computed is None:
        return gm
    return gm.replaced(codec_arrays=dict(gm.codec_arrays) | {COMPUTED: gm.computed.params(params)})


def with_learnt(gm: GroupMethod, rows: dict[str, Any]) -> GroupMethod:
    """Return the group with what rows carry for its codecs."""
    learnt = {key_of(o): {LEARNT: rows[key_of(o)]} for o in gm.learns if key_of(o) in rows}
    return gm.replaced(codec_arrays=dict(gm.codec_arrays) | learnt) if learnt else gm


def _codecs_in(group: GroupState, pools: tuple[Pages, ...]) -> tuple[Codec, ...]:
    """List the codecs of a group's slots: also of a second tier, which a step that moves no slots omits."""
    parts = [pools[part.pool] if isinstance(part, Paged) else part for part in group.parts]
    return tuple(x.codec for part in parts for x in (part.k, part.v) if isinstance(x, Codes))


def _fitted_arrays(
    gm: GroupMethod, layers: int, params: Params, stored: tuple[Codec, ...]
) -> CodecArrays | tuple[()]:
    lower = None if gm.keep is None else gm.keep.lower
    words: Any = (*gm.codecs, lower, stored, gm.read)
    digests = sorted({word.fitted.digest for word in fitted_words(words) if word.fitted is not None})
    mine = slice(gm.first, gm.first + gm.stride * layers, gm.stride)
    return {d: jax.tree.map(lambda x: x[mine], params["fitted"][d]) for d in digests} or ()


def attach_arrays(groups: tuple[GroupState, ...], gms: tuple[GroupMethod, ...]) -> tuple[GroupState, ...]:
    """Attach fitted arrays to the codes of the groups' states."""
    return tuple(with_arrays(group, gm.codec_arrays) for group, gm in zip(groups, gms, strict=True))
