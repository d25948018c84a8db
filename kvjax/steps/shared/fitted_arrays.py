"""What codecs were fitted to, lent to a cache's codes while a program runs: a cache itself holds none."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax.compress.group import GroupMethod
from kvjax.grammar.fitted import fitted_words
from kvjax.models.layers import Params
from kvjax.state.cache import Cache, GroupState
from kvjax.state.codes import Taught, lent


def taught_groups(gms: tuple[GroupMethod, ...], params: Params) -> tuple[GroupMethod, ...]:
    """Groups with the arrays that their codecs' words were fitted to, of their own layers."""
    sizes = [next(iter(p.values())).shape[0] for p in params["layers"]]
    found = [_taught(gm, n, params) for gm, n in zip(gms, sizes, strict=True)]
    return tuple(gm.replaced(taught=x) if x else gm for gm, x in zip(gms, found, strict=True))


def _taught(gm: GroupMethod, layers: int, params: Params) -> Taught | tuple[()]:
    lower = None if gm.keep is None else gm.keep.lower
    codecs: Any = (*gm.codecs, lower)
    digests = sorted({word.fitted.digest for word in fitted_words(codecs) if word.fitted is not None})
    mine = slice(gm.first, gm.first + layers)
    return {d: jax.tree.map(lambda x: x[mine], params["fitted"][d]) for d in digests} or ()


def lend(groups: tuple[GroupState, ...], gms: tuple[GroupMethod, ...]) -> tuple[GroupState, ...]:
    """What groups hold, with the fitted arrays beside their codes."""
    return tuple(lent(group, gm.taught) for group, gm in zip(groups, gms, strict=True))


def returned(cache: Cache) -> Cache:
    """The cache without what was lent to it."""
    return dataclasses.replace(cache, groups=lent(cache.groups, ()))
