"""Two processes as one program: the answers of one, by what each holds, and what is said when one is gone."""

import json
import os
import re
import signal
import time

import numpy as np
import pytest

import kvjax
from kvjax.models.hf import save_hf
from kvjax.train.loop import train
from kvjax.train.settings import training
from tests.hosts.children import METHODS, PROMPTS, conversation
from tests.hosts.processes import ROOT, Processes, well

pytestmark = pytest.mark.slow
CHILD = "tests.hosts.children"


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Run two processes on a checkpoint in several files, and return the folder of what they made."""
    folder = tmp_path_factory.mktemp("hosts")
    save_hf(kvjax.load("recall-tiny"), folder / "model", shard_bytes=500_000)
    assert len(list((folder / "model").glob("*.safetensors"))) > 4
    well(Processes(folder, ["-m", CHILD, "load_and_answer", str(folder)]))
    return folder


def test_each_process_reads_the_bytes_that_it_holds(answered):
    model = kvjax.load("recall-tiny")
    total = kvjax.nbytes(model.params)
    said = [json.loads((answered / f"said{i}.json").read_text()) for i in range(2)]
    for one in said:
        assert one["fingerprint"] == model.fingerprint
        # On every device are norms, and what makes two KV heads. A piece is read once, whoever holds it.
        assert one["read"] == one["held"] and total / 2 <= one["held"] <= 0.55 * total


@pytest.mark.parametrize("number", range(len(METHODS)))
def test_prompts_steps_and_saved_caches_are_those_of_one_process(answered, number):
    want = conversation(kvjax.load("recall-tiny"), METHODS[number])
    for i in range(2):
        got = np.load(answered / f"{number}-{i}.npz")
        assert {*got} == {*want}
        for name in want:
            np.testing.assert_allclose(got[name], want[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("number", range(len(METHODS)))
def test_a_cache_of_two_processes_is_read_by_one(answered, number):
    model = kvjax.load("recall-tiny")
    head = kvjax.load_cache(answered / f"cache{number}" / "a.cache")
    assert len(list((answered / f"cache{number}").iterdir())) == 3
    logits, _ = kvjax.step(model, head, [1, 2, 3, 4])
    np.testing.assert_allclose(logits, np.load(answered / f"{number}-0.npz")["again"], atol=1e-4)


def test_what_is_written_is_what_one_process_writes(answered):
    want = kvjax.generate(kvjax.load("recall-tiny"), PROMPTS, max_new_tokens=5).tokens
    for i in range(2):
        np.testing.assert_array_equal(np.load(answered / f"written-{i}.npz")["tokens"], want)


def test_the_script_of_the_page_is_run_on_every_host(tmp_path):
    page = (ROOT / "docs" / "scaling.md").read_text()
    [block] = re.findall(r"```python on every host\n(.*?)```", page, re.DOTALL)
    (tmp_path / "script.py").write_text(block)
    ran = well(Processes(tmp_path, [str(tmp_path / "script.py")]))
    logits, _ = kvjax.prefill(kvjax.load("recall-tiny"), [[1, 2, 3, 4], [5, 6]])
    shown = str(np.asarray(logits)).split()[1][:4]
    assert shown in ran.out(0) and shown in ran.out(1)


# --- commands ------------------------------------------------------------------------------------------


def test_generate_prints_on_the_first_process_alone(tmp_path):
    words = ["-m", "kvjax", "generate", "--tokens", "1,2,3,4", "--max-new-tokens", "3"]
    words += ["--mesh", "model=4,seq=2", "--rules", "tensor+sequence"]
    ran, model = well(Processes(tmp_path, words, flags=True)), kvjax.load("recall-tiny")
    out = kvjax.generate(model, [[1, 2, 3, 4]], max_new_tokens=3)
    assert ran.out(0).split() == [model.tokenizer.id_to_token(int(i)) for i in out.tokens[0]]
    assert "wrote" in ran.err(0) and ran.out(1) == "" and "wrote" not in ran.err(1)


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    drop = ("seconds",)
    return sorted(json.dumps({k: v for k, v in row.items() if k not in drop}, sort_keys=True) for row in rows)


def test_a_comparison_is_split_and_goes_on_after_a_process_was_killed(tmp_path):
    words = ["--methods", "snapkv", "adakv", "int8", "--budgets", "0.5", "--tasks", "get", "--samples", "4"]
    words += ["--length", "128", "--protocol", "agnostic", "aware"]
    command = ["-m", "kvjax", "compare", *words, "--out", str(tmp_path / "two")]
    first = Processes(tmp_path / "first", command)
    first.until(lambda: any(p.stat().st_size for p in (tmp_path / "two").glob("units-*-1.jsonl")))
    first.running[1].kill()
    began = time.monotonic()
    assert first.codes(60)[0] == 3 and time.monotonic() - began < 60
    assert "process 1 of 2 has ended without a word" in first.err(0) and "--resume" in first.err(0)
    second = well(Processes(tmp_path / "second", [*command, "--resume"]))
    assert "wrote" in second.out(0) and second.out(1) == ""
    assert [p.name for p in (tmp_path / "two").glob("units*")] == ["units.jsonl"]
    kvjax.compare(
        methods=["snapkv", "adakv", "int8"], budgets=[0.5], tasks=["get"], samples=4, length=128,
        protocols=("agnostic", "aware"), out=tmp_path / "one",
    )  # fmt: skip
    assert rows_of(tmp_path / "two") == rows_of(tmp_path / "one")


def test_a_comparison_of_a_model_on_both_is_made_together(tmp_path):
    words = ["--methods", "snapkv", "--budgets", "0.5", "--tasks", "get", "--samples", "4", "--length", "128"]
    words = ["-m", "kvjax", "compare", *words, "--protocol", "agnostic", "--mesh", "data=4,model=2"]
    ran = well(Processes(tmp_path / "ran", [*words, "--out", str(tmp_path / "two")]))
    assert "wrote" in ran.out(0) and ran.out(1) == ""
    kvjax.compare(
        methods=["snapkv"], budgets=[0.5], tasks=["get"], samples=4, length=128, protocols=("agnostic",),
        out=tmp_path / "one",
    )  # fmt: skip
    assert rows_of(tmp_path / "two") == rows_of(tmp_path / "one")


# --- training ------------------------------------------------------------------------------------------


def settings(folder, mesh=None, rules=None):
    model = dict(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab=264, tied=False)
    loop = dict(steps=7, batch=8, length=24, compute="float32", log_every=1, save_seconds=0)
    loop |= dict(evaluate_every=7, evaluate_rows=3)
    data = dict(kind="text", files=[str(f) for f in sorted(folder.glob("*.txt"))], held_out=0.2)
    bound = {"model": model, "data": data, "train": loop, "tune": {}}
    return training(bound | {"optimiser": {"warmup": 1}, "devices": dict(mesh=mesh, rules=rules)})


def test_training_goes_on_on_another_mesh_to_the_losses_of_one_device(tmp_path):
    for at in range(0, 400, 20):
        text = "".join(f"line {i} of a text about {i * i}\n" for i in range(at, at + 20))
        (tmp_path / f"{at}.txt").write_text(text)
    words = ["-m", CHILD, "train", str(tmp_path)]
    well(Processes(tmp_path / "first", [*words, "data=8", "fsdp", "5"]))
    assert not (tmp_path / "run" / "model").exists()
    well(Processes(tmp_path / "second", [*words, "data=4,model=2", "tensor", "99"]))
    train(settings(tmp_path), tmp_path / "one")
    two, one = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("run", "one")
    )
    assert [r["step"] for r in two] == [*range(1, 8)]
    for name in ("loss", "norm"):
        np.testing.assert_allclose([r[name] for r in two], [r[name] for r in one], rtol=2e-4)
    np.testing.assert_allclose(two[-1]["held_out_loss"], one[-1]["held_out_loss"], rtol=2e-4)
    mine, theirs = (kvjax.load(tmp_path / name / "model") for name in ("run", "one"))
    np.testing.assert_allclose(mine([[1, 2, 3]]), theirs([[1, 2, 3]]), atol=1e-4)


# --- when one is gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["step_without_end", "wait_without_end"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_process_ends_the_other_with_a_clear_error(tmp_path, who, doing):
    ran = Processes(tmp_path, ["-m", CHILD, doing, str(tmp_path)])
    ran.until(lambda: all((tmp_path / f"steps{i}").exists() for i in range(2)))
    began = time.monotonic()
    os.kill(ran.running[who].pid, signal.SIGKILL)
    codes = ran.codes(60)
    assert time.monotonic() - began < 60 and codes[who] == -signal.SIGKILL and codes[1 - who] != 0
    assert f"kvjax: error: process {who} of 2 has ended without a word" in ran.err(1 - who)


def test_a_host_that_never_joins_is_named_by_the_address(tmp_path):
    words = ["-m", "kvjax", "generate", "--tokens", "1,2", "--wait", "5"]
    ran = Processes(tmp_path, words, flags=True)
    ran.running[1].kill()
    assert ran.codes(60)[0] == 2
    assert "not all of 2 processes met at 127.0.0.1:" in ran.err(0) and "within 5 seconds" in ran.err(0)
    assert ran.err(0).count("\n") == 1


def test_what_is_wrong_on_both_is_said_by_both_without_waiting(tmp_path):
    began = time.monotonic()
    words = ["-m", "kvjax", "generate", "--tokens", "1,220", "--mesh", "model=8"]
    ran = Processes(tmp_path, words, flags=True)
    assert ran.codes(60) == [2, 2] and time.monotonic() - began < 60
    assert all("token id 220 is outside the vocabulary" in ran.err(i) for i in range(2))
