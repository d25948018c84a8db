"""`kvjax uptrain`: a converted model learns on from texts and a teacher, and what does not fit is refused."""

import json
import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax.commands import train as command
from kvjax.commands.main import main
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer

CONFIG = Config(vocab=257, d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24)
SMALL = ("train.steps=2", "train.batch=2", "train.length=16", "train.log_every=1", "data.held_out=0.0")


@pytest.fixture
def model(tmp_path):
    made = Model(
        CONFIG, init(CONFIG, jax.random.key(0)), tokenizer=byte_tokenizer(), special_tokens={"eos_token": END}
    )
    save_checkpoint(made, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("a text about nothing at all. " * 40)
    return ("data.kind=text", f"data.files=['{tmp_path / 'a.txt'}']")


@pytest.mark.rotating
def test_a_converted_model_learns_from_the_original_alone_and_comes_nearer_to_it(model, text, tmp_path):
    made, out = str(tmp_path / "mqa"), tmp_path / "up"
    file = text[1].split("'")[1]
    assert main(["convert", "--to", "mqa", model, made, "--text", file, "--rows", "2", "--length", "64"]) == 0
    words = ["uptrain", made, "--teacher", model, "--out", str(out), "--set", *SMALL, *text]
    words += ["train.distil=1.0", "train.distil_hidden=1.0", "train.distil_attention=1.0", "train.steps=20"]
    assert main(words) == 0
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    # Nothing but the distance from the teacher is in the loss, and it falls.
    assert len(losses) == 20 and 0 < np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert kvjax.load(str(out / "model")).config.kv_heads == 1
    assert main(words) == 2 and main([*words, "--resume"]) == 0


def test_the_command_names_model_teacher_and_the_models_own_tokenizer(model, monkeypatch):
    found = {}
    monkeypatch.setattr(command, "follow", lambda bound, args: found.update(bound))
    assert main(["uptrain", model, "--teacher", "runs/t", "--gin", "bytes-mla", "--out", "x"]) == 0
    assert found["model"] | {"start": model, "teacher": "runs/t"} == found["model"]
    assert found["data"]["tokenizer"] == model
    assert main(["uptrain", model, "--out", "x", "--set", "data.tokenizer=bytes"]) == 0
    assert found["data"]["tokenizer"] == "bytes"
    assert main(["uptrain", "recall-tiny", "--gin", "recall-tiny", "--out", "x"]) == 0
    assert "tokenizer" not in found["data"]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("{model}x", [], "does not exist, expected a model directory"),
        ("{model}/params", [], "is no model directory, expected a config.json"),
        ("recal-tiny", [], "did you mean the shipped model recall-tiny"),
        ("{model}", ["train.distil=0.5"], "train.distil is given and no teacher to learn from"),
        ("{model}", ["model.teacher=recall-tiny"], "the teacher recall-tiny is no decoder of 257 ids"),
        ("recall-tiny", ["data.tokenizer=bytes"], "is 'bytes', and recall-tiny has another tokenizer"),
        ("recall-tiny", [], "the tokenizer of recall-tiny cannot read the texts .* data.kind='recall'"),
        ("{model}", ["data.kind=recall", "data.files=[]"], "is 'recall', and .* has another tokenizer"),
        ("recall-tiny", ["data.files={late}"], "the tokenizer of recall-tiny cannot read the texts"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_is_written(name, more, message, model, text, tmp_path, capsys):
    out, late = tmp_path / "out", tmp_path / "late.txt"
    # The tokenizer can read the first 5000 words.
    late.write_text("otter " * 5000 + "and what it cannot read")
    more = [one.format(late=late) for one in more]
    words = ["uptrain", name.format(model=model), "--out", str(out), "--set", *SMALL, *text, *more]
    assert main(words) == 2 and not out.exists()
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
