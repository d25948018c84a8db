"""Other budgets per layer, around any method that selects once, and other methods per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kvjax.base.errors import InputError
from kvjax.grammar import Method, check
from kvjax.keep.budgets.budget import PerLayer, Uniform
from kvjax.methods.around import around
from kvjax.methods.parse import as_method


@around("method")
def per_layer(
    method: Method | str, shares: Sequence[float | int | None], *, page: int | None = None
) -> Method:
    """Give every layer its share of a method's budget.

    Args:
        method: a method, or its text.
        shares: one for each layer in which the method selects (not those that it skips or that have a sliding
            window): 0.5 keeps half as many slots, None the whole layer.
        page: slots per page of the cache; None chooses by the number of slots.

    Returns:
        The method with a budget per layer.

    Raises:
        InputError: for a method that does not select, that already divides its budget between heads or
            layers, or that evicts at every step; and, in a prefill, for another number of layers.

    >>> import kvjax
    >>> half_of_it = kvjax.method("snapkv", budget=0.5, window=8)
    >>> kvjax.per_layer(half_of_it, [None, 1, 0.5]).keep.allocate
    PerLayer(shares=(None, 1, 0.5))
    """
    method = as_method(method)
    keep = method.keep
    if keep is None:
        raise InputError(f"{method.id} selects no slots, so its layers have no budgets: give a keep method")
    if not isinstance(keep.allocate, Uniform):
        raise InputError(
            f"{method.id} shares its budget by {type(keep.allocate).__name__} already: give a method of "
            "equal heads and layers, such as snapkv"
        )
    keep = dataclasses.replace(keep, allocate=PerLayer(tuple(shares)), page=page)
    made = dataclasses.replace(method, keep=keep, spec=())
    try:
        check(made)
    except ValueError as error:
        why = str(error).removeprefix(f"{made.id} cannot work: ")
        raise InputError(f"{method.id} per layer: {why}") from error
    return made


@around(several="methods")
def by_layer(methods: Sequence[Method | str | None]) -> Method:
    """Give every layer of a model a method of its own.

    Args:
        methods: one for each layer, from the first: a method, its text, or None to keep everything. Layers
            share no common budget, unless they have the same method and it divides its budget.

    Returns:
        One method for the whole model.

    Raises:
        InputError: for methods that concern all layers together, because they rotate by rank, select per
            query head, read a prompt twice or skip some of its tokens (such as StreamingLLM, KVzip and
            FastKV); for two different ones that give heads unequal budgets; and, in a prefill, for another
            number of layers.

    >>> import kvjax
    >>> evicting = kvjax.method("snapkv", budget=0.25)
    >>> kvjax.by_layer([None, "int8", evicting, evicting]).at(1).id
    'int8'
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise InputError(f"methods are {methods!r:.80}, expected a list with one for every layer")
    made = Method(layers=tuple(as_method(one) for one in methods))
    try:
        check(made)
    except ValueError as error:
        why = str(error).removeprefix(f"{made.id} cannot work: ")
        raise InputError(f"a method for every layer: {why}") from error
    return made
