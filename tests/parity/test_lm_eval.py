"""Live against lm-evaluation-harness' own `hf` backend: likelihoods, greedy flags, texts, and its command."""

import json
import logging
from functools import partial

import datasets
import jax
import lm_eval.tasks
import lm_eval.utils
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.harness.model import KvjaxLM
from tests.models import hf_reference

# The harness imports packages that warn on Python 3.11.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
POSITIONS = 96
TEXT = (
    "The river rose in the night, and the old bridge was closed. Question: when did the river rise? "
    "Answer: in the night. A brave otter swam across; nobody saw it but the miller's daughter. "
)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a checkpoint whose tokenizer opens every text with a token."""
    where = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(where / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (where / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": TEMPLATE}))
    hf_reference.build(CONFIG, where, seed=3).save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def theirs(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # With its cache of logits, a request scores the wrong tokens of a longer one that begins with it.
    options = dict(device="cpu", dtype="float32", batch_size=2, logits_cache=False)
    return HFLM(str(folder), tokenizer=tokenizer, **options)


@pytest.fixture(scope="module")
def model(folder):
    return kvjax.load(folder)


def asked(kind, *arguments):
    return [Instance(kind, {}, one, i, ("tiny", i, 1)) for i, one in enumerate(arguments)]


PAIRS = asked(
    "loglikelihood",
    (TEXT[:60], " the bridge"),
    (TEXT[:60], " in"),
    (TEXT[:31], " was closed. Question: when did the river rise?"),
    ("", "The river rose"),
    ("The river rose ", "in the night"),
    ("<s>The river", " rose"),
    (TEXT * 2, " otter"),
)
TEXTS = asked("loglikelihood_rolling", (TEXT[:90],), (TEXT * 2,), ("A",))
PROMPTS = asked(
    "generate_until",
    (TEXT[:60], {"until": ["."], "max_gen_toks": 12}),
    (TEXT[:20], {"until": ["e"], "max_gen_toks": 12}),
    (TEXT[20:90], {"max_gen_toks": 16, "do_sample": False}),
    (TEXT * 2, {"until": [], "max_gen_toks": 16}),
    (TEXT[:40], {"max_gen_toks": 8, "repetition_penalty": 1.3}),
)


def likeliest(lm):
    """Return a context and the token that the model itself says after it, which is read as it is written."""
    ids = lm.tok_encode(TEXT)[:POSITIONS]
    best = np.asarray(lm.model([ids]))[0].argmax(-1).tolist()
    for at in range(4, len(ids)):
        context, end = lm.texts.decode(ids[:at]), lm.texts.decode([best[at - 1]])
        if (
            lm.tok_encode(context + end)
            == [*ids[:at], best[at - 1]]
            == [*lm.tok_encode(context), best[at - 1]]
        ):
            return context, end
    raise AssertionError("the model says nothing that its tokenizer reads back")


def test_likelihoods_and_greedy_flags_are_those_of_hf(model, theirs):
    ours = KvjaxLM(model, batch_size=3)
    pairs = [*PAIRS, *asked("loglikelihood", likeliest(ours))]
    found, want = (lm.loglikelihood(pairs, disable_tqdm=True) for lm in (ours, theirs))
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in want], rtol=0, atol=1e-3)
    assert [flag for _, flag in found] == [flag for _, flag in want]
    assert found[-1][1] and not found[0][1]
    assert ours.bytes.kept == ours.bytes.full > 0 and ours.bytes.requests == len(pairs)


def test_rolling_likelihoods_are_those_of_hf_beyond_the_positions(model, theirs):
    ours = KvjaxLM(model, batch_size=2)
    assert len(ours.tok_encode(TEXT * 2)) > POSITIONS
    found, want = (lm.loglikelihood_rolling(TEXTS, disable_tqdm=True) for lm in (ours, theirs))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-3)


def test_written_texts_are_those_of_hf(model, theirs):
    found, want = (
        lm.generate_until(PROMPTS, disable_tqdm=True) for lm in (KvjaxLM(model, batch_size=2), theirs)
    )
    assert found == want and len(set(found)) > 2
    assert "e" not in found[1] and "." not in found[0]


def test_chat_prompts_are_those_of_hf(model, theirs):
    ours, turns = (
        KvjaxLM(model),
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Answer: "}],
    )
    for answer, messages in ((True, turns[:1]), (False, turns)):
        assert ours.apply_chat_template(messages, answer) == theirs.apply_chat_template(messages, answer)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    with pytest.raises(InputError, match="the chat template 'mine' was asked for"):
        ours.chat_template("mine")


METHODS = ("snapkv(budget=0.5, window=2)", "h2o(budget=0.5)")
UNEVEN = asked(
    "loglikelihood", *((TEXT[:n], TEXT[n : n + m]) for n, m in ((60, 30), (90, 4), (40, 50), (75, 20)))
)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_scores_and_writes_what_its_rows_do_alone(model, method):
    many, alone, full = (KvjaxLM(model, m, batch_size=b) for m, b in ((method, 4), (method, 1), (None, 4)))
    found, want, whole = (lm.loglikelihood(UNEVEN, disable_tqdm=True) for lm in (many, alone, full))
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in want], rtol=0, atol=1e-4)
    assert [flag for _, flag in found] == [flag for _, flag in want]
    assert np.abs(np.subtract([x for x, _ in found], [x for x, _ in whole])).min() > 1e-2
    prompts = PROMPTS[:3]
    assert many.generate_until(prompts, disable_tqdm=True) == alone.generate_until(prompts, disable_tqdm=True)
    assert many.bytes.kept < many.bytes.full and alone.bytes.requests == len(UNEVEN) + len(prompts)


def by_hand(model, method, before, after, end):
    """Sum log p of `end`, from a prefill of the tokens before the question and single steps."""
    logits, cache = kvjax.prefill(model, [before], method=method, room=len(after) + len(end))
    found = []
    for token in [*after, *end]:
        found.append(float(jax.nn.log_softmax(logits[0])[token]))
        logits, cache = kvjax.step(model, cache, np.array([token], np.int32))
    return sum(found[len(after) :])


BEFORE, AFTER, END = "The river rose in the night. ", " when did the river rise? Answer:", " in the night"
MARKERS = {"kept": ("Question:", False, BEFORE + "Question:" + AFTER), "dropped": ("|", True, BEFORE + AFTER)}


@pytest.mark.parametrize(("marker", "drop", "plain"), MARKERS.values(), ids=MARKERS)
def test_what_stands_before_a_marker_is_compressed(model, marker, drop, plain):
    lm = KvjaxLM(model, METHODS[0], marker=marker, drop_marker=drop)
    said = BEFORE + marker + AFTER
    ids, whole, cut = lm.tok_encode(plain), lm.tok_encode(plain + END), lm.texts.prompt(said).context
    assert len(lm.texts.decode(ids[:cut])) <= len(BEFORE) < len(lm.texts.decode(ids[: cut + 1]))
    [(found, _)] = lm.loglikelihood(asked("loglikelihood", (said, END)), disable_tqdm=True)
    want = by_hand(model, METHODS[0], ids[:cut], ids[cut:], whole[len(ids) :])
    assert found == pytest.approx(want, abs=1e-4)
    # The full cache's text does not depend on where the context ends.
    wrote = [
        KvjaxLM(model, marker=m, drop_marker=drop).generate_until(
            asked("generate_until", (text, {"max_gen_toks": 8})), True
        )
        for m, text in ((marker, said), (None, plain))
    ]
    assert wrote[0] == wrote[1]


def test_a_text_that_is_all_scored_is_compressed_again_after_each_chunk(model):
    lm = KvjaxLM(model, METHODS[0], chunk=8)
    [found] = lm.loglikelihood_rolling(TEXTS[:1], disable_tqdm=True)
    ids = [lm.prefix_token_id, *lm.tok_encode(TEXTS[0].args[0])]
    want = kvjax.likelihood(model, [ids], method=METHODS[0], chunk=8)
    assert found == pytest.approx(float(np.nansum(want.logprobs)), abs=1e-4)
    [full] = KvjaxLM(model).loglikelihood_rolling(TEXTS[:1], disable_tqdm=True)
    assert abs(found - full) > 1e-2


def test_requests_that_are_too_long_are_noted_once(model, caplog):
    with caplog.at_level(logging.WARNING, "lm_eval.kvjax"):
        long = asked("loglikelihood", (TEXT * 2, " otter"), (TEXT * 2, " swam"), ("A", " brave"))
        KvjaxLM(model, batch_size=1).loglikelihood(long, disable_tqdm=True)
    said = "2 of 3 requests are longer than 96 tokens and lose their first ones"
    assert [record.getMessage() for record in caplog.records] == [said]


# --- the command -------------------------------------------------------------------------------------------

YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
output_type: {kind}
{more}
metric_list: [{{metric: {metric}}}]
"""
KINDS = {
    "tiny_choice": ("multiple_choice", "label", 'doc_to_choice: "{{choices}}"', "acc"),
    "tiny_text": ("loglikelihood_rolling", '"{{question}}"', "", "bits_per_byte"),
    "tiny_write": (
        "generate_until",
        '"{{answer}}"',
        "generation_kwargs: {until: ['.'], max_gen_toks: 8}",
        "exact_match",
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Task files with their data beside them."""
    where = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": TEXT[:n],
            "choices": [" in the night", " a brave otter", " the bridge"],
            "label": n % 3,
            "answer": "x",
        }
        for n in (30, 41, 52, 66)
    ]
    (where / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, target, more, metric) in KINDS.items():
        text = YAML.format(
            name=name, data=where / "data.jsonl", kind=kind, target=target, more=more, metric=metric
        )
        (where / f"{name}.yaml").write_text(text)
    return where


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """Without a network, and without the thousands of task files of the harness, which take half a minute."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(lm_eval.utils, "_LOGGING_CONFIGURED", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def results(out):
    [file] = (file for file in out.rglob("results_*.json"))
    return json.loads(file.read_text())


def test_the_command_writes_the_results_of_hf(folder, theirs, tasks, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["lm-eval", "--model", str(folder), "--tasks", *KINDS, "--include_path", str(tasks)]
    assert main([*words, "--limit", "3", "--batch_size", "2", "--output_path", str(out)]) == 0
    shown, found = capsys.readouterr().out, results(out)
    want = simple_evaluate(
        theirs, tasks=list(KINDS), limit=3, bootstrap_iters=0,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks)),
    )  # fmt: skip
    for name, (*_, metric) in KINDS.items():
        key = f"{metric},none"
        assert found["results"][name][key] == pytest.approx(want["results"][name][key], abs=1e-5), name
        assert f"|{name}" in shown.replace(" ", "")
    assert (
        found["config"]["model_args"]["model"] == str(folder) and found["config"]["cache"]["requests"] == 12
    )
    last = shown.splitlines()[-1]
    assert last.startswith("cache (full): ") and ", 100.0% of the full cache's " in last


def test_the_command_compresses(folder, tasks, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["lm-eval", "--model", str(folder), "--tasks", "tiny_choice", "--include_path", str(tasks)]
    words += ["--method", "snapkv(budget=0.5, window=2)", "--output_path", str(out), "--log_samples"]
    assert main([*words, "--apply_chat_template", "--limit", "2"]) == 0
    found = results(out)["config"]
    assert found["method"] == "snapkv(budget=0.5, window=2)"
    assert 0 < found["cache"]["kept_bytes"] < found["cache"]["full_bytes"]
    assert "cache (snapkv(budget=0.5, window=2)): " in capsys.readouterr().out
    [samples] = out.rglob("samples_tiny_choice_*.jsonl")
    assert json.loads(samples.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"].startswith(
        "<s>[user]"
    )


REFUSED = {
    "an unknown task": (["--tasks", "no_such_task"], "lm-eval: Tasks not found: no_such_task; see"),
    "an unknown option": (["--taskz", "a"], "unrecognized arguments: --taskz a): see `lm-eval run --help`"),
    "no task": ([], "lm-eval: No tasks specified, or no tasks found."),
    "a method that does nothing": (
        ["--tasks", "tiny_text", "--method", "snapkv(budget=0.5, window=2)"], "give --chunk N"
    ),
    "a short context": (
        ["--tasks", "tiny_choice", "--method", "snapkv(budget=0.5, window=256)"], "of a context must stay"
    ),
    "a folder that is a file": (["--tasks", "a", "--output_path", "{tasks}/data.jsonl/x"], "cannot be made"),
    "data that are not here": (["--tasks", "{gone}"], "a task's data cannot be had"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_says_why(folder, tasks, words, message, tmp_path, capsys):
    gone = tmp_path / "gone.yaml"
    gone.write_text((tasks / "tiny_text.yaml").read_text().replace("data.jsonl", "gone.jsonl"))
    words = [word.format(tasks=tasks, gone=gone) for word in words]
    assert main(["lm-eval", "--model", str(folder), "--include_path", str(tasks), *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
