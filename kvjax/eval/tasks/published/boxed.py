r"""Compares final answers of mathematics problems: as text after MATH's normalisation, or as numbers.

The normalisation follows MATH (Hendrycks et al., 2021, arXiv:2103.03874, appendix), with numbers compared by
value. Answers that only algebra finds equal, such as sums in another order, count as wrong.
"""

from __future__ import annotations

import re
from fractions import Fraction

# Text without meaning in an answer.
_EMPTY = re.compile(
    r"\\!|\\,|\\;|\\:|\\ |\\left|\\right|\\\$|\$|\\%|%|\^\{?\\circ\}?|\\mathrm|\\displaystyle|~"
)
_WORDS = re.compile(r"\\(?:text|mbox|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} of a text; None if none is closed.

    >>> last_boxed("So x = \\boxed{2}, or \\boxed{\\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    starts = [found.end() for found in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]
    for start in reversed(starts):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if not depth:
                return text[start:i].strip()
    return None


def same_answer(said: str | None, right: str) -> bool:
    r"""Whether an answer is the right one.

    >>> same_answer("\\dfrac12", "0.5"), same_answer("1,000", "1000"), same_answer("x=3", "3")
    (True, True, True)
    >>> same_answer("4", "5")
    False
    """
    if said is None:
        return False
    plain = normalised(said), normalised(right)
    if plain[0] == plain[1]:
        return True
    numbers = [_number(text) for text in plain]
    return numbers[0] is not None and numbers[0] == numbers[1]


def normalised(text: str) -> str:
    r"""Remove typesetting commands from an answer, with fractions and roots in braces.

    >>> normalised("x = 3 \\text{ apples}"), normalised("\\tfrac 12"), normalised("\\sqrt3")
    ('3', '\\frac{1}{2}', '\\sqrt{3}')
    """
    text = text.strip().rstrip(".").replace("\n", "")
    # Units are at the end; any other words are the answer.
    text = re.sub(r"(?<=[\w})])\\?\s*\\(?:text|mbox)\s*\{\s+[^{}]*\}(?:\^\{?\d\}?)?\s*$", "", text)
    text = _EMPTY.sub("", _WORDS.sub(r"\1", text)).replace("\\\\", "\\")
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = re.sub(r"\s", "", text)
    named = text.split("=")
    if len(named) == 2 and len(named[0]) <= 2:
        text = named[1]
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{([^{}]+)\}(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    text = re.sub(r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    return re.sub(r"(?<!\d)\.(?=\d)", "0.", text)


def _number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, or a fraction of integers."""
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    found = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", text)
    try:
        if found is None:
            return Fraction(text)
        return Fraction(int(found[2]), int(found[3])) * (-1 if found[1] else 1)
    except (ValueError, ZeroDivisionError):
        return None
