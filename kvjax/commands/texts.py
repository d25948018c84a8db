"""Texts that commands read from a model's own tasks, or from a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.base.errors import InputError

if TYPE_CHECKING:
    from kvjax.models.model import Model


def read_texts(
    model: Model, *, text: str | None, tasks: Sequence[str] | None, rows: int, length: int, seed: int,
    questions: bool,
) -> list[Any]:  # fmt: skip
    """At most `rows` texts as ids: pieces of a file, or contexts of tasks.

    questions: samples of tasks with questions and right answers, in place of contexts. Raises InputError if a
    file and tasks were both given.
    """
    from kvjax.eval.run.perplexity import read_windows
    from kvjax.eval.tasks.suite import make_suite

    if text is not None and tasks is not None:
        raise InputError("--text and --tasks were both given: give one of them")
    if text is not None:
        return read_windows(model, text, length=length, steps=0, windows=rows, seed=seed).tokens.tolist()
    suite, texts, index = make_suite(model, tasks, length=length, seed=seed, gold=questions), [], 0
    while len(texts) < rows and (asked := [turns[0] for turns in suite.rows(index, "agnostic")]):
        # Several questions can share one context, which is used once if the questions do not matter.
        texts += asked if questions else dict.fromkeys(tuple(sample.context) for sample in asked)
        index += 1
    return texts[:rows]


def text_of_file(name: str) -> str:
    """Return the text of a file, or of standard input for "-". InputError if there is none."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{name} cannot be read ({error.strerror}), expected a text file: check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is no UTF-8 text, expected a text file: convert it first") from error
