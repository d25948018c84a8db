"""SCBench's two modes: each question of the compressed context alone, or after those before it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.answers import generate_answers, predicted, row_new_tokens
from kvjax.eval.run.plan import arrays_of, batches_of, distinct, planned
from kvjax.eval.run.runner import Runner, observe, settle
from kvjax.eval.tasks.rows import make_rows
from kvjax.eval.tasks.suite import make_suite
from kvjax.steps import Run
from tests.eval import published_rows as rows
from tests.eval.published_rows import CHAT, chatting, write

RECORDED = json.loads(
    (Path(__file__).parents[1] / "fixtures/authors/scbench.json").read_text(encoding="utf-8")
)
KV = "Extract the value corresponding to the specified key in the JSON object below.\n\n"


@pytest.fixture(scope="module")
def model():
    return chatting(CHAT)


@pytest.fixture(scope="module")
def plain():
    return chatting(None)


def asked(model, path, protocol):
    """Write a sample's context and question as text."""
    found = make_suite(model, [str(path)]).rows(0, protocol)
    text = lambda ids: model.tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    return [(text(row[0].context), text(row[0].question), row[0]) for row in found]


def chat(*turns):
    """Render a conversation in the model's template, ready to be answered."""
    roles = ("user", "assistant")
    turns = "".join(f"<|im_start|>{roles[i % 2]}\n{t}<|im_end|>\n" for i, t in enumerate(turns))
    return turns + "<|im_start|>assistant\n"


def test_requests_share_a_context_and_know_nothing_of_each_other(model, tmp_path):
    found = asked(model, write(tmp_path / "scbench_kv.jsonl", rows.KV), "agnostic")
    assert len({sample.context for *_, sample in found}) == 1
    for (context, question, sample), turn in zip(found, rows.KV["multi_turns"], strict=True):
        assert context + question == chat(KV + rows.KV["context"] + turn["input"])
        assert sample.references == (turn["answer"],) and sample.max_new_tokens == 150
        assert question.startswith(turn["input"])


def test_turns_follow_the_right_answers_to_those_before(model, plain, tmp_path):
    path = write(tmp_path / "scbench_kv.jsonl", rows.KV)
    said = [x for turn in rows.KV["multi_turns"] for x in (turn["input"], turn["answer"])][:-1]
    said[0] = f"{KV}{rows.KV['context']}\n\n{said[0]}"
    found = asked(model, path, "multi-turn")
    assert len({sample.context for *_, sample in found}) == 1
    for i, (context, question, _) in enumerate(found):
        assert context + question == chat(*said[: 2 * i + 1])
    # Without a template, an answer and a blank line stand between questions; the end of the first one is
    # asked again.
    for i, (context, question, sample) in enumerate(asked(plain, path, "multi-turn")):
        later = "".join(f"{said[j]}\n\n{said[j + 1]}" for j in range(1, 2 * i, 2))
        assert context + question == f"<s>{said[0]}{later}" and len(sample.question) >= 1
    assert [sample.id for *_, sample in found] == [f"scbench_kv-0-turn-{i}" for i in (1, 2, 3)]


@pytest.mark.parametrize("chats", [True, False])
def test_prompts_are_those_of_the_authors_code(model, plain, tmp_path, chats):
    for task, row in rows.SCBENCH.items():
        write(tmp_path / f"scbench_{task}.jsonl", row)
    asks, where, start = (model, " in a chat", "") if chats else (plain, "", "<s>")
    suite = make_suite(asks, [str(tmp_path)])
    text = lambda ids: asks.tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    alone, turns = ([row[0] for row in suite.rows(0, p)] for p in ("agnostic", "multi-turn"))
    for task, record in RECORDED.items():
        mine = [s for s in alone if s.task.split(".")[0] == f"scbench_{task}"]
        context, *questions = record[f"requests{where}"]
        assert [text(s.context) for s in mine] == [start + context] * len(questions)
        assert [text(s.question) for s in mine] == questions
        assert [s.max_new_tokens for s in mine] == record["new tokens"]
        mine = [s for s in turns if s.task.split(".")[0] == f"scbench_{task}"]
        said = [start + "".join(record[f"turns{where}"][: i + 1]) for i in range(len(mine))]
        assert [text([*s.context, *s.question]) for s in mine] == said and len(mine) == len(questions)


def test_kinds_of_questions_that_alternate_have_their_own_task_length_and_score(model, tmp_path):
    path = write(tmp_path / "scbench_summary_with_needles.jsonl", rows.SUMMARY)
    suite = make_suite(model, [str(path)])
    (summary,), (key,) = suite.rows(0, "agnostic")
    tasks = [f"scbench_summary_with_needles.{kind}" for kind in ("summary", "passkey")]
    assert [*suite.tasks] == [summary.task, key.task] == tasks
    assert (summary.max_new_tokens, key.max_new_tokens) == (800, 15)
    ids = model.tokenizer.encode("Towers are 71432 studied.", add_special_tokens=False).ids
    # Three of four words are the summary's three.
    assert suite.grade(summary, ids).score == pytest.approx(2 * (3 / 4) / (1 + 3 / 4))
    assert suite.grade(key, ids).score == 1


