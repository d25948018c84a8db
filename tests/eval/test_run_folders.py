"""Folders of runs: what cannot serve is refused in one sentence before any work, and stays as it was."""

import errno
import json
import os

import pytest

from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.compare import compare
from kvjax.eval.run import log as logging
from kvjax.eval.run.log import RESULTS, UnitLog

SETTINGS = {"seed": 0}
UNIT = {"rows": [{"id": "a"}]}


def begin(folder, *keys):
    """Begin a run that was stopped after the units of `keys`."""
    log = UnitLog(folder, SETTINGS, resume=False)
    for key in keys:
        log.add(key, UNIT)
    log.close()
    return folder / "units.jsonl"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("out", ["", "  "])
def test_an_empty_name_is_no_folder(out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="expected a folder"):
        compare(methods=["full"], samples=1, out=out)
    assert main(["compare", "--out", out]) == 2 and "expected a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_unknown_origin_are_not_overwritten(name, resume, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds {name} but no settings.json.*choose another --out"):
        UnitLog(tmp_path, SETTINGS, resume=resume)
    assert contents(tmp_path) == {name: b"mine"}


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    log = UnitLog(tmp_path, SETTINGS, resume=False)
    for resume in (False, True):
        with pytest.raises(InputError, match="is in use by a run that is alive: wait until it ends"):
            UnitLog(tmp_path, SETTINGS, resume=resume)
    log.close()
    with pytest.raises(InputError, match="other settings"):
        UnitLog(tmp_path, {"seed": 1}, resume=True)
    UnitLog(tmp_path, SETTINGS, resume=True).close()  # a run that was refused holds nothing


def test_a_run_without_its_settings_is_not_resumed_under_others(tmp_path):
    begin(tmp_path, "one")
    (tmp_path / "settings.json").unlink()
    with pytest.raises(InputError, match="holds units.jsonl but no settings.json"):
        UnitLog(tmp_path, {"seed": 5}, resume=True)


@pytest.mark.parametrize("text", ["[]", "3", "{", "\xff"])
def test_settings_that_are_none_are_refused(text, tmp_path):
    begin(tmp_path, "one")
    (tmp_path / "settings.json").write_text(text, encoding="latin-1")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="settings.json .* choose another --out"):
        UnitLog(tmp_path, SETTINGS, resume=True)
    assert contents(tmp_path) == before


ODD_LINES = b"garbage", b"[]", b"{}", b'{"key": "b"}', b'{"key": 3, "rows": [{}]}', b'{"key": "b", "rows": 1}'


@pytest.mark.parametrize("line", [*ODD_LINES, b"\xff"])
def test_a_log_with_other_lines_is_refused_by_the_lines_number(line, tmp_path):
    units = begin(tmp_path, "one")
    units.write_bytes(units.read_bytes() + line + b"\n")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="line 2 of .*units.jsonl is no finished unit"):
        UnitLog(tmp_path, SETTINGS, resume=True)
    assert contents(tmp_path) == before


def test_a_unit_needs_the_fields_of_its_kind(tmp_path):
    begin(tmp_path, "one")
    with pytest.raises(InputError, match="line 1"):
        UnitLog(tmp_path, SETTINGS, resume=True, fields=("rows", "steps"))


def test_a_torn_last_line_is_dropped(tmp_path):
    units = begin(tmp_path, "one")
    whole = units.read_bytes()
    units.write_bytes(whole + b'{"key": "tw')
    log = UnitLog(tmp_path, SETTINGS, resume=True)
    assert list(log.done) == ["one"] and units.read_bytes() == whole
    log.close()


def test_a_disk_that_fills_up_leaves_whole_units_and_a_sentence(tmp_path, monkeypatch):
    units = begin(tmp_path, "one")
    log = UnitLog(tmp_path, SETTINGS, resume=True)
    monkeypatch.setattr(logging.os, "fsync", full_disk)
    with pytest.raises(InputError, match="No space left on device.*--resume"):
        log.add("two", UNIT)
    log.close()
    assert [json.loads(line)["key"] for line in units.read_text().splitlines()] == ["one"]
    assert list(log.done) == ["one"]


def test_a_full_disk_is_met_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.Path, "write_bytes", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        UnitLog(tmp_path / "run", SETTINGS, resume=False)
    assert not list((tmp_path / "run").iterdir())
