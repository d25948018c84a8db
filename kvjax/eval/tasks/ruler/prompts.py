"""RULER's prompts and prefixes of answers, word by word.

Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/constants.py and scripts/synthetic.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PromptTemplate(NamedTuple):
    """A prompt with places for {context} and {query}, and the text with which the answer begins."""

    template: str
    prefix: str

    def around(self, **given: str) -> tuple[str, str, str]:
        """Return the text before the context, after it up to the question, and the question itself."""
        before, after = self.template.split("{context}")
        after = after.format(**given)
        question = after.lstrip("\n")
        return before.format(**given), after[: len(after) - len(question)], question


_DOCUMENTS = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\n"
)
PROMPTS: Mapping[str, PromptTemplate] = {
    "niah": PromptTemplate(
        "Some special magic {type} are hidden within the following text. Make sure to memorize it. I will "
        "quiz you about the {type} afterwards.\n{context}\nWhat are all the special magic {type} for "
        "{query} mentioned in the provided text?",
        " The special magic {type} for {query} mentioned in the provided text are",
    ),
    "vt": PromptTemplate(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
        "assigned the value {query}, they are: ",
    ),
    "cwe": PromptTemplate(
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize "
        "the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the "
        "above list?",
        " Answer: The top 10 words that appear most often in the list are:",
    ),
    "fwe": PromptTemplate(
        "Read the following coded text and track the frequency of each coded word. Find the three most "
        "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
        "ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
    ),
    "qa": PromptTemplate(
        _DOCUMENTS + "The following are given documents.\n\n{context}\n\n" + _DOCUMENTS + "Question: {query}",
        " Answer:",
    ),
}


def of_one(prompt: PromptTemplate) -> PromptTemplate:
    """Return the prompt for a single value: RULER replaces these words, in this order."""
    template, prefix = prompt
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is")):
        template, prefix = template.replace(old, new), prefix.replace(old, new)
    return PromptTemplate(template, prefix)


class Draft(NamedTuple):
    """A sample as text.

    context: pieces of the text before the question; the answer needs those at odd indices. prefix: the text
    with which the answer begins.
    """

    context: tuple[str, ...]
    question: str
    prefix: str
    references: tuple[str, ...]

    def gold(self, task: str) -> tuple[str, ...]:
        """Return a right answer in pieces, in the form of the solved examples in RULER's prompts.

        >>> Draft(("",), "", "", ("a", "b")).gold("cwe")
        (' 1. ', 'a', ' 2. ', 'b')
        """
        if task == "cwe":
            before = [f" {i}. " for i in range(1, len(self.references) + 1)]
        else:
            before = [" ", *[" " if task == "vt" else ", "] * (len(self.references) - 1)]
        found = self.references[:1] if task == "qa" else self.references
        return tuple(piece for pair in zip(before, found, strict=False) for piece in pair)


def draft(
    prompt: PromptTemplate,
    context: tuple[str, ...],
    references: tuple[str, ...],
    *,
    before: str = "",
    **given: str,
) -> Draft:
    """Fill in a prompt; before: a solved example in front of it."""
    opens, closes, question = prompt.around(**given)
    first, *rest = context
    pieces = [before + opens + first, *rest]
    pieces[-1] += closes
    return Draft(tuple(pieces), question, prompt.prefix.format(**given), references)


def text_of(made: Draft) -> str:
    return "".join(made.context) + made.question + made.prefix


def joined(parts: list[tuple[str, bool]], separator: str) -> tuple[str, ...]:
    """Texts joined by a separator, as pieces that alternate between not needed and needed.

    >>> joined([("a", False), ("b", True), ("c", False)], " ")
    ('a ', 'b', ' c')
    """
    out = [""]
    for i, (text, needed) in enumerate(parts):
        out[-1] += separator if i else ""
        if needed:
            out += [text, ""]
        else:
            out[-1] += text
    return tuple(out)
