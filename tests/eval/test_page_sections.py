"""The page's sections: what was asked, best of each budget, plots, needle map, cards, and the CSV of all."""

import csv
import io
import json
import re
from html import unescape
from typing import Any

import pytest

from kvjax.eval.report.about_section import about_section
from kvjax.eval.report.best_section import best_of, best_section
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.export import cell_records
from kvjax.eval.report.frontier import LIGHT, SCORES, Panel, Point, panels_of, pareto
from kvjax.eval.report.method_cards import anchor_of, cards_section, family_filter
from kvjax.eval.report.needles import ALL, needle_maps, needles_section
from kvjax.eval.report.page import report_html
from kvjax.eval.report.plots_section import colours_of, looks_of, plots, task_plots
from tests.eval.rows import METRICS, QUALITY, TASKS, comparison, row, scored


def fed(rows: list[dict[str, Any]], nll: float = 0.25) -> list[dict[str, Any]]:
    return [{**one, "nll": nll} for one in rows]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return fed(comparison())


def test_the_page_begins_with_the_model_the_tasks_and_the_protocol(rows: list[dict[str, Any]]) -> None:
    said = {"method": "full", "budget": None, "prediction": "12 < 13", "score": 1.0}
    beaten = {"method": "snapkv", "budget": 0.25, "prediction": "", "score": 0.0}
    prompt = [
        {"text": "once", "needed": False},
        {"left_out": 812},
        {"text": "12 < 13", "needed": True},
    ]
    example = {"task": "get", "protocol": "aware", "prompt": prompt, "question": "what?", "answer": "12 < 13"}
    metrics = {
        **METRICS,
        "parameters": 134_515_008,
        "settings": {"length": 1024, "gold": True},
        "examples": [{**example, "said": [said, beaten]}],
    }
    text = report_html(metrics, summarise(rows), [], rows=rows)
    about = text[text.index('id="about"') : text.index("</section>")]
    for words in ("recall-tiny", "135 million", "5 tasks", "12 samples", "1024 tokens", "5 methods", "fed"):
        assert words in about, words
    for task in TASKS:
        assert f"<b>{task}</b>" in about
    assert "the question comes after compression" in about and "its tokens stay" in about
    assert "… 812 tokens …" in about and '<span class="needed">12 &lt; 13</span>' in about
    assert about.count("<details open>") == 1 and '</span>\n<b class="question">what?' in about
    assert "full cache" in about and "snapkv at 0.25" in about and "nothing" in about
    assert "gold" not in about_section(METRICS, summarise(rows)) and "fed" not in about_section(METRICS, [])


def test_best_of_a_budget_are_those_that_samples_do_not_tell_apart() -> None:
    given = {"a": [1.0] * 20, "b": [1.0] * 18 + [0.0] * 2, "c": [1.0] * 8 + [0.0] * 12}
    rows = [r for m, scores in given.items() for r in scored(scores, method=m, budget=0.5, kept_bytes=50)]
    rows += [*scored([1.0] * 20), *scored([0.0] * 20, method="kivi", kept_bytes=19)]
    half, none = best_of(summarise(rows), rows)
    # b lost 2 of 20 (p = 0.5 by McNemar's exact test), c lost 12 (p < 0.001).
    assert [cell.method for cell in half.cells] == ["a", "b"] and not half.few and half.of == 3
    assert (none.budget, [cell.method for cell in none.cells]) == (None, ["kivi"])
    html = best_section(summarise(rows), rows)
    assert "50.0%" in html and "19.0%" in html and ">c<" not in html and "Too few" not in html
    few = [r for m in ("a", "b") for r in scored([1.0] * 3, method=m, budget=64)]
    assert "Too few samples" in best_section(summarise(few), few)
    assert best_section(summarise(few), []) == ""


