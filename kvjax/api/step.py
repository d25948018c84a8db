"""One token at a time: `step`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax import steps
from kvjax.api.chunks import tokens_that_fit
from kvjax.api.prefill import bare_cache, check_cache, live, noted, there
from kvjax.api.prepare import made
from kvjax.api.rollback import more_added
from kvjax.api.types import OneToken, Step, has_verbs, refuse
from kvjax.base.checks import (
    one_token,
)
from kvjax.base.errors import InputError
from kvjax.compat.max_length import last_position, switch_at
from kvjax.grammar import Method
from kvjax.grammar.fitted import with_fitted
from kvjax.hosts.arrays import fetch
from kvjax.models.layers import Params
from kvjax.models.model import Model
from kvjax.pure import decoding
from kvjax.state.cache import Cache
from kvjax.steps import Run


def step(
    model: Model,
    cache: Cache,
    token: OneToken,
    *,
    append: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Read one token per row over a cache.

    Args:
        model: the model that the cache is of.
        cache: a live cache. It is consumed (donated) if the token is appended.
        token: one id per row [B]. Ids on the host (NumPy, lists) must be in the vocabulary; of a device array
            only dtype and shape are checked, because reading it would make every step wait for the one
            before.
        append: False reads the last token again at its own position, over the unchanged cache.
        implementation: as in `prefill`.

    Returns:
        Logits [B, V], and the cache that holds the token.

    Raises:
        InputError: if the cache has no free slots, was consumed before or belongs to another model, and
            beyond the model's last position.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]], room=8)
    >>> logits, cache = kvjax.step(model, cache, [6, 7])
    >>> logits.shape, cache.next.tolist()
    ((2, 220), [4, 3])
    """
    if has_verbs(model):
        refuse(model, {"append=False": not append, "implementation=": implementation is not None})
        return model.step(cache, token)
    if not isinstance(cache, Cache) and isinstance(token, Cache):
        raise InputError(
            "the token and the cache are in each other's place, expected kvjax.step(model, cache, token)"
        )
    check_cache(model, cache)
    model = made(model, cache.method)
    cache = there(model, cache)
    run = decoding(model, cache.method, implementation)
    ids = one_token(token, cache.next.shape[0], model.config.vocab)
    spare = _counted_spare(run, model, cache) if append and cache.spare < 1 else cache.spare
    note = more_added(cache.added or noted(model, cache), append)
    call = steps.step if append else steps.step_keeping
    params = with_fitted(model.params, cache.method)
    logits, new = call(run, params, bare_cache(cache), ids, np.full(ids.shape, append))
    return logits, dataclasses.replace(
        new, method=cache.method, model=model.fingerprint, spare=spare - append, added=note,
        on_mesh=run.on_mesh,
    )  # fmt: skip


def _counted_spare(run: Run, model: Model, cache: Cache) -> int:
    """Count how many tokens every row can take; InputError if one can take none."""
    spare = int(fetch(tokens_that_fit(run.groups(model.params), bare_cache(cache))).min())
    if spare < 1:
        raise InputError(
            "the cache is full: give prefill(..., room=) the number of tokens you will add, "
            "or call prefill(model, tokens, cache=cache, room=...), which makes room"
        )
    return min(spare, positions_left(model, cache))


def positions_left(model: Model, cache: Cache) -> int:
    """How many more tokens the cache's longest row can take; InputError if there are none."""
    most, last = model.config.max_positions, last_position(cache.method, model.config)
    rows = fetch(cache.next)
    left, switch = last - int(rows.max()), switch_at(model.config)
    method = cache.method or Method()
    if last > most and (keep := method.keep) is not None and not method.shared_positions:
        # Slots that are not evicted at once get consecutive integers for rotation; slots beyond the budget
        # come from a prefill with compress=False.
        held, largest = live(cache), keep.phase.largest_rotation
        if largest(held + (1 if keep.when.at_once else left)) > most:
            last, left = most, most - largest(held)
    if switch is not None and (short := rows[rows <= switch]).size:
        # Slots of a short text are not rotated like those of a long one.
        last, left = switch, min(left, switch - int(short.max()))
    if left < 1:
        raise InputError(
            f"the cache stands at this model's last position, {last}: start again with "
            "a shorter text, or use a model with a longer context"
        )
    return left


class OneStep(NamedTuple):
    """A `Step` of single decoders: equal ones share programs."""

    run: Run

    def __call__(
        self, params: Params, cache: Cache, token: Int[Array, "B"], append: Bool[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        return steps.step_fn(self.run, params, cache, token, append)


def stepping(model: Model, method: Method | None, implementation: str | None) -> tuple[Step, Params]:
    """`Verbs.stepping` of any model, and the parameters that it takes."""
    if has_verbs(model):
        return model.stepping(method), model.params
    model = made(model, method)
    return OneStep(decoding(model, method, implementation)), with_fitted(model.params, method)
