"""How far long work is, on terminals, in pipes and in files."""

import io
import sys

import pytest
from rich.console import Console

from kvjax.eval.report import progress
from kvjax.eval.report.progress import Bars, tracked


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.0)


def test_into_a_pipe_lines_go_to_standard_error_and_the_table_stays_a_table(at_once, capsys):
    out = io.StringIO()
    with Bars(console=Console(file=out), transient=True) as bars:
        bar = bars.add_task("reading", total=8, news="")
        bars.update(bar, advance=3)
        bars.update(bar, description="snapkv 0.5", advance=1, news="loss 2.3")
        bars.advance(bar)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("reading: 3 of 8") and lines[1].startswith("snapkv 0.5: 4 of 8")
    assert lines[1].endswith(", loss 2.3") and lines[2].startswith("snapkv 0.5: 5 of 8")
    assert "reading" not in out.getvalue() and "snapkv" not in out.getvalue()


def test_lines_come_after_seconds_and_ever_more_rarely(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Bars(console=Console(file=io.StringIO()), transient=True) as bars:
        bar = bars.add_task("reading", total=1000)
        said = []
        for now in range(101, 500):  # noqa: B007
            bars.advance(bar)
            said += [now - 100] * len(capsys.readouterr().err.splitlines())
    assert said == [5, 15, 35, 75, 135, 195, 255, 315, 375]


@pytest.mark.parametrize(
    "console", [Console(file=io.StringIO(), force_terminal=True), None, Console(quiet=True)]
)
def test_a_terminal_has_its_bar_and_who_asks_for_nothing_gets_nothing(at_once, capsys, console):
    assert list(tracked(range(3), "reading", console=console)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    if console is not None and console.is_terminal:
        assert "reading" in console.file.getvalue()


def test_a_closed_standard_error_ends_no_work(at_once, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with Bars(console=Console(file=io.StringIO())) as bars:
        bars.advance(bars.add_task("reading", total=2))
        assert [task.completed for task in bars.tasks] == [1]