def test_of_equal_scores_fewer_bytes_are_best() -> None:
    rows = [
        r
        for m, kept in (("a", 60), ("b", 50))
        for r in scored([1.0] * 9, method=m, budget=0.5, kept_bytes=kept)
    ]
    (best,) = best_of(summarise(rows), rows)
    assert [cell.method for cell in best.cells] == ["b", "a"]


def test_the_pareto_front_is_drawn_through_the_points_that_none_beats() -> None:
    at = {"a": (25.0, 40.0), "b": (50.0, 30.0), "c": (50.0, 70.0), "d": (80.0, 70.0), "e": (90.0, 80.0)}
    points = [Point(m, kept, kept, False, value, None, False) for m, (kept, value) in at.items()]
    assert [p.method for p in pareto(points)] == ["a", "c", "e"]
    assert [p.method for p in pareto(points, higher=False)] == ["a", "b"]
    (line,) = re.findall(r'class="pareto" points="([^"]*)"', plots([Panel("aware", "", points)], SCORES, "x"))
    xs, ys = zip(*(map(float, pair.split(",")) for pair in line.split()), strict=True)
    assert len(xs) == 3 and list(xs) == sorted(xs) and list(ys) == sorted(ys, reverse=True)


def test_a_method_has_one_colour_on_every_plot_and_in_the_table(rows: list[dict[str, Any]]) -> None:
    cells = summarise(rows)
    looks = looks_of(panels_of(cells), SCORES)
    assert {look.number for look in looks.values()} == set(range(len(QUALITY)))
    text = report_html(METRICS, cells, [], rows=rows)
    for number, colour in re.findall(r'<g class="series" data-method="(\d+)"[^>]*--c:var\(--m(\d+)\)', text):
        assert number == colour
    assert text.count(f'data-method="{looks["kivi"].number}"') == 2 + 2 * 2 * len(TASKS) + 1
    assert re.search(rf'--m{looks["kivi"].number}\)"></i><a href="#card-kivi">kivi', text)
    sheet = colours_of(panels_of(cells), SCORES)
    light, dark = sheet.split("@media(prefers-color-scheme:dark)")
    names = [looks[m].number for m in ("snapkv", "expected-attention", "kivi", "quest")]
    for one in (light, dark):
        assert len({re.search(rf"--m{n}:(#\w+);", one)[1] for n in names}) == len(names)  # type: ignore[index]


def test_a_dozen_methods_have_a_dozen_colours() -> None:
    points = [Point(f"m{i}", 10.0 + i, 50.0, False, 50.0, None, False) for i in range(12)]
    sheet = colours_of([Panel("", "", points)], SCORES)
    assert len(set(re.findall(r":(#\w+);", sheet))) == 24


def test_every_task_and_protocol_has_a_plot_of_scores_and_of_nll(rows: list[dict[str, Any]]) -> None:
    cells = summarise(rows)
    looks = looks_of(panels_of(cells), SCORES)
    titles = re.findall(r'class="title"[^>]*>([^<]*)<', task_plots(cells, looks))
    assert titles == 2 * [f"{task} · {protocol}" for protocol in ("agnostic", "aware") for task in TASKS]
    plain = summarise(comparison())
    assert len(re.findall(r'class="title"', task_plots(plain, looks))) == 2 * len(TASKS)
    assert (
        task_plots(summarise(scored([1.0] * 5)), looks_of(panels_of(summarise(scored([1.0]))), SCORES)) == ""
    )
    one = next(c for c in cells if c.method == "kivi")
    assert f"kivi: {100 * one.tasks['get'].mean:.3g} (" in task_plots(cells, looks)
    assert "kivi: 0.25 at 19% of the bytes" in task_plots(cells, looks)


def test_a_table_with_nll_has_its_column(rows: list[dict[str, Any]]) -> None:
    assert 'data-sort="0.25">0.250</td>' in report_html(METRICS, summarise(rows), [])
    assert "−log p" not in report_html(METRICS, summarise(comparison()), [])


