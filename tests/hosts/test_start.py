"""How processes are told where they meet, and what each does of a run: without starting any."""

import json

import jax
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.run import log as logs
from kvjax.eval.run.cellplan import PlannedCell, share_of
from kvjax.eval.run.log import UnitLog
from kvjax.grammar import Method
from kvjax.hosts import messages
from kvjax.hosts.start import rendezvous_of
from tests.hosts.processes import free_port

NAMES = ("KVJAX_HOSTS", "KVJAX_PROCESSES", "KVJAX_PROCESS")


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_the_environment_says_what_is_not_given(monkeypatch):
    for name, value in zip(NAMES, ("10.0.0.1:1234", "4", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert rendezvous_of(None, None, None) == ("10.0.0.1:1234", 4, 3)
    assert rendezvous_of("[::1]:99", None, 0) == ("[::1]:99", 4, 0)


def test_without_anything_jax_finds_the_others():
    assert rendezvous_of(None, None, None) == rendezvous_of("auto", None, None) == (None, None, None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("10.0.0.1", 2, 0), "10.0.0.1:1234"),
        (("10.0.0.1:0", 2, 0), "10.0.0.1:1234"),
        (("10.0.0.1:65536", 2, 0), "10.0.0.1:1234"),
        (("10.0.0.1:1", None, 0), "processes=None"),
        (("10.0.0.1:1", 2, None), "process=None"),
        (("10.0.0.1:1", 2, 2), "process is 2, expected at most 1"),
        (("auto", 2, None), "leave them out"),
        ((None, None, 1), "leave them out"),
    ],
)
def test_a_wrong_meeting_is_refused(given, says):
    with pytest.raises(InputError, match=says.replace(".", r"\.")):
        rendezvous_of(*given)


def test_a_wrong_number_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("KVJAX_PROCESS", "first")
    with pytest.raises(InputError, match=r"\$KVJAX_PROCESS is 'first'"):
        rendezvous_of("10.0.0.1:1", 2, None)


def test_an_address_that_cannot_be_one_is_refused_at_once():
    with pytest.raises(InputError, match="cannot meet at nowhere.invalid:1234"):
        kvjax.start_hosts("nowhere.invalid:1234", 2, 1)


def test_hosts_start_before_jax_looks_for_devices():
    jax.devices()
    with pytest.raises(InputError, match="call kvjax.start_hosts first of all"):
        kvjax.start_hosts(f"127.0.0.1:{free_port()}", 1, 0)


def test_commands_refuse_half_of_what_hosts_need(capsys):
    assert main(["generate", "--tokens", "1", "--process", "1"]) == 2
    assert "add --hosts" in capsys.readouterr().err
    assert main(["generate", "--tokens", "1", "--rules", "tensor"]) == 2
    assert "add --mesh" in capsys.readouterr().err


def test_every_cell_is_run_by_one_host():
    cells = [PlannedCell(label, b, Method()) for label in "abcde" for b in (0.5, 0.25)]
    shares = [share_of(cells, i, 3) for i in range(3)]
    assert sorted(sum(shares, [])) == sorted(cells)
    assert [{e.label for e in share} for share in shares] == [{"a", "d"}, {"b", "e"}, {"c"}]


def test_a_log_takes_over_what_another_host_left(tmp_path, monkeypatch):
    unit = {"rows": [{"score": 1.0}]}
    with monkeypatch.context() as patch:
        patch.setattr(logs, "is_first", lambda: False)
        patch.setattr(logs, "number_of", lambda: 1)
        theirs = UnitLog(tmp_path, {"seed": 3}, resume=False)
        theirs.add("a/0", unit)
        theirs.close()
    assert theirs.path.name.endswith("-1.jsonl")
    (tmp_path / "units-00000000-1.jsonl").write_text(json.dumps({"key": "of another run"} | unit) + "\n")
    mine = UnitLog(tmp_path, {"seed": 3}, resume=True)
    assert {*mine.done} == {"a/0"}
    mine.join()
    mine.close()
    assert not theirs.path.exists()
    again = UnitLog(tmp_path, {"seed": 3}, resume=True)
    again.close()
    assert {*again.done} == {"a/0"}


def test_values_that_must_agree_are_named(monkeypatch):
    monkeypatch.setattr(messages, "gathered", lambda value: [value, "other"])
    with pytest.raises(InputError, match="models differ between hosts: process 0 has mine, process 1 has"):
        messages.check_same("models", "mine")
