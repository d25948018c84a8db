"""Protects the newest tokens of a prompt under any method: the last one, read again, or a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.tasks.rows import STAYS
from kvjax.eval.tasks.sample import Sample
from kvjax.grammar import Keep, Method
from kvjax.keep.patterns import QuestionWindow, Recent, Sink


def keeping_newest(method: Method, tokens: int) -> Method:
    """Change the method to keep the newest `tokens` tokens of a prompt, too; they count in its budget.

    Methods that keep memory tokens in place of the text are not changed.
    """
    if method.layers:
        return dataclasses.replace(method, layers=tuple(keeping_newest(one, tokens) for one in method.layers))
    keep, reread = method.keep, method.reread
    if keep is not None:
        narrow = _at_least(keep.narrow, "window", tokens)
        keep = keep if narrow is keep.narrow else dataclasses.replace(keep, narrow=narrow)
        if not any(isinstance(p, Recent) and p.tokens >= tokens for p in keep.protect if _counts(p)):
            keep = _protecting(keep, tokens)
    reread = _at_least(reread, "newest", tokens)
    if keep is method.keep and reread is method.reread:
        return method
    return dataclasses.replace(method, keep=keep, reread=reread)


def _counts(pattern: object) -> bool:
    return isinstance(pattern, Recent) and isinstance(pattern.tokens, int)


def _protecting(keep: Keep, tokens: int) -> Keep:
    """Protect these tokens in the keep, in an allocation that gives every KV head enough slots."""
    protect, allocate = (*keep.protect, QuestionWindow(tokens)), keep.allocate
    first = sum(p.tokens for p in protect if isinstance(p, Sink))
    newest = max(p.tokens for p in protect if isinstance(p, Recent) and isinstance(p.tokens, int))
    return dataclasses.replace(keep, protect=protect, allocate=allocate.holding(first + newest))


def _at_least(word: object, field: str, tokens: int) -> object:
    """Return the word with at least `tokens` in the field, if it has this field."""
    if word is None or getattr(word, field, tokens) >= tokens:
        return word
    return dataclasses.replace(word, **{field: tokens})  # type: ignore[type-var]


def newest_of(protocol: str, rows: Iterable[Sequence[Sample]]) -> int:
    """How many of the newest tokens are protected: the longest question's length if questions are, else 1."""
    return max((len(row[0].question) for row in rows), default=1) if protocol in STAYS else 1


def check_newest(entry: PlannedCell, protocol: str, newest: int, lengths: Iterable[int]) -> None:
    """Raise InputError if the budget is less than the tokens that must stay of prompts of these lengths."""
    lengths = list(lengths)
    check_budget(keeping_newest(entry.method, 1), lengths)
    try:
        check_budget(keeping_newest(entry.method, newest), lengths)
    except InputError as error:
        raise InputError(
            f"{entry.label}: questions of up to {newest} tokens stay with what the method protects, more "
            f"than its budget: raise --budgets, or give --protocol {protocol}-unprotected"
        ) from error