def test_families_of_the_compared_methods_can_be_hidden() -> None:
    text = family_filter(["full", "snapkv + kivi", "mine.py:best"])
    assert re.findall(r'value="([^"]*)" checked', text) == [
        "baseline",
        "selection-static",
        "quant-mixed",
        "your-own",
    ]
    assert family_filter(["snapkv", "snapkv:window=8"]) == ""


def test_every_name_links_to_a_card_with_its_paper(rows: list[dict[str, Any]]) -> None:
    text = report_html(METRICS, summarise(rows), [], rows=rows)
    ids = re.findall(r'id="([^"]*)"', text)
    links = re.findall(r'href="#([^"]*)"', text)
    assert set(links) == {anchor_of(method) for method in QUALITY} <= set(ids)
    assert len(ids) == len(set(ids))
    card = cards_section(["snapkv:window=8 + kivi"])
    for words in (
        "SnapKV: LLM Knows",
        "2404.14469",
        "2402.02750",
        "selection static",
        "the paper's equations",
    ):
        assert words in unescape(card), words
    assert "your own" in cards_section(["mine.py:<best>"]) and "<best>" not in cards_section(
        ["mine.py:<best>"]
    )


def test_the_button_holds_every_figure_of_every_cell(rows: list[dict[str, Any]]) -> None:
    cells = summarise(rows)
    (data,) = re.findall(r'data-csv="([^"]*)"', report_html(METRICS, cells, []))
    read = list(csv.DictReader(io.StringIO(unescape(data))))
    assert len(read) == len(cells)
    for found, record in zip(read, cell_records(cells, {}), strict=True):
        assert {k: "" if v is None else str(v) for k, v in record.items()} == {k: found[k] for k in record}


def test_needles_are_binned_by_depth_and_length() -> None:
    asked = [(0.0, 1000, 1.0), (0.1, 1020, 0.0), (0.95, 1000, 1.0), (0.5, 2040, 0.5)]
    rows = [
        {**row(id=str(i), method="snapkv", budget=0.5, score=score), "depth": depth, "context_tokens": tokens}
        for i, (depth, tokens, score) in enumerate(asked)
    ]
    rows += [row(id="x", method="snapkv", budget=0.5), {**rows[0], "id": "y", "depth": None}]
    (found,) = needle_maps(rows)
    assert found["title"] == "agnostic · get"
    assert [(one["length"], one["cells"]) for one in found["rows"]] == [
        ("1000–1020", [[0.5, 2], None, None, None, [1.0, 1]]),
        ("2040", [None, None, [0.5, 1], None, None]),
    ]
    two = needle_maps([*rows, {**rows[0], "task": "copy", "score": 0.0}])
    assert [one["title"] for one in two] == [f"agnostic · {ALL}", "agnostic · get", "agnostic · copy"]
    assert two[0]["rows"][0]["cells"][0] == [pytest.approx(1 / 3, abs=1e-4), 3]
    (data,) = re.findall(r'data-maps="([^"]*)"', needles_section(rows))
    assert json.loads(unescape(data)) == [found] and needles_section([row()]) == ""


def test_of_very_many_methods_those_that_are_beaten_are_grey_and_not_in_the_legend() -> None:
    many = {f"m{i}": (10.0 + i, 40.0 - i) for i in range(30)} | {"best": (60.0, 90.0)}
    points = [Point(m, kept, kept, False, value, None, False) for m, (kept, value) in many.items()]
    text = plots([Panel("aware", "", points)], SCORES, "the mean")
    assert text.count('class="series plain"') == 29 and "grey: 29 others" in text
    assert re.findall(r'<a href="#card-([^"]*)"', text) == ["m0", "best"]
    grey = looks_of([Panel("aware", "", points)], SCORES)["m1"].number
    assert f"--m{grey}:{LIGHT['muted']};" in colours_of([Panel("aware", "", points)], SCORES)
