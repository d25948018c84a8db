"""The table, the plot and the page against what a reader must find there; files are never half-written."""

import io
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import scipy.stats
from matplotlib.axes import Axes
from rich.console import Console

from kvjax import files
from kvjax.eval.report import frontier, page
from kvjax.eval.report.cells import Cell, summarise
from kvjax.eval.report.comparison_table import print_table
from kvjax.eval.report.duels import duels_of
from kvjax.eval.report.frontier import byte_axis, frontier_png, panels_of, write_frontier
from kvjax.eval.report.page import write_report
from kvjax.files import write_atomic
from tests.eval.rows import FULL_BYTES, QUALITY, TASKS, comparison, row, scored

# Table


def printed(cells: list[Cell], width: int, timings: dict[tuple[str, Any], dict[str, float]]) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_table(cells, timings, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_holds_every_method_budget_and_task_in_any_width(width: int) -> None:
    cells = summarise(comparison())
    text = printed(cells, width, {})
    assert "…" not in text
    first_column = "".join(line[:12].strip() for line in text.splitlines())
    for method in QUALITY:
        assert first_column.count(method) >= 2, method
    for block in text.split("aware:"):
        for budget in ("0.5", "0.25", "0.125"):
            assert len(re.findall(rf" {re.escape(budget)} ", block)) == 4
        heading = "".join(block.split("──")[0].split())
        for task in TASKS:
            assert task in heading or (task == "multikey" and "multi" in heading and "key" in heading)


def test_the_table_prints_measured_bytes_intervals_recovery_and_speed() -> None:
    rows = [
        *scored([1.0] * 10, kept_bytes=FULL_BYTES, full_bytes=FULL_BYTES, read_bytes=FULL_BYTES),
        *scored(
            [1.0] * 8 + [0.0] * 2,
            method="snapkv",
            budget=64,
            kept_bytes=FULL_BYTES // 8,
            full_bytes=FULL_BYTES,
            read_bytes=FULL_BYTES // 8,
        ),
    ]
    timings = {("snapkv", 64): {"prefill_ms": 41.3, "decode_tokens_per_s": 1234.0}}
    wide, slim = printed(summarise(rows), 100, timings), printed(summarise(rows), 60, timings)
    low, high = scipy.stats.binomtest(8, 10).proportion_ci(0.95, method="wilson")
    (line,) = [line for line in wide.splitlines() if line.startswith("snapkv")]
    ends = f"{100 * low:.0f}–{100 * high:.0f}"
    # Two of ten lost and none won is no proof, so there is no star.
    versus = ["-20", "80", "80", "get"]
    assert line.split() == ["snapkv", "64", "128", "12.5", "80", ends, "80", ends, *versus, "41", "1200"]
    (full,) = [line for line in wide.splitlines() if line.startswith("full")]
    assert full.split()[-2:] == ["–", "–"]
    assert "Wilson for 0/1 scores" in wide and "bootstrap" not in wide and "10 samples" in wide
    (line,) = [line for line in slim.splitlines() if line.startswith("snapkv")]
    assert line.split()[:7] == ["snapkv", "64", "128", "12.5", "80", "80", ends]


def test_a_table_that_leaves_columns_out_says_so() -> None:
    cells = summarise(comparison())
    slim, complete = (" ".join(printed(cells, width, {}).split()) for width in (80, 140))
    assert (
        "No room here for: intervals of tasks, bytes read, worst task, speed." in slim and "tok/s" not in slim
    )
    assert "No room" not in complete and "tok/s" in complete


def test_bytes_read_are_a_column_only_where_a_method_reads_less_than_it_keeps() -> None:
    rows = comparison()
    assert "read" in printed(summarise(rows), 140, {}).split("──")[0]
    keep_only = summarise([r for r in rows if r["method"] != "quest"])
    assert "read" not in printed(keep_only, 140, {}).split("──")[0]


def test_output_that_is_not_a_terminal_gets_the_table_in_its_natural_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(summarise(comparison()), {})
    out = capsys.readouterr().out
    assert out == printed(summarise(comparison()), 10_000, {}) and "No room" not in out
    assert 140 < max(map(len, out.splitlines())) < 250


def test_intervals_have_ends_and_few_samples_have_none() -> None:
    rows = [*scored([1.0] * 4), *scored([1.0] * 3 + [0.0], method="snapkv", budget=0.5)]
    for width in (60, 100, 200):
        few = " ".join(printed(summarise(rows), width, {}).split())
        assert "n=4" in few and "n too small for an interval" in few and "–100" not in few and "±" not in few
    many = printed(summarise(comparison()), 80, {})
    assert "±" not in many and "n=" not in many and "88–100" in many


def test_differences_to_the_full_cache_are_a_column_with_their_interval_and_p() -> None:
    rows = [*scored([1.0] * 10), *scored([1.0] * 4 + [0.0] * 6, method="snapkv", budget=0.5)]
    full, snapkv = summarise(rows)
    wide, slim = (printed([full, snapkv], width, {}) for width in (200, 80))
    ends = f"{100 * snapkv.versus.low:+.0f}..{100 * snapkv.versus.high:+.0f}"
    assert f"-60 {ends}  {2 / 2**6:.1g}" in re.sub(" +", " ", wide).replace(f"{ends} ", f"{ends}  ")
    assert "-60*" in slim and "p < 0.05 (McNemar's exact test of 0/1 scores)" in " ".join(slim.split())


def test_speeds_have_no_more_digits_than_timings_agree_on() -> None:
    several = {"decode_tokens_per_s_low": 10296.0, "decode_tokens_per_s_high": 13985.0}
    one = {"decode_tokens_per_s": 12345.0}
    cells = summarise(scored([1.0] * 9))
    for timing, expected in (
        (one, "12000"),
        ({**one, **several, "decode_tokens_per_s_timings": 2}, "12000"),
        ({**one, **several, "decode_tokens_per_s_timings": 3}, "12300 10300–14000"),
    ):
        (line,) = [x for x in printed(cells, 200, {("full", None): timing}).splitlines() if "full" in x[:5]]
        assert line.endswith(f" {expected}")


# Plot


def pixels(png: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(png), format="png")


def test_the_frontier_is_a_png_with_one_panel_per_protocol(tmp_path: Path) -> None:
    cells = summarise(comparison())
    write_frontier(tmp_path / "frontier.png", panels_of(cells))
    data = (tmp_path / "frontier.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    one = pixels(frontier_png(panels_of([cell for cell in cells if cell.protocol == "aware"])))
    two = pixels(data)
    assert two.shape[0] == one.shape[0] and two.shape[1] > 1.7 * one.shape[1]
    assert two[..., :3].std() > 0.02


def test_the_frontier_is_drawn_over_measured_bytes_and_hollow_over_bytes_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[tuple[list[float], list[float]]] = []
    plot: Callable[..., Any] = Axes.plot

    def spy(axis: Axes, x: list[float], y: list[float], **style: Any) -> Any:
        drawn.append((x, y))
        return plot(axis, x, y, **style)

    monkeypatch.setattr(Axes, "plot", spy)
    rows = [
        *scored([1, 1]),
        *scored([1, 0], method="adakv", budget=0.25, kept_bytes=28, read_bytes=28),
        *scored([1, 1], method="adakv", budget=0.5, kept_bytes=53, read_bytes=53),
        *scored([1, 1], method="quest", budget=0.25, kept_bytes=106, read_bytes=31),
    ]
    frontier_png(panels_of(summarise(rows)))
    assert drawn == [([28.0, 53.0], [50.0, 100.0]), ([106.0], [100.0]), ([31.0], [100.0])]


def test_the_dark_frontier_has_a_dark_ground() -> None:
    cells = summarise(comparison())
    light, dark = (pixels(frontier_png(panels_of(cells), dark=flag))[0, 0, :3] for flag in (False, True))
    assert light.min() > 0.95 and dark.max() < 0.2


def test_anchors_and_contenders_are_told_apart_without_their_lines() -> None:
    names = ["random", "sink-recent", "snapkv", "h2o", "kivi"]
    cells = summarise([r for name in names for r in scored([1, 1], method=name, budget=0.25)])
    (panel,) = panels_of(cells)
    styles = frontier.styles_of(panel.points, frontier._LIGHT)
    assert len({style["marker"] for style in styles.values()}) == len(names)


@pytest.mark.parametrize(
    "percents", [[25.4], [12.5, 12.9], [25.0, 106.0], [50.0, 25.0, 12.5], [0.8, 100.0], [20.0, 25.4, 50.8]]
)
def test_the_byte_axis_has_ticks_that_show_its_scale(percents: list[float]) -> None:
    (low, high), ticks = byte_axis(percents)
    assert low < min(percents) and max(percents) < high and high >= 1.9 * low
    assert len(ticks) >= 3 and low <= ticks[0] and ticks[-1] <= high and ticks == sorted(ticks)


def test_the_picture_says_samples_and_command_and_the_axis_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(frontier.SubFigure, "text", lambda self, x, y, text, **_: said.append(text))
    label: Callable[..., Any] = Axes.set_xlabel
    monkeypatch.setattr(
        Axes, "set_xlabel", lambda self, text, **k: (said.append(text), label(self, text, **k))
    )
    cells = summarise(comparison())
    caption = page.caption_of({**METRICS, "command": "kvjax compare", "settings": {"length": 512}}, cells)
    frontier_png(panels_of(cells), caption=caption)
    text = " ".join(said)
    assert "12 samples per task (get, chase" in text and "kvjax compare" in text and "512 tokens" in text
    assert "log scale" in text


def test_a_point_of_few_samples_has_no_bar() -> None:
    few, many = (panels_of(summarise(scored([1.0] * n)))[0].points[0] for n in (4, 5))
    assert few.ends is None and many.ends is not None


# Page


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


METRICS = {
    "schema": 1,
    "model": "recall-tiny",
    "device": "cpu",
    "dtype": "float32",
    "git_revision": "3f2a9c1",
    "seeds": [0, 1, 2],
    "presets": {"length": 512, "snapkv": {"window": 16, "kernel": 5}},
    "compiled_programs": 14,
    "wall_seconds": 183.2,
    "versions": {"jax": "0.10.2"},
}


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
    rows = [attributes for tag, attributes in page.elements if tag == "tr" and "data-protocol" in attributes]
    assert len(rows) == len(cells) and "1200" in page.text
    columns = sum(tag == "th" for tag, _ in page.elements)
    assert sum(tag == "td" for tag, _ in page.elements) == columns * len(cells)
    values = [a["value"] for tag, a in page.elements if tag == "input" and a.get("name") == "protocol"]
    assert values == ["agnostic", "aware", ""]


def test_the_page_needs_no_network() -> None:
    text = page.report_html(METRICS, summarise(comparison()), [example()])
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest", text)
    for tag, attributes in Page(text).elements:
        assert tag not in ("link", "iframe", "object", "embed")
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    policy = [a["content"] for tag, a in Page(text).elements if "http-equiv" in a]
    assert policy and "default-src 'none'" in str(policy[0])


HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)>\"&\\u003c<!--"


def test_markup_in_tokens_answers_and_names_stays_text() -> None:
    rows = [row(), row(method=HOSTILE, task=HOSTILE, protocol=HOSTILE)]
    metrics = {**METRICS, "model": HOSTILE, "device": HOSTILE, "presets": {HOSTILE: HOSTILE}}
    shown = example(tokens=["a", HOSTILE, "b"], answer=HOSTILE, prediction=HOSTILE, method=HOSTILE)
    text = page.report_html(metrics, summarise(rows), [shown])
    parsed = Page(text)
    assert [tag for tag, _ in parsed.elements].count("script") == 3
    assert [tag for tag, _ in parsed.elements].count("img") == 1
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


def test_the_page_holds_every_method_against_every_other_at_each_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page, "frontier_png", lambda *_, **__: b"")
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


def test_the_page_shows_ends_differences_samples_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "frontier_png", lambda *_, **__: b"")
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


# Files


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    target = tmp_path / "report.html"
    write_atomic(target, b"old")
    monkeypatch.setattr(files.os, step, full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(target, METRICS, summarise([row()]), [])
    with pytest.raises(OSError, match="no space"):
        write_frontier(tmp_path / "frontier.png", panels_of(summarise([row()])))
    assert os.listdir(tmp_path) == ["report.html"] and target.read_bytes() == b"old"


def test_a_page_that_cannot_be_drawn_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    write_atomic(target, b"old")
    monkeypatch.setattr(page, "frontier_png", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(target, METRICS, summarise([row()]), [])
    assert os.listdir(tmp_path) == ["report.html"] and target.read_bytes() == b"old"


def test_the_file_appears_under_its_name_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    replace = os.replace

    def spy(source: Path, target: Path) -> None:
        assert target.read_bytes() == b"old"
        seen.append(source.read_bytes())
        replace(source, target)

    write_atomic(tmp_path / "a", b"old")
    monkeypatch.setattr(files.os, "replace", spy)
    write_atomic(tmp_path / "a", b"new")
    assert seen == [b"new"] and (tmp_path / "a").read_bytes() == b"new"
