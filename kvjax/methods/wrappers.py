"""Wrappers around any selecting method: chunks, blocks, a merge of values, selection while decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method, check
from kvjax.grammar.stages import in_stages
from kvjax.grammar.when import Every
from kvjax.keep.merges.merge_values import ValueBlend
from kvjax.keep.scores.chunk_wise import BlockByBlock, WithinChunks
from kvjax.methods.around import around
from kvjax.methods.parse import as_method


@around("method")
def in_chunks(method: Method | str, tokens: int) -> Method:
    """Select the same share of the slots in every chunk of a text, by scores over the whole text.

    The budget, a fraction, applies to every chunk, as in FINCH (arXiv:2408.00167).

    Args:
        method: a method that selects slots, or its text.
        tokens: length of a chunk.

    Returns:
        The method, selecting chunk by chunk.

    Raises:
        InputError: for a method that selects no slots, and for `tokens` below 1.

    >>> import kvjax
    >>> kvjax.in_chunks(kvjax.method("keydiff", budget=0.25), 128).keep.score.tokens
    128
    """
    method = as_method(method)
    return _around(method, score=WithinChunks(_score(method), _at_least_1("tokens", tokens)))


@around("method")
def in_blocks(method: Method | str, tokens: int) -> Method:
    """Make a method select again after every block of a text, among the slots that it still holds.

    Layers still process the whole text at once, so this shows the effect of selection by blocks, but saves no
    memory during prefill; `prefill(..., chunk=tokens)` does (KeyDiff, arXiv:2504.15364, section 4).

    Args:
        method: a method that selects slots, or its text.
        tokens: length of a block.

    Returns:
        The method, selecting block by block.

    Raises:
        InputError: for a method that does not select slots, and for `tokens` below 1.

    >>> import kvjax
    >>> kvjax.in_blocks(kvjax.method("keydiff", budget=64), 128).keep.score.tokens
    128
    """
    method = as_method(method)
    return _around(method, score=BlockByBlock(_score(method), _at_least_1("tokens", tokens)))


@around("method")
def merging(method: Method | str, threshold: float = 0.0) -> Method:
    """Blend the values of evicted slots into the most similar kept ones (`ValueBlend`).

    Args:
        method: a method that selects slots, or its text.
        threshold: an evicted slot is dropped if its cosine to every kept one is below this.

    Returns:
        The method with the merge.

    Raises:
        InputError: for a method that selects no slots or merges already, and a threshold outside [0, 1].

    >>> import kvjax
    >>> kvjax.merging(kvjax.method("snapkv", budget=0.25)).keep.merge
    ValueBlend(threshold=0.0)
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise InputError(f"threshold is {threshold!r}, expected a cosine from 0 to 1, such as 0.0")
    method = as_method(method)
    _score(method)
    assert method.keep is not None
    if method.keep.merge is not None:
        raise InputError(
            f"{method.id} merges by {method.keep.merge!r} already: give a method that drops slots"
        )
    return _around(method, merge=ValueBlend(float(threshold)))


@around("method")
def while_decoding(method: Method | str, every: int = 1) -> Method:
    """Make a method also select while decoding, and not only at the end of prompts.

    Args:
        method: a method that selects slots, or its text. A budget that is a fraction counts all tokens so
            far; a number of slots bounds the cache.
        every: how many tokens are generated between two selections.

    Returns:
        The method, acting in steps.

    Raises:
        InputError: for a method that selects no slots or whose score cannot act in steps, and for `every`
            below 1.

    >>> import kvjax
    >>> kvjax.while_decoding(kvjax.method("keydiff", budget=256), every=64).keep.when
    Every(tokens=64)
    """
    method = as_method(method)
    _score(method)
    return _around(method, when=Every(_at_least_1("every", every)))


@around("prompt", "later")
def phased(prompt: Method | str, later: Method | str) -> Method:
    """Select by one method at the end of prompts, and by another at every step.

    Args:
        prompt: the method that selects at the end of prompts, or its text.
        later: the method that evicts one slot after every token, or its text; with the same budget. Tokens
            that either protects are always kept; everything else is taken from `later`.

    Returns:
        One method of both.

    Raises:
        InputError: if one of them does not select slots, if `prompt` evicts in steps or `later` does not
            after every token, if budgets differ, and if the score of `prompt` cannot act in steps.

    >>> import kvjax
    >>> snapkv, tova = kvjax.method("snapkv", budget=256), kvjax.method("tova", budget=256)
    >>> kvjax.phased(snapkv, tova).keep.when == tova.keep.when
    True
    """
    prompt, later = as_method(prompt), as_method(later)
    for method in (prompt, later):
        _score(method)
    assert prompt.keep is not None and later.keep is not None
    try:
        keep = in_stages(prompt.keep, later.keep)
    except ValueError as error:
        raise InputError(f"{prompt.id}, then {later.id}: {error}") from error
    return _around(later, **{field.name: getattr(keep, field.name) for field in dataclasses.fields(keep)})


def _score(method: Method) -> Any:
    if method.keep is None or method.keep.score is None:
        raise InputError(f"{method.id} chooses no slots: give a method that does, such as snapkv")
    return method.keep.score


def _at_least_1(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}, expected a whole number of tokens, at least 1")
    return value


def _around(method: Method, **parts: Any) -> Method:
    """Return the method with other parts of its keep; InputError if these do not go together."""
    assert method.keep is not None
    try:
        made = dataclasses.replace(method, keep=dataclasses.replace(method.keep, **parts), spec=())
        check(made)
    except ValueError as error:
        why = str(error).removeprefix("custom cannot work: ")
        raise InputError(f"{method.id} cannot be changed so: {why}") from error
    return made
