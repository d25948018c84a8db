"""RULER's prompts hold what its own generator puts into them: records at a named commit."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from kvjax.eval.tasks.benchmarks import RULER
from kvjax.eval.tasks.ruler import chains, counts, shipped
from kvjax.eval.tasks.ruler.documents import draw_documents, read_documents
from kvjax.eval.tasks.ruler.needles import NEEDLES, draw_needles
from kvjax.eval.tasks.ruler.prompts import text_of
from tests.eval.ruler_records import HOTPOT, LENGTHS, NEEDLE, SQUAD, UUID, pieces, records


def form_of(text):
    """Write a text in a form in which all drawn keys, values, names and words are alike."""
    text = re.sub(r"(?<=magic )(numbers?|uuids?) for .+?(?= is: | mentioned)", r"\1 for K", text)
    text = re.sub(UUID, "1234567", text)
    text = re.sub(r"\d{7}", "V", re.sub(r"\b\d{5}\b", "N", text))
    return re.sub(r"\b(?!VAR\b)[A-Z]{3}\b", "abc", re.sub(r"\b[A-Z]{5}\b", "abcde", text))


@pytest.fixture(scope="module")
def recorded():
    found = records()
    return {key: (r["input"] + r["answer_prefix"], r) for key, r in found.items()}


@pytest.mark.parametrize("task", NEEDLES)
def test_needles_stand_as_in_the_authors_prompts(recorded, task):
    text, record = recorded[f"{task} 1500"]
    found = len(NEEDLE.findall(text))
    inside = NEEDLE.sub("", record["input"].split("afterwards.\n")[1].rsplit("\nWhat", 1)[0])
    sizes = {"noise": inside.count(shipped.NOISE), "needle": found - 1, "essay": len(inside.split())}
    size = sizes[NEEDLES[task].haystack]
    made = draw_needles(NEEDLES[task], shipped.haystack(), np.random.default_rng(0), size)
    mine = text_of(made)
    assert len(NEEDLE.findall(mine)) == found and len(made.references) == len(record["outputs"])
    assert form_of(made.prefix) == form_of(record["answer_prefix"])
    assert mine.count("\n") == text.count("\n")
    assert NEEDLE.sub(" ", form_of(mine)).split() == NEEDLE.sub(" ", form_of(text)).split()


def test_chains_stand_as_in_the_authors_prompts(recorded):
    text, record = recorded["vt 1500"]
    example, _, asked = text.rpartition("\n\nMemorize")
    assert chains.example_size(lambda text: len(pieces(text))) == example.count(shipped.NOISE)
    size = asked.count(shipped.NOISE)
    made = chains.draw_chain(np.random.default_rng(0), size, example.count(shipped.NOISE))
    lines = lambda text: Counter(form_of(text).split("\n"))  # noqa: E731
    assert lines(text_of(made)) == lines(text) and len(made.references) == len(record["outputs"])
    assert form_of(made.prefix) == form_of(record["answer_prefix"])


@pytest.mark.parametrize("length", [length for task, length in LENGTHS if task == "cwe"])
def test_lists_repeat_as_in_the_authors_prompts(recorded, length):
    text, record = recorded[f"cwe {length}"]
    words = lambda text: re.findall(r"\d+\. ([^\d\n]+)", text.rpartition("often.\n")[2])  # noqa: E731
    often = Counter(word.strip() for word in words(text))
    made = counts.draw_list(np.random.default_rng(0), len(often), length)
    mine = Counter(word.strip() for word in words(text_of(made)))
    assert Counter(mine.values()) == Counter(often.values())
    assert {w for w, n in often.items() if n == max(often.values())} == set(record["outputs"])
    alike = lambda text: re.sub(r"(\d+)\. [^\d\n]+", r"\1. w ", text).split()  # noqa: E731
    assert alike(text_of(made)) == alike(text) and made.prefix == record["answer_prefix"]


def test_coded_words_count_as_in_the_authors_prompts(recorded):
    text, record = recorded["fwe 1500"]
    tokens = 1500 - RULER["fwe"].new_tokens
    inside = lambda text: Counter(text.split("coded words. ")[1].split("\n")[0].split())  # noqa: E731
    theirs = sorted(inside(text).values())
    drawn = [counts.draw_coded(np.random.default_rng(0), size, tokens) for size in range(3, 60)]
    same = [made for made in drawn if sorted(inside(text_of(made)).values()) == theirs]
    assert same and same[0].prefix == record["answer_prefix"]
    assert [inside(text)[word] for word in record["outputs"]] == [
        inside(text_of(same[0]))[word] for word in same[0].references
    ]
    around = lambda text: re.sub(r"coded words\. .*", "", text)  # noqa: E731
    assert around(text_of(same[0])) == around(text)


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_documents_stand_as_in_the_authors_prompts(recorded, tmp_path, task):
    text, record = recorded[f"{task} 1500"]
    (tmp_path / "x.json").write_text(json.dumps(SQUAD if task == "qa_1" else HOTPOT))
    data = read_documents(task, str(tmp_path / "x.json"))
    made = draw_documents(data, 0, np.random.default_rng(0), 8)
    alike = lambda text: re.sub(r"(Document \d+:\n[^\n]+(\n[^\n]+)?\n\n)+", "D\n\n", text)  # noqa: E731
    assert alike(text_of(made)) == alike(text) and made.references == tuple(record["outputs"])
    theirs = {line for line in re.findall(r"Document \d+:\n(.+?)\n\n", text, re.DOTALL)}
    assert theirs == set(data.documents)