@pytest.mark.rotating
def test_a_context_that_is_too_long_loses_its_middle_for_all_turns(tmp_path):
    small = chatting(CHAT, 700)
    row = {**rows.KV, "context": str({f"k{i}": str(i) for i in range(300)})}
    path = write(tmp_path / "scbench_kv.jsonl", row)
    found = asked(small, path, "multi-turn")
    used = [len(s.context) + len(s.question) + s.max_new_tokens for *_, s in found]
    assert max(used) == 700 and len({s.context for *_, s in found}) == 1
    assert all(
        c.startswith("<|im_start|>user\nExtract") and "k299" in c and "k150" not in c for c, *_ in found
    )
    alone = [sample for *_, sample in asked(small, path, "agnostic")]
    head = small.tokenizer.encode(f"<|im_start|>user\n{KV}{row['context']}", add_special_tokens=False).ids
    half = (550 - max(len(s.question) for s in alone)) // 2
    assert all([*s.context] == [*head[:half], *head[-half:]] for s in alone)


def test_one_question_is_no_conversation(model, tmp_path):
    suite = make_suite(model, [str(write(tmp_path / "ruler.jsonl", rows.KVPRESS))])
    with pytest.raises(InputError, match="niah_single_1 asks one question about a context: leave out"):
        suite.rows(0, "multi-turn")


@pytest.mark.rotating
def test_an_answer_is_what_a_kept_cache_says_after_the_right_answers(model, tmp_path):
    """Each turn against one cache that is compressed once and then fed question by question."""
    method = kvjax.method("snapkv", budget=16, window=4)
    suite = make_suite(model, [f"scbench:{write(tmp_path / 'scbench_kv.jsonl', rows.KV)},max_new_tokens=5"])
    samples = [row[0] for row in suite.rows(0, "multi-turn")]
    made = make_rows([[s] for s in samples], "multi-turn", 256, 256, len(samples))
    run, lengths = Run(model.config, method), jnp.asarray(made.length)
    needs = kvjax.steps.needs_of(run, model.params)
    prompt = observe(run, model.params, jnp.asarray(made.prompt), lengths, None, needs)
    cache, _ = settle(run, model.params, prompt, tokens=256, room=256 + 5)
    arrays = map(jnp.asarray, (made.forced, made.count, made.again, row_new_tokens(made), np.array([-1])))
    decode = Run(model.config, method.decode_part())
    said = np.asarray(generate_answers(decode, model.params, cache, *arrays, width=5))
    found = [predicted(s, said[i], made.turns[i][0][0]) for i, s in enumerate(samples)]
    _, kept = kvjax.prefill(model, [samples[0].context], method=method, room=256)
    fed, expected = 0, []
    for sample in samples:
        for token in sample.question[fed:]:
            logits, kept = kvjax.step(model, kept, np.array([token]))
        fed, own, words = len(sample.question), kvjax.fork(kept, 1), []
        for _ in range(5):
            words.append(int(np.asarray(logits)[0].argmax()))
            logits, own = kvjax.step(model, own, np.array([words[-1]]))
        expected.append(words)
    assert found == expected


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["snapkv", "adakv"])
def test_a_context_is_read_and_compressed_once_for_all_its_questions(model, tmp_path, name):
    """Against rows that each read the prompt, also in a batch that is not full."""
    other = {
        **rows.KV,
        "context": rows.KV["context"].replace("11", "71"),
        "multi_turns": rows.KV["multi_turns"][:1],
    }
    path = write(tmp_path / "scbench_kv.jsonl", rows.KV, other)
    options = dict(budgets=[0.5], samples=2, length=None, seeds=(0,), preset=None)
    tasks = [f"scbench:{path},max_new_tokens=4"]
    plan, _ = planned(
        model, [name], tasks=tasks, protocols=("agnostic", "multi-turn"), baselines=False, **options
    )
    batches = batches_of(plan)
    runner = Runner(plan.model, plan.suite, plan.entries, plan.tokens, 512 + 4)
    for batch, shared in zip(batches, arrays_of(plan, batches), strict=True):
        assert (shared.prompt.shape[0], shared.of.tolist()) == (2, [0, 0, 0, 1]) and distinct(batch) == 2
        apart = make_rows(batch.rows, batch.protocol, plan.tokens, shared.forced.shape[1], 4)
        padded = make_rows(batch.rows[:2], batch.protocol, plan.tokens, shared.forced.shape[1], 4, 1, 2)
        assert padded.of.tolist() == [0] * 4 and (padded.prompt[0] == padded.prompt[1]).all()
        found = []
        for made in (shared, apart, padded):
            prompt, _ = runner.prompt(made)
            unit = runner.unit(plan.entries[0], prompt, made, batch.protocol, 100, alone=False)
            found.append([(r["id"], r["prediction"], r["kept_bytes"], r["span_kept"]) for r in unit.rows])
        assert found[0] == found[1] and found[2] == found[0][:2] and len(found[0]) == 4
