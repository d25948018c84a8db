"""Texts that commands read of a model's own tasks, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.base.errors import InputError

if TYPE_CHECKING:
    from kvjax.models.model import Model


def read_texts(
    model: Model, *, text: str | None, tasks: Sequence[str] | None, rows: int, length: int, seed: int,
    questions: bool,
) -> list[Any]:  # fmt: skip
    """At most `rows` texts as ids: pieces of a file, or contexts of tasks, with questions where these matter.

    Raises InputError where a file and tasks were both given.
    """
    from kvjax.eval.run.perplexity import read_windows
    from kvjax.eval.tasks.suite import make_suite

    if text is not None and tasks is not None:
        raise InputError("--text and --tasks were both given: give one of them")
    if text is not None:
        return read_windows(model, text, length=length, steps=0, windows=rows, seed=seed).tokens.tolist()
    suite, texts, index = make_suite(model, tasks, length=length, seed=seed), [], 0
    while len(texts) < rows and (asked := [turns[0] for turns in suite.rows(index, "agnostic")]):
        # Several questions are about one context, which is read once where they do not matter.
        texts += asked if questions else dict.fromkeys(tuple(sample.context) for sample in asked)
        index += 1
    return texts[:rows]
