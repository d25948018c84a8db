"""Contexts that do not see each other: `parallel_contexts` makes an empty cache that knows where they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.api.contexts import empty_cache
from kvjax.api.prefill import ROOM, check_room, labelled, method_of
from kvjax.api.prepare import made
from kvjax.base.checks import is_rows, whole_number
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.grammar import Method
from kvjax.grammar.shared_ranges import STARTS, SharedRanges
from kvjax.models.model import Model, check_single
from kvjax.models.stacking import groups_in
from kvjax.pure import bind
from kvjax.state.axes import placed
from kvjax.state.cache import Cache
from kvjax.steps import Run

_METHOD = "ape(contexts=())"


def parallel_contexts(
    model: Model,
    lengths: Sequence[Sequence[int]],
    *,
    prefix: int | Sequence[int] | None = None,
    method: Method | str = _METHOD,
    room: int = ROOM,
) -> Cache:
    """Build an empty cache for prompts of contexts that do not see each other (APE, arXiv:2502.05431).

    A prompt is a row's prefix, its contexts one after the other, and the rest of the text. A context sees the
    prefix and itself; the rest sees everything. Rows may differ in their contexts. A row's text, all contexts
    together, may have as many tokens as the model has positions.

    Args:
        model: a model.
        lengths: of every row, the tokens of each of its contexts; a row may have none.
        prefix: tokens before the first context, for all rows or of each; None takes the method's.
        method: one whose rows have contexts of their own, `ape(contexts=())` with its other options.
        room: how many tokens the cache must hold before it grows.

    Returns:
        A cache that holds no token: give it to `prefill` or `generate` with whole prompts. Rows can be taken,
        saved and continued like those of any cache.

    Raises:
        InputError: for a method without such contexts, and for lengths that are no whole numbers of tokens.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> cache = kvjax.parallel_contexts(model, [[3, 2], [4]], prefix=1)
    >>> logits, cache = kvjax.prefill(model, [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]], cache=cache)
    >>> cache.next.tolist()
    [7, 6]
    """
    check_single(model, "read parallel contexts with one decoder")
    chosen = method_of(model, method, None)
    phase = None if chosen.keep is None else chosen.keep.phase
    if not isinstance(phase, SharedRanges) or phase.contexts:
        raise InputError(
            f"method is {chosen.id}, expected one whose rows have contexts of their own: {_METHOD!r}"
        )
    starts = _starts(lengths, phase.prefix if prefix is None else prefix)
    room, model = check_room(model, room, chosen), made(model, chosen)
    run = Run(
        model.config, bind(_with_one_context(chosen, phase), model), on_mesh=mesh_for(chosen, model.on_mesh)
    )
    cache, groups = empty_cache(run, model.params, len(starts), room), []
    for layers, group in zip(groups_in(model.params), cache.groups, strict=True):
        rows = {STARTS: jnp.asarray(np.broadcast_to(starts, (layers.size, *starts.shape)))}
        groups.append(dataclasses.replace(group, rows=group.rows | rows))
    cache = dataclasses.replace(cache, groups=tuple(groups))
    return labelled(placed(cache, run.on_mesh), chosen, model)


def _with_one_context(method: Method, phase: SharedRanges) -> Method:
    """Build a method of the same cache layout that needs no rows to say where their contexts start."""
    assert method.keep is not None
    phase = dataclasses.replace(phase, contexts=(1,))
    return dataclasses.replace(method, keep=dataclasses.replace(method.keep, phase=phase))


def _starts(lengths: Any, prefix: int | Sequence[int]) -> Int[np.ndarray, "B _"]:
    """Return the first token of each context and of the text after them; rows of fewer get empty contexts."""
    if isinstance(lengths, str) or not is_rows(lengths) or not len(lengths):
        raise InputError(
            f"lengths is {lengths!r:.60}, expected for every row a list of the tokens of its contexts, for "
            "example [[512, 300], [700]]"
        )
    rows = [[whole_number("lengths", n, 1, "tokens a context has") for n in row] for row in lengths]
    before = [prefix] * len(rows) if isinstance(prefix, int | np.integer) else list(prefix)
    if len(before) != len(rows):
        raise InputError(f"prefix has {len(before)} numbers, lengths {len(rows)} rows, expected as many")
    out = np.zeros((len(rows), 2 + max(map(len, rows))), np.int64)
    for row, first, each in zip(out, before, rows, strict=True):
        row[0], row[1 : 1 + len(each)] = whole_number("prefix", first, 0, "tokens before contexts"), each
    return out.cumsum(1)[:, :-1].astype(np.int32)
