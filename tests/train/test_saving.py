"""Checkpoints: what comes back, what a broken one says, and a process that is killed in the middle."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.errors import InputError
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
        with pytest.raises(InputError, match="could not be written.*No space left.*the one of step 3 stays"):
            saver.save(4, state_of(4), {})
    saver.close()
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "state" / "d")
    with pytest.raises(InputError, match="3 cannot be read.*remove that folder to go on from the one before"):
        Saver(tmp_path).load(state_of(0))


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
