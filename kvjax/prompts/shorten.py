"""`shorten`: prompt compression by any language model, as LLMLingua does it."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.models.model import Model, check_single
from kvjax.prompts.choose import BREAK, encoded
from kvjax.prompts.classifier import Classifier
from kvjax.prompts.compressors import COMPRESSORS
from kvjax.prompts.text import KeptPositions, PromptText, document


@dataclasses.dataclass(frozen=True)
class Shortened:
    """The result of prompt compression.

    text: the kept tokens as text, documents in the chosen order, separated by an empty line. kept: the kept
    positions of each document. tokens, given: the numbers of tokens after and before.
    """

    text: str
    kept: tuple[KeptPositions, ...]
    tokens: int
    given: int


def shorten(
    model: Model,
    documents: str | Sequence[str],
    *,
    keep: float | int = 0.5,
    question: str = "",
    by: str = "llmlingua",
    **options: float | int | Classifier,
) -> Shortened:
    r"""Remove tokens, sentences or documents from a prompt before a model reads it (prompt compression).

    The result is text, so any tokenizer can read it, and a method may additionally compress its cache.

    Args:
        model: a decoder with a tokenizer, which scores the text. It may be much smaller than the one that
            answers.
        documents: one text or several.
        keep: the share of their tokens that stay, in (0, 1].
        question: the question about them; longllmlingua and cpc need it.
        by: "llmlingua" (documents and tokens that surprise the model), "llmlingua2" (tokens that a classifier
            keeps: classifier=kvjax.fit_classifier(model, texts)), "longllmlingua" (documents and tokens that
            go with the question) or "cpc" (sentences that go with the question).
        options: options of `by`, such as segment=200; see `kvjax.prompts.compressors`.

    Returns:
        A `Shortened`: the text, and the kept positions of each document.

    Raises:
        InputError: for an unknown compressor or option, a share outside (0, 1], an empty text,
            a missing question, a model without a tokenizer, and a document longer than its positions.

    >>> import kvjax
    >>> model = kvjax.load("bytes-tiny")
    >>> text = "def add(a, b):\n    return a + b\n" * 3
    >>> short = kvjax.shorten(model, text, keep=0.5)
    >>> short.tokens, short.given
    (48, 96)
    """
    check_single(model, "score the text with it alone")
    known = checked(by, keep, question, options)
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, expected a model that reads text: load another one")
    texts = [documents] if isinstance(documents, str) else list(documents)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"documents are {texts!r:.80}, expected a text or several, none of them empty")
    prompt = PromptText(tuple(document(model.tokenizer, text) for text in texts), encoded(model, question))
    _check_positions(model, prompt)
    kept = COMPRESSORS[by].choose(model, prompt, float(keep), **known)
    parts = [model.tokenizer.decode(prompt.documents[i].ids[at].tolist()) for i, at in kept]
    tokens = sum(len(one.positions) for one in kept)
    return Shortened(BREAK.join(parts), tuple(kept), tokens, prompt.tokens)


def checked(by: str, keep: float, question: str, options: dict[str, Any]) -> dict[str, Any]:
    """Check the options of `by`. Raises InputError for what `shorten` refuses for any model and texts."""
    compressor, known = _compressor(by), _checked_options(by, options)
    if isinstance(keep, bool) or not isinstance(keep, Real) or not 0 < float(keep) <= 1:
        raise InputError(
            f"keep={keep!r} was given, expected the share of tokens that stay: a number in (0, 1]"
        )
    if compressor.needs_question and not question.strip():
        raise InputError(f"{by} chooses by a question, and none was given: add one, or use llmlingua")
    return known


def _compressor(by: str):
    if by in COMPRESSORS:
        return COMPRESSORS[by]
    near = difflib.get_close_matches(str(by), COMPRESSORS, 1)
    hint = f"did you mean {near[0]}?" if near else "choose one of them"
    raise InputError(f"by={by!r} was given, expected one of {', '.join(COMPRESSORS)}: {hint}")


def _checked_options(by: str, options: dict[str, Any]) -> dict[str, Any]:
    """Check that the compressor has the options and they are in range, and return them."""
    takes = [*inspect.signature(COMPRESSORS[by].choose).parameters][3:]
    if "classifier" in takes and not isinstance(options.get("classifier"), Classifier):
        raise InputError(
            f"{by} needs a classifier, got {options.get('classifier')!r:.40}: give "
            "classifier=kvjax.fit_classifier(model, texts)"
        )
    for name, value in options.items():
        if name not in takes:
            has = f"expected {', '.join(takes)}" if takes else "expected none"
            raise InputError(f"{by} was given the option {name}, {has}: leave it out")
        if name == "classifier":
            continue
        if name in ("segment", "spare"):
            whole_number(name, value, int(name == "segment"), "tokens")
        elif isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name}={value!r} was given, expected a number of at least 0")
    return options


def _check_positions(model: Model, prompt: PromptText) -> None:
    """Raise InputError if a document with the question is longer than the model's positions."""
    longest = max(len(one.ids) for one in prompt.documents) + len(prompt.question)
    most = model.config.max_positions
    if longest > most:
        raise InputError(
            f"the longest document and the question have {longest} tokens, expected at most the {most} "
            f"positions of {model.name}: give the text as several documents"
        )
