"""InfiniteBench's metrics of generated answers, task by task: (text, references) -> [0, 1].

Source: OpenBMB/InfiniteBench, src/compute_scores.py, as kvpress 8bb29b9 has it (arXiv:2402.13718; MIT).
Deviation: numbers of code_run, math_find and math_calc are compared as numbers, because kvpress compares them
with the answers as its data set writes them, as text, so that none is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kvjax.eval.tasks import metrics

_Metric = Callable[[str, Sequence[str]], float]
_MARKS = "\n:\"'.,?!{}"


def _spaced(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, " ")
    return text


def first_whole(text: str) -> str:
    """Find the first digits of a text.

    >>> first_whole("It is 12, not 7")
    '12'
    """
    found = re.search(r"[0-9]+", text)
    return found[0] if found else ""


def first_number(text: str) -> float | None:
    """Find the first number of a text, without a sign."""
    found = re.search(r"\d+\.\d+|\d+", text)
    return float(found[0]) if found else None


def any_within(text: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the text, upper and lower case alike."""
    return float(any(r.upper() in text.strip().upper() for r in references))


def find_number(text: str, references: Sequence[str]) -> float:
    """1 if the first number equals the reference; for an integer reference, decimals are ignored."""
    found, right = first_number(text), float(references[0])
    whole = "." not in references[0]
    return float(found is not None and (int(found) if whole else found) == right)


def choice(text: str, references: Sequence[str], last_letter: bool = True) -> float:
    """1 if the letter that a text chooses among A to D is a reference.

    It is the last single letter; else the first character, the whole text, the text after "answer is" and the
    like, or the first word that is a letter. last_letter: whether the last single letter is tried; SCBench
    omits it.
    """
    text = text.strip()
    alone = re.search(r"\b[A-D]\b(?!.*\b[A-D]\b)", text) if last_letter else None
    if alone is not None and alone[0] in references:
        return 1.0
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in references)
    if text in references:
        return 1.0
    text = re.sub(" +", " ", _spaced(text, "\n\"'.,?!{}"))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        at = text.find(prefix)
        if at >= 0:
            after = text[at + len(prefix) + 1 :]
            return float(bool(after) and any(after.startswith(r) for r in references))
    return float(next((w for w in text.split() if w in "ABCD"), None) in references)


def _debug(text: str, references: Sequence[str]) -> float:
    """Code.Debug: the references are the function's name and its letter, or the letter alone."""
    name, letter = references[0], references[-1]
    text = text.strip()
    alone = re.search(r"\b[A-J]\b(?!.*\b[A-J]\b)", text)
    if alone is not None and alone[0] == letter:
        return 1.0
    text = re.sub(" +", " ", _spaced(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    if text.startswith((letter, name)):
        return 1.0
    for prefix in ("answer is:", "is:", "answer:", "correct option is:"):
        at = text.find(prefix)
        if at >= 0:
            after = text[at + len(prefix) + 1 :]
            return float(bool(after) and after.startswith((letter, name)))
    return 0.0


def _run(text: str, references: Sequence[str]) -> float:
    words = _spaced(text.strip(), "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(references[0]))
    except ValueError:
        return 0.0


def _calculated(text: str, references: Sequence[str]) -> float:
    """Compute the share of intermediate values that are right before the first wrong one."""
    found = [int(x) for x in re.findall("[0-9]+", text)]
    right = [int(float(r)) for r in references]
    wrong = next((i for i, pair in enumerate(zip(right, found, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(right), len(found)) if wrong is None else wrong) / len(right)


def character_f1(text: str, references: Sequence[str]) -> float:
    """Compute the best F1 of the characters that two texts share (Chinese answers)."""
    return max(metrics.character_f1(text, r) for r in references)


def _first_whole(text: str, references: Sequence[str]) -> float:
    return float(first_whole(text) == references[0])


SCORES: Mapping[str, _Metric] = {
    "kv_retrieval": lambda text, right: float(right[0] in _spaced(text, _MARKS).split()),
    "passkey": _first_whole,
    "number_string": _first_whole,
    "code_run": _run,
    "code_debug": _debug,
    "longdialogue_qa_eng": any_within,
    "longbook_qa_eng": lambda text, right: max(metrics.token_f1(text, r) for r in right),
    "longbook_qa_chn": character_f1,
    "longbook_choice_eng": choice,
    "math_find": find_number,
    "math_calc": _calculated,
}
