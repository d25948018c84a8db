"""The metrics of RULER and LongBench, each against another way to compute it."""

import re
import string
from functools import cache

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.eval.tasks import metrics

WORDS = "the a an cat dog, sat on. mat Red blue 7".split()


def texts(seed: int, count: int, longest: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(0, longest))) for _ in range(count)]


PAIRS = list(zip(texts(0, 60, 9), texts(1, 60, 9), strict=True))


@pytest.mark.parametrize(("said", "right"), PAIRS)
def test_token_f1_matches_words_one_by_one(said, right):
    def bag(text):
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return [w for w in kept.split() if w not in ("a", "an", "the")]

    left, same = bag(right), 0
    for word in bag(said):
        if word in left:
            left.remove(word)
            same += 1
    total = len(bag(said)) + len(bag(right))
    assert metrics.token_f1(said, right) == pytest.approx(2 * same / total if same else 0.0)


def test_articles_go_only_as_whole_words():
    assert metrics.normalise_answer("The theatre, an anthem; a\tA.") == "theatre anthem"


def recursive_subsequence(x: tuple[str, ...], y: tuple[str, ...]) -> tuple[str, ...]:
    """Find a longest common subsequence from the end; of two equally long ones, the one with less of y."""

    @cache
    def best(i: int, j: int) -> tuple[str, ...]:
        if not i or not j:
            return ()
        if x[i - 1] == y[j - 1]:
            return (*best(i - 1, j - 1), x[i - 1])
        return best(i - 1, j) if len(best(i - 1, j)) > len(best(i, j - 1)) else best(i, j - 1)

    return best(len(x), len(y))


@pytest.mark.parametrize(("said", "right"), PAIRS)
def test_rouge_l_is_the_union_of_sentence_subsequences(said, right):
    def sentences(text):
        return [tuple(re.sub(r"\s+", " ", part).strip().split(" ")) for part in text.split(".") if part]

    x, y = sentences(right), sentences(said)
    if not x or not y:
        assert metrics.rouge_l(said, right) == 0.0
        return
    union = {word for r in x for s in y for word in recursive_subsequence(r, s)}
    p, r = len(union) / len(set().union(*y)), len(union) / len(set().union(*x))
    assert metrics.rouge_l(said, right) == pytest.approx(2 * p * r / (p + r + 1e-8))


def test_rouge_l_on_hand_counted_sentences():
    # The shared words are w1 w2 from the first sentence and w1 w3 w5 from the second: 4 of 5, and 4 of 8.
    said = "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5."
    assert metrics.rouge_l(said, "w1 w2 w3 w4 w5") == pytest.approx(2 * 0.5 * 0.8 / 1.3, abs=1e-6)
    assert metrics.rouge_l("", "a") == metrics.rouge_l("a", "") == 0.0


def indel_distance(x: str, y: str) -> int:
    """Count insertions and deletions between two strings, by rows of a dynamic programme."""
    row = list(range(len(y) + 1))
    for i, a in enumerate(x, 1):
        new = [i]
        for j, b in enumerate(y, 1):
            new.append(row[j - 1] if a == b else 1 + min(row[j], new[j - 1]))
        row = new
    return row[-1]


@pytest.mark.parametrize(("said", "right"), [p for p in PAIRS if p[0] + p[1]])
def test_edit_similarity_is_the_share_that_needs_no_edit(said, right):
    total = len(said) + len(right)
    exact = 1 - indel_distance(said, right) / total
    # Whole percents, as fuzzywuzzy gives them.
    assert metrics.edit_similarity(said, right) == pytest.approx(exact, abs=0.005 + 1e-9)
    percents = 100 * metrics.edit_similarity(said, right)
    assert percents == pytest.approx(round(percents), abs=1e-9)


def test_code_is_the_first_line_without_marks():
    said = "\n\n```python\n# comment\n// more\nreturn x + 1\nreturn y"
    assert metrics.code_similarity(said, "return x + 1") == 1.0
    assert metrics.code_similarity("# only", "x") == 0.0


def test_classes_that_are_part_of_the_right_ones_name_do_not_count():
    classes = ["time", "Date of time", "food"]
    assert metrics.classification("Date of time", "Date of time", classes) == 1.0
    assert metrics.classification("food at a Date of time", "Date of time", classes) == 0.5
    assert metrics.classification("nothing", "food", classes) == 0.0
    assert metrics.classification("food", "time", classes) == 0.0


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [("5", "5", 1.0), ("15 or 5", "5", 0.5), ("Paragraph 3", "Paragraph 12", 0.0), ("段落7", "段落7", 1.0)],
)
def test_right_numbers_are_counted_whole(said, right, expected):
    assert metrics.right_numbers(said, right) == expected
    assert metrics.right_numbers("none", right) == 0.0


def test_string_matches_look_for_parts_in_any_case():
    assert metrics.string_match_all("The Values: 17, abc", ["17", "ABC", "x"]) == pytest.approx(2 / 3)
    assert metrics.string_match_part("The Values", ["none", "VALUE"]) == 1.0
    assert metrics.string_match_part("The Values", ["none"]) == 0.0
    assert metrics.string_match_all("anything", []) == 0.0


def test_chinese_is_scored_by_its_words(monkeypatch):
    monkeypatch.setattr(metrics, "_segment", lambda text: re.findall(r"天气|真好|.", text))
    assert metrics.token_f1_chinese("天气真好！", "今天天气好") == pytest.approx(2 / (2 + 4))
    assert metrics.rouge_l_chinese("天气真好", "天气真好") == pytest.approx(1.0)


def test_a_missing_word_splitter_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    with pytest.raises(InputError, match=r"kvjax\[eval\]"):
        metrics.rouge_l_chinese("天气", "天气")
