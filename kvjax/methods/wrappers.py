"""What stands around any method that chooses slots: chunks, blocks, a merge of values, a clock for steps."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method, check
from kvjax.grammar.when import Every
from kvjax.keep.budgets.phases import Phased
from kvjax.keep.merges.merge_values import ValueBlend
from kvjax.keep.scores.chunk_wise import BlockByBlock, WithinChunks
from kvjax.methods.around import around
from kvjax.methods.parse import as_method


@around("method")
def in_chunks(method: Method | str, tokens: int) -> Method:
    """The method, but every chunk of `tokens` tokens of a text keeps the same share of its slots.

    The score is that of the whole text; the budget, a share, applies to every chunk, as in FINCH
    (arXiv:2408.00167).

    Raises InputError for a method that chooses no slots, and for a number of tokens below 1.

    >>> import kvjax
    >>> kvjax.in_chunks(kvjax.method("keydiff", budget=0.25), 128).keep.score.tokens
    128
    """
    method = as_method(method)
    return _around(method, score=WithinChunks(_score(method), _at_least_1("tokens", tokens)))


@around("method")
def in_blocks(method: Method | str, tokens: int) -> Method:
    """The method choosing anew whenever `tokens` more tokens of a text are there, among what it still holds.

    Layers read the whole text meanwhile, so this says what a choice by blocks keeps, and saves no memory
    while it reads; `prefill(..., chunk=tokens)` does (KeyDiff, arXiv:2504.15364, section 4).

    Raises InputError as `in_chunks` does.

    >>> import kvjax
    >>> kvjax.in_blocks(kvjax.method("keydiff", budget=64), 128).keep.score.tokens
    128
    """
    method = as_method(method)
    return _around(method, score=BlockByBlock(_score(method), _at_least_1("tokens", tokens)))


@around("method")
def merging(method: Method | str, threshold: float = 0.0) -> Method:
    """The method with the values of what leaves blended into the most similar slots that stay (`ValueBlend`).

    threshold: what has a lower cosine to all of them is dropped. Raises InputError for a method that chooses
    no slots or merges already, and for a threshold outside [0, 1].

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
    """The method choosing anew after every `every` tokens that are written, and at the end of prompts.

    A budget that is a share is one of all tokens so far; a number of slots holds the cache's size. Raises
    InputError for a method that chooses no slots, whose words cannot act in steps, and for `every` below 1.

    >>> import kvjax
    >>> kvjax.while_decoding(kvjax.method("keydiff", budget=256), every=64).keep.when
    Every(tokens=64)
    """
    method = as_method(method)
    _score(method)
    return _around(method, when=Every(_at_least_1("every", every)))


@around("prompt", "later")
def phased(prompt: Method | str, later: Method | str) -> Method:
    """`prompt` says which slots stay at the ends of prompts, and `later` which one leaves at every step.

    Both have one budget. What either protects stays in both; the rest of the sentence is that of `later`.

    Raises InputError where one of them chooses no slots, where `prompt` evicts in steps or `later` does not
    after every token, where budgets differ, and where what `prompt` is made of cannot be used in steps.

    >>> import kvjax
    >>> snapkv, tova = kvjax.method("snapkv", budget=256), kvjax.method("tova", budget=256)
    >>> kvjax.phased(snapkv, tova).keep.when == tova.keep.when
    True
    """
    prompt, later = as_method(prompt), as_method(later)
    first, then = _score(prompt), _score(later)
    a, b = prompt.keep, later.keep
    assert a is not None and b is not None
    if a.when.in_steps:
        raise InputError(f"{prompt.id} evicts while decoding, too: give a method for prompts, such as snapkv")
    if not b.when.at_once:
        raise InputError(
            f"{later.id} does not evict after every token: give one that does, such as tova, or "
            "kvjax.while_decoding(method)"
        )
    if a.budget != b.budget:
        raise InputError(
            f"{prompt.id} has the budget {a.budget.amount!r} and {later.id} {b.budget.amount!r}: give both "
            "the same"
        )
    return _around(
        later,
        score=Phased(first, then),
        protect=(*a.protect, *b.protect),
        per_query_head=a.per_query_head or b.per_query_head,
        probe=a.probe,
        allocate=a.allocate,
    )


def _score(method: Method) -> Any:
    if method.keep is None or method.keep.score is None:
        raise InputError(f"{method.id} chooses no slots: give a method that does, such as snapkv")
    return method.keep.score


def _at_least_1(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}, expected a whole number of tokens, at least 1")
    return value


def _around(method: Method, **parts: Any) -> Method:
    """The method with other parts of its keep; InputError where these do not go together."""
    assert method.keep is not None
    try:
        made = dataclasses.replace(method, keep=dataclasses.replace(method.keep, **parts), spec=())
        check(made)
    except ValueError as error:
        why = str(error).removeprefix("custom cannot work: ")
        raise InputError(f"{method.id} cannot be changed so: {why}") from error
    return made
