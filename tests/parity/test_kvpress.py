"""Live against kvpress on the shipped model: the sides of the study keep the same sets and answer alike."""

import json
from functools import cache

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks import recall
from kvjax.models.hf import save_hf
from scripts.studies.beside_kvpress import compared
from scripts.studies.beside_kvpress_table import SCORE_TIE
from scripts.studies.kvpress_sides import Ours, Prompt, Theirs
from scripts.studies.presses import PRESSES

pytestmark = pytest.mark.parity

# Even, so that budgets of heads and of the stack round alike, and of whole chunks, so that none is padded.
CONTEXT, QUESTION, NEW = 512, 5, 3


@cache
def prompt() -> Prompt:
    rng = np.random.default_rng(0)
    words = rng.integers(3, len(recall.WORDS), CONTEXT + QUESTION).tolist()
    return Prompt(words[:CONTEXT], words[CONTEXT:])


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    model = kvjax.load("recall-tiny", dtype="float32")
    folder = tmp_path_factory.mktemp("hf") / "model"
    save_hf(model, folder)
    # The instruction to repeat a context is in no words of this language.
    tokenizer = folder / "tokenizer.json"
    said = json.loads(tokenizer.read_text())
    said["model"]["unk_token"] = recall.WORDS[0]
    tokenizer.write_text(json.dumps(said))
    theirs = Theirs(folder)
    return theirs, Ours(model, (CONTEXT, 16), theirs.repeat_prefix())


@pytest.mark.parametrize("name", ["none", *PRESSES])
def test_both_sides_keep_the_same_tokens_and_answer_alike(sides, name):
    press = PRESSES.get(name)
    theirs, ours = (side.run(press, prompt(), 0.5, NEW) for side in sides)
    row = compared(theirs, ours, press.over if press else "head")
    # Keys of one word have one norm in the first layer, wherever it stands.
    assert row.get("score_gap", 0.0) < SCORE_TIE and sum(row.get("only", [0])) <= 4, row
    assert row["kept"][0] == row["kept"][1] and (press is None or ours.kept.mean() < 0.6)
    assert "error" not in row and "parts_at" not in row, row
