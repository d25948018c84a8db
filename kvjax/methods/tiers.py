"""A second tier for any method that evicts: evicted tokens are stored with fewer bits instead."""

from __future__ import annotations

import dataclasses

from kvjax.base.errors import InputError
from kvjax.grammar import Method, Store, check
from kvjax.methods.around import around
from kvjax.methods.parse import as_method
from kvjax.store.affine import Affine


@around("method")
def tiered(method: Method | str, *, bits: int = 2, group: int | None = 32) -> Method:
    """Give a method a second tier: slots that it would evict are stored in few bits instead.

    This is MiKV's idea (Yang et al., 2024, arXiv:2402.18096, section 4) for any choice of slots: with CAKE's,
    layers differ in how many tokens they hold with all their bits. A later prompt chooses among all tokens
    again, as they are stored.

    Args:
        method: a method that evicts, or its text.
        bits: bits per number of the second tier.
        group: how many channels share a scale and a zero; None takes all of a head.

    Returns:
        The method with both tiers.

    Raises:
        InputError: for a method that evicts nothing or has a second tier already, that merges evicted slots,
            or that evicts in steps, except one slot after every token from heads of equal budgets.

    >>> import kvjax
    >>> kvjax.tiered(kvjax.method("cake", budget=0.25), bits=4).keep.lower.keys
    Affine(bits=4, axis='token', group=32, together=1, clip=1.0)
    """
    method = as_method(method)
    keep = method.keep
    if keep is None or keep.lower is not None:
        what = "drops no slots" if keep is None else "has a second tier already"
        raise InputError(f"{method.id} {what}: give a method that drops some, such as cake")
    lower = Store(Affine(bits, group=group), Affine(bits, group=group))
    made = dataclasses.replace(method, keep=dataclasses.replace(keep, lower=lower), spec=())
    try:
        check(made)
    except ValueError as error:
        why = str(error).removeprefix(f"{made.id} cannot work: ")
        raise InputError(f"{method.id} in tiers: {why}") from error
    return made
