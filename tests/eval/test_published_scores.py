"""Scores of written answers are those of the benchmarks' own code, recorded at named commits."""

import json
from itertools import groupby
from pathlib import Path

import pytest

from kvjax.eval.tasks.published import (
    babilong,
    boxed,
    infinitebench,
    kvpress,
    longbench_v2,
    longproc,
    scbench,
)
from kvjax.eval.tasks.published.graphwalks import node_f1
from kvjax.eval.tasks.published.mrcr import similarity
from kvjax.eval.tasks.published.tables import TableRow
from tests.eval.published_cases import CASES

RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures/authors/scores.json").read_text(encoding="utf-8")
)
GROUPS = {key: [*lines] for key, lines in groupby(RECORDED, lambda line: f"{line[0]} {line[1]}")}


def kvpress_score(task, answer, text):
    row = TableRow("row 1", {"answer": answer if len(answer) > 1 else answer[0]}, Path("x.jsonl"))
    return kvpress._family(row, task)(row, task)[1](text)


SCORERS = {
    "infinitebench": lambda task, answer, text: infinitebench.SCORES[task](text, [*map(str, answer)]),
    "scbench": lambda task, answer, text: scbench.SCORES[task](text, [*map(str, answer)]),
    "loogle": kvpress_score,
    "longbench-v2": lambda _, answer, text: longbench_v2.chosen(text) == answer[0],
    "babilong": lambda task, answer, text: babilong.is_right(text, *answer, task),
    "longproc": lambda task, answer, text: longproc.SCORES[task](text, *answer),
    "kvpress": kvpress_score,
    "boxed": lambda _, answer, text: boxed.same_answer(text, answer[0]),
}


def test_every_case_is_recorded():
    assert [tuple(line[:4]) for line in RECORDED] == [(*case[:2], [*case[2]], case[3]) for case in CASES]


@pytest.mark.parametrize("group", GROUPS)
def test_scores_are_those_of_the_authors(group):
    for family, task, answer, text, score in GROUPS[group]:
        assert SCORERS[family](task, answer, text) == pytest.approx(score, abs=2e-6), (answer, text)


@pytest.mark.parametrize(
    ("said", "right", "score"),
    [
        ("Final Answer: [ab, cd]", ["ab", "cd"], 1.0),
        ("Thinking.\nFinal Answer: ['ab', 'xx']\n", ["ab", "cd"], 0.5),
        ("Final Answer: [ab]", ["ab", "cd", "ef"], 0.5),
        ("Final Answer: [ab, cd]\nDone.", ["ab", "cd"], 0.0),
        ("Final Answer: []", [], 1.0),
        ("Final Answer: [xx]", ["ab"], 0.0),
        ("[ab, cd]", ["ab", "cd"], 0.0),
        ("Final Answer: []", ["ab"], 0.0),
    ],
)
def test_nodes_count_in_the_last_line_alone(said, right, score):
    assert node_f1(said, frozenset(right)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("said", "ratio"),
    # 2 * matching characters / all characters, without the prefix, worked out by hand.
    [
        ("Kqabcd", 1.0),
        ("Kqabxd", 2 * 3 / 8),
        ("abcd", 0.0),
        (" Kqabcd", 0.0),
        ("Kq", 0.0),
        ("Kqab", 2 * 2 / 6),
    ],
)
def test_conversations_need_their_prefix_and_are_compared_without_it(said, ratio):
    assert similarity(said, "Kqabcd", "Kq") == pytest.approx(ratio)
