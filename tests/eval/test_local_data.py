"""RULER and LongBench from files: prompts, cuts and scores as the benchmarks have them; free answers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.answers import generate_answers, predicted, row_new_tokens
from kvjax.eval.run.runner import observe, settle
from kvjax.eval.tasks.benchmarks import LONGBENCH
from kvjax.eval.tasks.local_data import read_local
from kvjax.eval.tasks.rows import make_rows
from kvjax.eval.tasks.sample import ForcedSample, OpenSample, most_new_tokens
from kvjax.eval.tasks.suite import CombinedSuite, make_suite
from kvjax.grammar import Method
from kvjax.io.load import load
from kvjax.steps import Run
from tests.eval.test_words import TOKENIZERS, hf_folder
from tests.sweep import sweep

NIAH = {
    "index": 0,
    "input": "Some special magic numbers are hidden within the following text.\nOne of the special magic "
    "numbers for old-tower is: 5217940.\nThe bag stayed near the wall.\nWhat is the special magic number for "
    "old-tower mentioned in the provided text?",
    "outputs": ["5217940"],
    "length": 70,
    "answer_prefix": " The special magic number for old-tower mentioned in the provided text is",
}
CHAIN = (
    "VAR ABC = 12345 \nVAR DEF = VAR ABC \nQuestion: Find all variables that are assigned the value 12345."
)
EXAMPLE = CHAIN + " Answer: ABC DEF\n\n"
VT = {"input": EXAMPLE + CHAIN.replace("ABC", "XYZ"), "outputs": ["XYZ", "DEF"], "length": 60}
HOTPOT = {
    "input": "Who waited at the gate?",
    "context": "Passage 1:\nThe teacher waited at the gate.\n" * 12,
    "answers": ["the teacher", "A Teacher"],
    "length": 100,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "x",
}
CITIES = {"answers": ["City"], "all_classes": ["City", "State"], "input": "Question: Bonn?"}
TREC = {**HOTPOT, **CITIES, "dataset": "trec_e"}


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(hf_folder(tmp_path_factory.mktemp("hf") / "model", TOKENIZERS["byte level"]), progress=False)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "niah_single_1" / "validation.jsonl", NIAH, {**NIAH, "index": 1}, {**NIAH, "index": 2})
    write(tmp_path / "vt.jsonl", VT)
    write(tmp_path / "longbench.jsonl", HOTPOT, TREC)
    return tmp_path


def text(model, ids):
    return model.tokenizer.decode(list(ids), skip_special_tokens=True)


# --- records ---------------------------------------------------------------------------------------------


def test_tasks_are_named_by_file_folder_or_data_set(model, folder):
    data = read_local(model, [folder], contexts=2)
    assert set(data.tasks) == {"niah_single_1", "vt", "hotpotqa", "trec"}
    assert data.contexts == 2
    assert [row[0].id for row in data.rows(1, "agnostic")] == ["niah_single_1-1"]
    assert len(data.rows(0, "aware")) == 4 and len(data.sources) == 3


def test_a_ruler_record_is_split_where_its_question_opens(model, folder):
    data = read_local(model, [folder / "niah_single_1", folder / "vt.jsonl"])
    (niah,), (vt,) = data.rows(0, "agnostic")
    assert text(model, niah.context).endswith("near the wall.\n")
    assert text(model, niah.question) == NIAH["input"][NIAH["input"].index("What") :] + NIAH["answer_prefix"]
    assert text(model, niah.question).startswith("What is the special magic number")
    assert text(model, vt.context).count("Question:") == 1 and text(model, vt.question).startswith(
        "Question: Find"
    )
    assert (niah.max_new_tokens, vt.max_new_tokens) == (128, 30)
    assert [text(model, niah.context[a:b]) for a, b in niah.spans] == [" 5217940"] and vt.spans == ()


@pytest.mark.parametrize("record", [HOTPOT, TREC])
def test_a_longbench_prompt_is_tokenised_as_a_whole(model, tmp_path, record):
    data = read_local(model, [write(tmp_path / "any.jsonl", record)])
    ((sample,),) = data.rows(0, "agnostic")
    prompt = LONGBENCH[data.tasks[0]].prompt.format(context=record["context"], input=record["input"])
    assert [*sample.context, *sample.question] == model.tokenizer.encode(prompt).ids
    # The context ends where that of the record does, up to a token that reaches over its end.
    assert record["context"].strip() in text(model, sample.context) + "\n"
    assert record["input"] not in text(model, sample.context) and record["input"] in text(
        model, sample.question
    )
    assert data.length == len(sample.context) + len(sample.question)


def test_every_longbench_prompt_has_the_places_it_needs():
    assert all(b.prompt.count("{context}") == 1 and b.new_tokens >= 32 for b in LONGBENCH.values())
    no_input = {name for name, b in LONGBENCH.items() if "{input}" not in b.prompt}
    assert no_input == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}
    assert len(LONGBENCH) == 21


@pytest.mark.parametrize("length", [150, 151, 90])
def test_a_long_prompt_loses_its_middle(model, tmp_path, length):
    path = write(tmp_path / "any.jsonl", HOTPOT)
    prompt = LONGBENCH["hotpotqa"].prompt.format(context=HOTPOT["context"], input=HOTPOT["input"])
    whole = model.tokenizer.encode(prompt).ids
    ((full,),) = read_local(model, [path]).rows(0, "agnostic")
    ((sample,),) = read_local(model, [path], length=length).rows(0, "agnostic")
    half, question = length // 2, len(full.question)
    assert sample.question == full.question
    kept = [*sample.context, *sample.question]
    if question <= half:
        assert kept == [*whole[:half], *whole[len(whole) - half :]]
    else:
        assert kept == [*whole[: length - question], *full.question]
    assert len(kept) <= length


def test_needles_are_found_again_behind_a_cut(model, tmp_path):
    filler = "The bag stayed near the wall.\n"
    text_of = lambda before, behind: filler * before + "The code is: 5217940.\n" + filler * behind  # noqa: E731
    for before, behind, kept in [(20, 1, True), (1, 20, True), (10, 10, False)]:
        record = {"input": text_of(before, behind) + "What is the code?", "outputs": ["5217940"]}
        path = write(tmp_path / "niah_own.jsonl", record)
        ((sample,),) = read_local(model, [path], length=100).rows(0, "agnostic")
        found = [text(model, sample.context[a:b]) for a, b in sample.spans]
        assert found == ([" 5217940"] if kept else [])
        assert ("5217940" in text(model, sample.context)) == kept and len(sample.context) < 100


def test_scores_are_those_of_the_benchmark(model, folder):
    data = read_local(model, [folder])
    by_task = {row[0].task: row[0] for row in data.rows(0, "agnostic")}

    def score(task, said):
        return data.grade(by_task[task], model.tokenizer.encode(said, add_special_tokens=False).ids)

    assert score("niah_single_1", " 5217940, said the farmer").score == 1.0
    assert score("vt", "XYZ\nand no other").score == 0.5
    assert score("hotpotqa", "A teacher.") == ("A teacher.", "the teacher | A Teacher", 1.0)
    assert score("trec", "\nCity\nor State").score == 1.0  # only the first line counts
    assert score("trec", "City or State").score == 0.5


def test_any_reference_is_enough_in_ruler_questions_over_documents(model, tmp_path):
    question = "\n\nAnswer the question based on the given documents. Only the answer.\n\nQuestion: Who?"
    record = {
        "index": 0,
        "input": "Document 1: the fox." + question,
        "outputs": ["fox", "red fox"],
        "length": 9,
    }
    data = read_local(model, [write(tmp_path / "qa_1.jsonl", record)])
    ((sample,),) = data.rows(0, "agnostic")
    assert text(model, sample.context).strip() == "Document 1: the fox." and sample.max_new_tokens == 32
    assert data.grade(sample, model.tokenizer.encode("fox", add_special_tokens=False).ids).score == 1.0


def test_a_task_in_rulers_form_asks_in_its_last_line(model, tmp_path):
    record = {"input": "The code of tea is 4.\nMore text.\nWhat is the code of tea?", "outputs": ["4"]}
    data = read_local(model, [write(tmp_path / "own.jsonl", record)])
    ((sample,),) = data.rows(0, "agnostic")
    assert text(model, sample.question) == "\nWhat is the code of tea?"
    assert data.grade(sample, model.tokenizer.encode("4", add_special_tokens=False).ids).score == 1.0


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty"),
        ("{broken", "any.jsonl:1 is not JSON"),
        ("[1]\n", "of no record, expected input and outputs"),
        ('{"text": "a"}', "has the keys text, expected"),
        ('{"input": 3, "outputs": []}', "has the keys outputs, expected"),
        (json.dumps({**HOTPOT, "dataset": "hotpot"}), "did you mean 'hotpotqa'"),
        (json.dumps({"input": "no line", "outputs": ["x"]}), "no question was found"),
        (json.dumps(HOTPOT), "a question of hotpotqa has"),
    ],
)
def test_files_that_hold_no_questions_are_refused(model, tmp_path, lines, message):
    (tmp_path / "any.jsonl").write_text(lines)
    with pytest.raises(InputError, match=message):
        read_local(model, [tmp_path / "any.jsonl"], length=20)


def test_paths_that_cannot_be_read_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        make_suite(model, [str(tmp_path / "none.jsonl")])
    with pytest.raises(InputError, match="holds no .jsonl"):
        make_suite(model, [str(tmp_path)])
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        make_suite(model, [str(tmp_path / "bytes.jsonl")])
    write(tmp_path / "a" / "vt.jsonl", VT)
    write(tmp_path / "b" / "vt.jsonl", VT)
    with pytest.raises(InputError, match="holds the task vt, and another file does"):
        make_suite(model, [str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(InputError, match="expected at most 994"):
        make_suite(model, [str(tmp_path / "a")], length=1000)


# --- mixed with built-in tasks ---------------------------------------------------------------------------


def test_files_and_built_in_tasks_stand_side_by_side(model, folder):
    mixed = make_suite(model, ["get", str(folder / "vt.jsonl"), "copy"], length=400)
    assert isinstance(mixed, CombinedSuite) and mixed.tasks == ("get", "copy", "vt")
    assert mixed.contexts is None and mixed.length == 400 and len(mixed.sources) == 1
    assert [row[0].task for row in mixed.rows(0, "agnostic")] == ["get", "copy", "vt"]
    assert [row[0].task for row in mixed.rows(1, "agnostic")] == ["get", "copy"]
    get, _, vt = (row[0] for row in mixed.rows(0, "agnostic"))
    assert mixed.grade(get, get.answer).score == 1.0
    assert mixed.grade(vt, model.tokenizer.encode("xyz def").ids).score == 1.0
    with pytest.raises(InputError, match="the task get is named twice"):
        make_suite(model, ["get", str(write(folder / "get.jsonl", VT))], length=400)


# --- free answers ----------------------------------------------------------------------------------------


def open_sample(ids, question, new):
    return OpenSample("x", "own", tuple(ids), tuple(question), (), ("a",), new)


ROWS, WIDTH = 4, 12


def answers(model, samples, protocol, stop=-1):
    """Rows through the arrays of the runner: the full cache, then what each row says."""
    rows = make_rows([[s] for s in samples], protocol, 64, 16, ROWS)
    run = Run(model.config, Method())
    lengths, needs = jnp.asarray(rows.length), frozenset()
    prompt = observe(run, model.params, jnp.asarray(rows.prompt), lengths, None, needs)
    cache, _ = settle(run, model.params, prompt, tokens=64, room=16 + WIDTH)
    new, stops = row_new_tokens(rows), np.array([-1, stop], np.int32)
    arrays = map(jnp.asarray, (rows.forced, rows.count, rows.again, new, stops))
    said = np.asarray(generate_answers(run, model.params, cache, *arrays, width=WIDTH))
    turns = [(start, sample) for row in rows.turns for start, sample in row]
    return said, [predicted(sample, said[i], start) for i, (start, sample) in enumerate(turns)]


@pytest.mark.parametrize("protocol", sweep(["agnostic", "aware"]))
def test_free_answers_are_those_of_greedy_generation(model, rng, protocol):
    draw = lambda n: rng.integers(3, 900, n).tolist()  # noqa: E731
    lengths = [(20, 5, 9), (31, 2, 1), (12, 7, 4)]
    samples = [open_sample(draw(c), draw(q), new) for c, q, new in lengths]
    assert most_new_tokens([samples]) == 9
    _, found = answers(model, samples, protocol)
    out = kvjax.generate(model, [[*s.context, *s.question] for s in samples], max_new_tokens=9, stop=[])
    expected = [row[: s.max_new_tokens] for row, s in zip(out.tokens.tolist(), samples, strict=True)]
    assert found == expected


def test_forced_answers_are_judged_beside_free_ones(model, rng):
    ids = rng.integers(3, 900, 40).tolist()
    forced = ForcedSample("y", "get", tuple(ids[:25]), tuple(ids[25:30]), tuple(ids[30:36]), ())
    free = open_sample(ids[:20], ids[20:24], 6)
    _, (said, own) = answers(model, [forced, free], "agnostic")
    logits = np.asarray(model(np.array([ids[:36]], np.int32)))[0]
    assert said == logits[29:35].argmax(-1).tolist() and len(own) == 6


def test_a_stop_ends_its_row_and_is_not_said(model, rng):
    samples = [open_sample(rng.integers(3, 900, 20), rng.integers(3, 900, 3), 12) for _ in range(3)]
    _, found = answers(model, samples, "agnostic")
    stop = found[0][4]
    cut = [said[: said.index(stop)] if stop in said else said for said in found]
    said, short = answers(model, samples, "agnostic", stop=stop)
    assert short == cut and len(short[0]) <= 4
    assert (said[0, len(samples[0].question) - 1 + len(short[0]) :] == -1).all()


def test_forced_answers_may_hold_a_stop(model, rng):
    ids = rng.integers(3, 900, 40).tolist()
    forced = ForcedSample("y", "get", tuple(ids[:25]), tuple(ids[25:30]), tuple(ids[30:36]), ())
    _, (plain,) = answers(model, [forced], "agnostic")
    _, (said,) = answers(model, [forced], "agnostic", stop=plain[0])
    assert said == plain


def test_a_byte_order_mark_before_the_first_record_is_passed_over(model, folder):
    path = folder / "vt.jsonl"
    plain = read_local(model, [path]).rows(0, "agnostic")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_local(model, [path]).rows(0, "agnostic") == plain
