"""The page against what a reader must find there; nothing on it is fetched, or read as markup."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvjax.eval.report import page
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.duels import duels_of
from kvjax.eval.report.page import write_report
from kvjax.eval.report.scores_section import Picture
from tests.eval.rows import METRICS, QUALITY, comparison, row, scored


class Page(HTMLParser):
    """Elements with their attributes, and the text of scripts, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)
        else:
            self.text += data

    def inside(self, id: str) -> list[tuple[str, dict[str, str | None]]]:
        """Return the elements from the table with this id to the next section."""
        start = next(i for i, (_, found) in enumerate(self.elements) if found.get("id") == id)
        ends = (i for i, (tag, _) in enumerate(self.elements) if i > start and tag == "section")
        return self.elements[start : next(ends, None)]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return json.loads(self.scripts[0])


def example(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "method": "snapkv",
        "budget": 0.25,
        "protocol": "agnostic",
        "task": "get",
        "tokens": ["<set>", "amber", "12"],
        "kept": [0.0, 0.333, 1.0],
        "needed": [False, True, True],
        "answer": "12",
        "prediction": "13",
        "score": 0.0,
    }
    return {**plain, **changes}


def test_the_page_shows_the_run_every_cell_and_its_speed(tmp_path: Path) -> None:
    cells = summarise(comparison())
    timings = {("snapkv", 0.25): {"prefill_ms": 41.0, "decode_tokens_per_s": 1234.0}}
    write_report(tmp_path / "report.html", METRICS, cells, [example()], timings=timings)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    for fact in (
        "recall-tiny",
        "cpu",
        "float32",
        "3f2a9c1",
        "0, 1, 2",
        "14",
        "183 s",
        "snapkv.window",
        "0.10.2",
    ):
        assert fact in page.text, fact
    table = page.inside("cells")
    rows = [attributes for tag, attributes in table if tag == "tr" and "data-protocol" in attributes]
    assert len(rows) == len(cells) and "1200" in page.text
    columns = sum(tag == "th" for tag, _ in table)
    assert sum(tag == "td" for tag, _ in table) == columns * len(cells)
    values = [a["value"] for tag, a in page.elements if tag == "input" and a.get("name") == "protocol"]
    assert values == ["agnostic", "aware", ""]


@pytest.mark.parametrize("name", ["quest", "<quest>"])
def test_methods_larger_than_the_full_cache_are_named(name: str) -> None:
    cells = summarise(
        [row(), row(method=name, budget=0.5, kept_bytes=106), row(method="kivi", kept_bytes=19)]
    )
    assert f"Larger than the full cache: {name} at 0.5." in Page(page.report_html({}, cells, [])).text
    assert "Larger than" not in page.report_html({}, [c for c in cells if c.method != name], [])


def test_the_page_needs_no_network() -> None:
    picture = Picture("snapkv · 0.5", 0.5, 0.25, b"png")
    text = page.report_html(METRICS, summarise(comparison()), [example()], pictures=[picture])
    assert f"data:image/png;base64,{base64.b64encode(b'png').decode()}" in text
    # A reader may follow a link to a paper; nothing is loaded from there.
    papers = r'<a href="https://arxiv\.org/abs/\d{4}\.\d{5}" rel="noreferrer">'
    assert re.search(papers, text)
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest", re.sub(papers, "", text))
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "iframe", "object", "embed", "use", "image")
        for name in ("src", "srcset", "href", "xlink:href"):
            inside = ("data:", "#", "https://arxiv.org/abs/") if tag == "a" else ("data:",)
            assert (attributes.get(name) or "data:").startswith(inside)
    policy = [a["content"] for tag, a in Page(text).elements if "http-equiv" in a]
    assert policy and "default-src 'none'" in str(policy[0])


HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)>\"&\\u003c<!--"


