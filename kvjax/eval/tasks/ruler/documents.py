"""Questions about one of many documents: SQuAD (qa_1) and HotpotQA (qa_2), from local files.

Source: NVIDIA/RULER at c3f5e3b, scripts/data/synthetic/qa.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.base.errors import InputError
from kvjax.eval.tasks.ruler.prompts import PROMPTS, Draft, draft, joined

# The file that each task reads, and where its publishers offer it.
FILES = {
    "qa_1": "SQuAD 2.0's dev-v2.0.json",
    "qa_2": "HotpotQA's hotpot_dev_distractor_v1.json",
}


class DocumentQuestion(NamedTuple):
    """A question; documents by index: those given with it, those it needs, and all of its article."""

    text: str
    answers: tuple[str, ...]
    given: tuple[int, ...]
    needed: tuple[int, ...]
    article: tuple[int, ...] = ()


class Documents(NamedTuple):
    """The questions of a file and the documents of all of them."""

    questions: tuple[DocumentQuestion, ...]
    documents: tuple[str, ...]
    name: str


def read_documents(task: str, path: str) -> Documents:
    """Read a file's questions for "qa_1" or "qa_2"; InputError for another schema, with file and field."""
    file = Path(path)
    try:
        raw = file.read_bytes()
        data = json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}): {task} expects {FILES[task]}") from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error}): {task} expects {FILES[task]}") from error
    questions, documents = (_squad if task == "qa_1" else _hotpot)(_Field(data, str(file), FILES[task]))
    if not questions:
        raise InputError(f"{file} holds no question with an answer: {task} expects {FILES[task]}")
    return Documents(tuple(questions), documents, f"{file.name}:{hashlib.sha256(raw).hexdigest()[:16]}")


def draw_documents(data: Documents, index: int, rng: np.random.Generator, size: int) -> Draft:
    """Question number `index` and `size` documents, those of its article before others.

    Deviation: if a prompt needs more documents than there are, RULER repeats some; here each is used once.
    """
    question = data.questions[index]
    near = [i for i in question.article if i not in question.given]
    more = size - len(question.given)
    if more > len(near):
        known = {*question.given, *near}
        others = [i for i in range(len(data.documents)) if i not in known]
        near += rng.choice(others, more - len(near), replace=False).tolist()
    else:
        near = rng.permutation(near)[:more].tolist()
    every = [*question.given, *near]
    shuffled = [every[i] for i in rng.permutation(len(every))]
    parts = []
    for place, number in enumerate(shuffled, 1):
        parts += [(f"Document {place}:\n", False), (data.documents[number], number in question.needed)]
        parts += [("\n\n", False)] * (place < len(shuffled))
    return draft(PROMPTS["qa"], joined(parts, ""), question.answers, query=question.text)


@dataclasses.dataclass(frozen=True)
class _Field:
    """A value of a JSON file, and its place there; wrong types raise an InputError with the place."""

    value: Any
    where: str
    expected: str

    def __call__(self, key: str) -> _Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        if key not in self.value:
            raise InputError(f"{self.where} has no field {key!r}, expected the form of {self.expected}")
        return _Field(self.value[key], f"{self.where}.{key}", self.expected)

    def items(self) -> list[_Field]:
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [_Field(v, f"{self.where}[{i}]", self.expected) for i, v in enumerate(self.value)]

    def pair(self) -> list[_Field]:
        if len(found := self.items()) != 2:
            raise self.wrong("a pair")
        return found

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def wrong(self, what: str) -> InputError:
        return InputError(
            f"{self.where} is {self.value!r:.60}, expected {what}, as in {self.expected}: check the file"
        )


def _squad(data: _Field) -> tuple[list[DocumentQuestion], tuple[str, ...]]:
    articles = [
        [(p("context").text(), p("qas").items()) for p in article("paragraphs").items()]
        for article in data("data").items()
    ]
    documents = tuple(sorted({context for article in articles for context, _ in article}))
    number = {context: i for i, context in enumerate(documents)}
    questions = []
    for article in articles:
        near = tuple(dict.fromkeys(number[context] for context, _ in article))
        for context, asked in article:
            here = (number[context],)
            for one in asked:
                answers = tuple(answer("text").text() for answer in one("answers").items())
                if answers and not one.value.get("is_impossible", False):
                    questions.append(DocumentQuestion(one("question").text(), answers, here, here, near))
    return questions, documents


def _hotpot(data: _Field) -> tuple[list[DocumentQuestion], tuple[str, ...]]:
    found = []
    for one in data.items():
        context = {}
        for pair in one("context").items():
            title, lines = pair.pair()
            context[title.text()] = f"{title.text()}\n{''.join(line.text() for line in lines.items())}"
        facts = one("supporting_facts").items() if "supporting_facts" in one.value else []
        titles = {fact.pair()[0].text() for fact in facts} or {*context}
        found.append((one("question").text(), one("answer").text(), context, titles))
    documents = tuple(sorted({text for *_, context, _ in found for text in context.values()}))
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        DocumentQuestion(
            asked,
            (answer,),
            tuple(dict.fromkeys(number[text] for text in context.values())),
            tuple(number[text] for title, text in context.items() if title in titles),
        )
        for asked, answer, context, titles in found
    ]
    return questions, documents
