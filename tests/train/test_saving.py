"""Checkpoints: what comes back, what a broken one says, and a process that is killed in the middle."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io import checkpoint
from kvjax.train.run_folder import PARTS, alone, open_run
from kvjax.train.saving import Saver


def state_of(number):
    return {"a": jnp.full((3,), number, jnp.float32), "step": jnp.asarray(number, jnp.int32)}


def test_the_newest_of_two_checkpoints_comes_back_and_a_broken_one_is_named(tmp_path, monkeypatch):
    saver = Saver(tmp_path)
    for step in (1, 2, 3):
        saver.save(step, state_of(step), {"place": {"text": step}})
    saver.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    saver = Saver(tmp_path)
    found, rest = saver.load(state_of(0))
    assert found["a"].tolist() == [3, 3, 3] and int(found["step"]) == 3 and rest == {"place": {"text": 3}}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saver.manager, "save", full)
        with pytest.raises(InputError, match=r"not be written.*No space left.*checkpoint stays, of step 3"):
            saver.save(4, state_of(4), {})
    saver.close()

    def full_later():
        raise ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device [os_error_code='28']")

    saver = Saver(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(saver.manager, "wait_until_finished", full_later)
        with pytest.raises(InputError, match=r"\(No space left on device\), the last checkpoint stays"):
            saver.close()

    # Arrays that are cut short end in a ValueError; really reading such would leave threads behind.
    def cut_short(*_, **__):
        raise ValueError("NOT_FOUND: Error reading step/.zarray")

    saver = Saver(tmp_path)

    def cut_within(*_, **__):
        raise Exception("Encountered error while reading. See full TensorStore details: <bound\nmethod>")

    with monkeypatch.context() as patch:
        patch.setattr(saver.manager, "restore", cut_short)
        with pytest.raises(InputError, match=r"3 cannot be read \(NOT_FOUND.*the one before, of step 2"):
            saver.load(state_of(0))
        patch.setattr(saver.manager, "restore", cut_within)
        with pytest.raises(InputError, match=r"3 cannot be read \(Encountered error while reading\): remove"):
            saver.load(state_of(0))
        patch.setattr(saver.manager, "restore", lambda *_, **__: {"state": {}, "rest": {"place": 3}})
        with pytest.raises(InputError, match="does not say how far the texts were read"):
            saver.load(state_of(0))
        patch.setattr(saver.manager, "all_steps", lambda: [3])
        with pytest.raises(InputError, match="of which it is the only one, to start anew"):
            saver.load(state_of(0))
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "state")
    with pytest.raises(InputError, match=r"3 cannot be read .*not found.*remove that folder to go on"):
        saver.load(state_of(0))
    saver.close()


def test_a_folder_that_cannot_be_a_runs_is_refused_and_other_settings_are_named(tmp_path):
    settings = {"train": {"steps": 2, "seed": 0}, "data": {"kind": "text"}}
    open_run(tmp_path / "run", settings, resume=False)
    other = {"train": {"steps": 3, "seed": 0}, "data": {"kind": "text"}}
    with pytest.raises(InputError, match=r"other settings: train.steps is 2 \(asked: 3\)\. Give"):
        open_run(tmp_path / "run", other, resume=True)
    open_run(tmp_path / "run", settings, resume=True)
    # A setting that came later is as it was before there was one, and no other.
    later = {"train": settings["train"] | {"repeat": 1.0}}
    open_run(tmp_path / "run", settings | later, resume=True, defaults={"train": {"repeat": 1.0}})
    open_run(tmp_path / "new", settings, resume=False)
    with pytest.raises(InputError, match=r"train.repeat is 1.0 \(asked: 2.0\)"):
        later["train"]["repeat"] = 2.0
        open_run(tmp_path / "new", settings | later, resume=True, defaults={"train": {"repeat": 1.0}})
    for text, message in (("{", "is not valid JSON"), ("[]", "holds no settings")):
        (tmp_path / "run" / "run.json").write_text(text)
        with pytest.raises(InputError, match=message):
            open_run(tmp_path / "run", settings, resume=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be written .*File exists"):
        open_run(tmp_path / "file", settings, resume=False)


@pytest.mark.parametrize("name", PARTS)
def test_what_a_run_left_without_its_settings_is_kept_apart_from_a_new_one(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds {name} but no run.json, so that nothing says"):
        open_run(tmp_path, {}, resume=False)
    assert [p.name for p in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_a_run_that_is_not_there_is_not_gone_on_with(tmp_path, capsys):
    with pytest.raises(InputError, match="holds no run to go on with: leave --resume out"):
        open_run(tmp_path / "run", {}, resume=True)
    assert main(["train", "--gin", "bytes", "--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "holds no run to go on with" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_run_that_is_alive_is_not_gone_on_with(tmp_path):
    open_run(tmp_path / "run", {"train": {}}, resume=False)
    with alone(tmp_path / "run", resume=True):
        for _ in range(2):
            with (
                pytest.raises(InputError, match="in use by a run that is alive"),
                alone(tmp_path / "run", True),
            ):
                pass
    with (
        pytest.raises(InputError, match=r"could not be written \(No space left.*go on with --resume"),
        alone(tmp_path / "run", resume=True),
    ):
        raise OSError(28, "No space left on device")
    with alone(tmp_path / "run", resume=True):
        pass


def test_what_a_refused_write_leaves_to_threads_is_not_printed(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with checkpoint.quiet_orbax():
        pass
    for text in ("Event loop is closed", "another"):
        said = SimpleNamespace(exc_value=RuntimeError(text), object=None)
        sys.unraisablehook(said)
    assert [str(one.exc_value) for one in told] == ["another"]


def test_a_model_that_a_full_disk_refuses_leaves_nothing_and_the_old_one_stays(tmp_path, monkeypatch):
    model = kvjax.load("recall-tiny")
    quick = contextlib.nullcontext(SimpleNamespace(save=lambda *_: None))
    monkeypatch.setattr(checkpoint.ocp, "StandardCheckpointer", lambda: quick)
    for error in (
        OSError(28, "No space left on device"),
        Exception("No space left on device (os error 28)"),
        ValueError("Failed writing [os_error_code='28']"),
    ):

        def full(*_, error=error):
            raise error

        monkeypatch.setattr(checkpoint, "write_text", full)
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / checkpoint.MARKER).write_text("the old one")
        with pytest.raises(InputError, match=r"could not be written to .*No space left on device"):
            checkpoint.save_checkpoint(model, tmp_path / "model", overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        assert (tmp_path / "model" / checkpoint.MARKER).read_text() == "the old one"
    monkeypatch.setattr(checkpoint, "write_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save_checkpoint(model, tmp_path / "model", overwrite=True)


@pytest.mark.rotating
def test_a_killed_process_loses_no_more_than_what_was_not_saved(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {i} of a text about {i * i}\n" for i in range(400)))
    settings = ["train.steps=60", "train.batch=2", "train.length=32", "train.log_every=1", "model.layers=1"]
    settings += ["train.save_seconds=0.3", "model.d_model=16", "model.heads=2", "model.kv_heads=1"]
    settings += ["data.kind=text", f"data.files=['{text}']", "data.held_out=0.0"]

    def start(out, *more):
        words = ["-m", "kvjax", "train", "--gin", "bytes", "--out", str(out), "--set", *settings, *more]
        return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait(120) == 0
    killed, cut = start(tmp_path / "cut"), tmp_path / "cut" / "checkpoints"
    until = time.monotonic() + 120
    while not (cut.exists() and any(p.name.isdigit() for p in cut.iterdir())):
        assert time.monotonic() < until and killed.poll() is None
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(30)
    assert not (tmp_path / "cut" / "model").exists()
    assert start(tmp_path / "cut", "--resume").wait(120) == 0
    logs = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert len(logs[0]) == 60 and logs[0] == logs[1]
    whole, resumed = (kvjax.load(str(tmp_path / name / "model")).params for name in ("whole", "cut"))
    assert np.array_equal(whole["embed"], resumed["embed"])
