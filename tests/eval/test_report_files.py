"""The files of a report are never half-written: the old one stays until the new one is whole."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvjax.base import atomic_files as files
from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report import page
from kvjax.eval.report.cells import summarise
from kvjax.eval.report.frontier import panels_of, write_frontier
from kvjax.eval.report.page import write_report
from tests.eval.rows import METRICS, row


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
    monkeypatch.setattr(page, "plots", full_disk)
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