def test_markup_in_tokens_answers_and_names_stays_text() -> None:
    rows = [row(), row(method=HOSTILE, task=HOSTILE, protocol=HOSTILE)]
    rows = [{**one, "depth": 0.5, "context_tokens": 9, "nll": 0.5} for one in rows]
    metrics = {**METRICS, "model": HOSTILE, "device": HOSTILE, "presets": {HOSTILE: HOSTILE}}
    said = {"method": HOSTILE, "budget": None, "prediction": HOSTILE, "score": 1.0}
    piece = {"text": HOSTILE, "needed": True}
    asked = dict.fromkeys(("task", "protocol", "question", "answer"), HOSTILE)
    metrics |= {"examples": [{**asked, "prompt": [piece], "said": [said]}]}
    shown = example(tokens=["a", HOSTILE, "b"], answer=HOSTILE, prediction=HOSTILE, method=HOSTILE)
    text = page.report_html(metrics, summarise(rows), [shown], duels=duels_of(rows), rows=rows)
    parsed = Page(text)
    assert [tag for tag, _ in parsed.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in parsed.elements]
    assert not any(name.startswith("on") for _, found in parsed.elements for name in found)
    assert "<script>alert" not in text and "<img src=x" not in text
    (prompt,) = parsed.prompts
    assert prompt["tokens"][1] == prompt["answer"] == prompt["runs"][0]["prediction"] == HOSTILE


def test_half_a_surrogate_pair_in_a_token_survives(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", METRICS, [], [example(tokens=["a", "\ud83d", "é"])])
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).prompts[0]["tokens"] == [
        "a",
        "\ud83d",
        "é",
    ]


def test_examples_of_one_prompt_are_shown_together() -> None:
    examples = [
        example(),
        example(method="h2o", budget=64),
        example(method="int8", budget=None),
        example(tokens=["x", " y", " z"]),
        example(protocol="aware"),
    ]
    prompts = Page(page.report_html(METRICS, [], examples)).prompts
    assert [prompt["title"] for prompt in prompts] == [
        "agnostic · get · 1",
        "agnostic · get · 2",
        "aware · get",
    ]
    assert [run["name"] for run in prompts[0]["runs"]] == ["snapkv · 0.25", "h2o · 64 slots", "int8"]
    assert prompts[0]["runs"][0]["kept"] == [0, 33, 100] and prompts[0]["needed"] == [0, 1, 1]
    assert [prompt["joiner"] for prompt in prompts] == [" ", "", " "]


def test_the_page_holds_every_method_against_every_other_at_each_budget() -> None:
    rows = comparison()
    text = page.report_html(METRICS, summarise(rows), [], duels=duels_of(rows))
    matrices = json.loads([x for x in Page(text).scripts if x.strip()][1])
    assert [one["title"] for one in matrices][:2] == ["agnostic · budget 0.5", "agnostic · budget 0.25"]
    one, cells = matrices[0], {(c.method, c.budget): c for c in summarise(rows) if c.protocol == "agnostic"}
    assert len(one["found"]) == len(QUALITY) * (len(QUALITY) - 1) / 2
    i, j, mean, low, high, p, samples = one["found"][0]
    versus = cells[one["names"][j], 0.5].versus
    assert (i, j, samples) == (0, 1, 60) and mean == pytest.approx(-versus.mean, rel=1e-3)
    assert low <= mean <= high and p == pytest.approx(versus.p, rel=1e-3)
    assert 'id="duel"' in text and 'id="duel"' not in page.report_html(METRICS, summarise(rows), [])


def test_the_page_shows_ends_differences_samples_and_the_command() -> None:
    rows = [*scored([1.0] * 4), *scored([1.0] * 2 + [0.0] * 2, method="snapkv", budget=0.5)]
    few = Page(page.report_html({**METRICS, "command": "kvjax compare --seed 3"}, summarise(rows), [])).text
    assert "n too small" in few and "kvjax compare --seed 3" in few and "4 samples per task" in few
    cells = summarise(comparison())
    versus = next(c.versus for c in cells if c.method == "snapkv")
    many = Page(page.report_html(METRICS, cells, [])).text
    assert f"{100 * versus.low:+.0f} to {100 * versus.high:+.0f}" in many and "n too small" not in many


def test_an_example_needs_a_share_for_every_token() -> None:
    with pytest.raises(ValueError, match=r"3 tokens, 2 kept, 3 needed \(snapkv, get"):
        page.report_html(METRICS, [], [example(kept=[0.0, 1.0])])
