"""The plot of quality against bytes: panels, points, ticks and what it says of its run."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

from kvjax.eval.report import frontier, page
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.frontier import byte_axis, frontier_png, panels_of, write_frontier
from kvjax.eval.report.text_table import LOST
from tests.eval.rows import METRICS, comparison, scored


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
    # The Pareto front is the first: 53% of the bytes score as much as all of them.
    front = [28.0, 53.0], [50.0, 100.0]
    assert drawn == [front, front, ([106.0], [100.0]), ([31.0], [100.0])]


@pytest.mark.filterwarnings("error:Glyph")
def test_a_script_that_the_font_lacks_is_no_warning() -> None:
    frontier_png(panels_of(summarise(scored([1, 1], method="模型", budget=0.25))))


@pytest.mark.rotating
def test_the_dark_frontier_has_a_dark_ground() -> None:
    cells = summarise(comparison())
    light, dark = (pixels(frontier_png(panels_of(cells), dark=flag))[0, 0, :3] for flag in (False, True))
    assert light.min() > 0.95 and dark.max() < 0.2


def test_anchors_and_contenders_are_told_apart_without_their_lines() -> None:
    names = ["random", "sink-recent", "snapkv", "h2o", "kivi"]
    cells = summarise([r for name in names for r in scored([1, 1], method=name, budget=0.25)])
    (panel,) = panels_of(cells)
    styles = frontier.styles_of(panel.points, frontier.LIGHT)
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


def test_of_very_many_methods_those_that_lead_have_colours_and_a_name() -> None:
    points = [frontier.Point(f"m{i}", 10.0 + i, 50.0, False, 40.0 - (i % 3), None, False) for i in range(40)]
    points += [
        frontier.Point("random", 5.0, 5.0, False, 1.0, None, False),
        frontier.Point("best", 60.0, 60.0, False, 90.0, None, False),
    ]
    lead = frontier.leading([frontier.Panel("", "", points)])
    assert lead == {"random", "m0", "best"}
    styles = frontier.styles_of(points, frontier.LIGHT, lead)
    grey = {method for method, style in styles.items() if style["color"] == frontier.LIGHT["grid"]}
    assert grey == {p.method for p in points} - lead
    # Of few, all have colours.
    few = frontier.styles_of(points[:6], frontier.LIGHT, set())
    assert frontier.LIGHT["grid"] not in {style["color"] for style in few.values()}


def test_of_a_text_those_lead_that_lose_least() -> None:
    places = {"a": (20.0, 0.5), "b": (50.0, 0.1), "c": (50.0, 0.9)}
    points = [frontier.Point(m, kept, kept, False, lost, None, False) for m, (kept, lost) in places.items()]
    assert frontier.leading([frontier.Panel("text", "", points)], LOST) == {"a", "b"}
