"""Benchmarks read from local files: recognised by fields, asked and cut as published, wrong rows named."""

import json

import pytest

from kvjax.base.errors import InputError
from kvjax.eval.tasks.published.babilong import published
from kvjax.eval.tasks.published.catalogue import FORMS
from kvjax.eval.tasks.suite import make_suite, notes_of
from tests.eval import published_rows as rows
from tests.eval.published_rows import CHAT, ROWS, chatting, write

NEW = ",max_new_tokens=50"


@pytest.fixture(scope="module")
def model():
    return chatting(CHAT)


@pytest.fixture(scope="module")
def plain():
    return chatting(None)


def text(model, ids):
    return model.tokenizer.decode(list(ids), skip_special_tokens=False)


def prompts(model, path, protocol="agnostic", **options):
    """Write the samples as text: (context, question)."""
    suite = make_suite(model, [str(path)], **options)
    return [(text(model, r[0].context), text(model, r[0].question)) for r in suite.rows(0, protocol)]


def said(user):
    """Make a chat with one message of the user, ready to be answered."""
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


# --- what is asked ---------------------------------------------------------------------------------------

V2_PROMPT = """Please read the following text and answer the question below.

<text>
{}
</text>

What is the correct answer to this question: Who waited?
Choices:
(A) Ada
(B) Grace
(C) Alan
(D) Kurt

Format your response as follows: "The correct answer is (insert answer here)"."""
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WHOLE = {
    "kvpress": rows.KVPRESS["context"] + rows.KVPRESS["question"],
    "scbench": "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    + rows.KV["context"]
    + rows.KV["multi_turns"][0]["input"],
    "longbench-v2": V2_PROMPT.format(rows.V2["context"].strip()),
    "graphwalks": rows.GRAPH["prompt"],
    "longproc": rows.LONGPROC["input_prompt"],
    "gsm8k": rows.GSM8K["question"] + BOXED,
    "math": rows.MATH["problem"] + BOXED,
}


@pytest.mark.rotating
@pytest.mark.parametrize(("place", "form", "row"), [(p, *ROWS[p]) for p in ROWS if ROWS[p][0] in WHOLE])
def test_a_file_is_recognised_and_asked_in_one_message(model, plain, tmp_path, place, form, row):
    path = write(tmp_path / place, row)
    new = NEW if form in ("graphwalks", "math", "gsm8k") else ""
    spelled = f"{form}:{path}{new}" if new else path
    prefix = row.get("answer_prefix", "")
    context, question = prompts(model, spelled)[0]
    assert context + question == said(WHOLE[form]) + prefix
    context, question = prompts(plain, spelled)[0]
    assert context + question == f"<s>{WHOLE[form]}" + ("\n" if form == "kvpress" else "") + prefix
    assert form == "kvpress" or prompts(model, f"{form}:file={path}{new}") == prompts(model, spelled)


@pytest.mark.rotating
def test_contexts_end_where_the_question_opens(model, tmp_path):
    ends = {
        "data.json": "</text>\n\n",
        "graphwalks.parquet": "ef -> cd\n\n\n",
        "path_traversal_0.5k.jsonl": "flies to Kiel.",
        "2needle.parquet": "It rains again.<|im_end|>\n<|im_start|>user\n",
        "qa1/4k-00000-of-00001.parquet": "The wind blew.\n</context>\n\n",
    }
    for place, end in ends.items():
        form, row = ROWS[place]
        ((context, _),) = prompts(model, f"{form}:{write(tmp_path / place, row)}{NEW}")
        assert context.endswith(end)


def test_kvpress_tokenises_the_question_apart(model, tmp_path):
    ids = lambda x: model.tokenizer.encode(x, add_special_tokens=False).ids  # noqa: E731
    row = rows.KVPRESS
    suite = make_suite(model, [str(write(tmp_path / "ruler.parquet", row))])
    ((sample,),) = suite.rows(0, "agnostic")
    head, tail = said("#").split("#")
    assert [*sample.context] == ids(head + row["context"])
    assert [*sample.question] == ids(row["question"] + tail + row["answer_prefix"])
    assert sample.max_new_tokens == 9 and sample.references == ("5217940",)
    assert {text(model, sample.context[a:b]).strip() for a, b in sample.spans} == {"5217940"}
    assert len(sample.spans) == 3


def test_rows_of_one_file_have_their_own_lengths_tasks_and_scores(model, tmp_path):
    path = write(tmp_path / "all.parquet", rows.KVPRESS, {**rows.KVPRESS, "task": "vt", "max_new_tokens": 30})
    write(tmp_path / "loogle.jsonl", rows.LOOGLE)
    write(tmp_path / "longbench.jsonl", rows.LONGBENCH)
    suite = make_suite(model, [str(path), *(str(tmp_path / f"{n}.jsonl") for n in ("loogle", "longbench"))])
    found = {r[0].task: r[0] for r in suite.rows(0, "agnostic")}
    assert {t: s.max_new_tokens for t, s in found.items()} == {
        "niah_single_1": 9, "vt": 30, "shortdep_qa": 30, "hotpotqa": 9
    }  # fmt: skip
    ids = model.tokenizer.encode("Ada waited by a wall", add_special_tokens=False).ids
    scores = {t: suite.grade(s, ids).score for t, s in found.items()}
    # Four of five words in order; two shared words of five and one (articles do not count).
    assert scores == {"niah_single_1": 0, "vt": 0, "shortdep_qa": 0.8, "hotpotqa": pytest.approx(2 / 5)}


def test_a_document_of_loogle_without_a_question_scores_nothing(model, tmp_path):
    path = write(tmp_path / "loogle.jsonl", {**rows.LOOGLE, "question": "", "answer": ""})
    suite = make_suite(model, [str(path)])
    ((sample,),) = suite.rows(0, "agnostic")
    assert suite.grade(sample, model.tokenizer.encode("Ada waited.").ids).score == 0


def test_babilong_prompts_are_the_published_ones(model, tmp_path):
    path = write(tmp_path / "qa1" / "4k-00000-of-00001.parquet", rows.BABI)
    ((context, question),) = prompts(model, path)
    parts = published()["qa1"]
    opens = "\n\n".join(parts[x] for x in ("instruction", "examples", "post_prompt"))
    text = "It was a dark night. Ada moved to the garden. The wind blew."
    assert context + question == said(f"{opens}\n\n<context>\n{text}\n</context>\n\nQuestion: Where is Ada?")
    assert make_suite(model, [str(path)]).tasks == ("babilong_qa1_4k",)


def test_a_conversation_is_the_context_of_its_last_message(model, plain, tmp_path):
    path = write(tmp_path / "2needle.parquet", rows.MRCR)
    suite = make_suite(model, [str(path)])
    ((sample,),) = suite.rows(0, "agnostic")
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in rows.MESSAGES)
    assert text(model, [*sample.context, *sample.question]) == turns + "<|im_start|>assistant\n"
    right = model.tokenizer.encode(rows.MRCR["answer"], add_special_tokens=False).ids
    assert sample.max_new_tokens == 2 * len(right) and suite.grade(sample, right).score == 1
    assert suite.tasks == ("mrcr_2needle",)
    with pytest.raises(InputError, match="row 1 is a conversation, and .* has no chat template"):
        make_suite(plain, [str(path)])


# --- what does not fit -----------------------------------------------------------------------------------


def test_kvpress_cuts_the_end_of_a_context(model, tmp_path):
    path = write(tmp_path / "ruler.jsonl", {**rows.KVPRESS, "context": rows.KVPRESS["context"] * 9})
    ((full,),) = make_suite(model, [str(path)]).rows(0, "agnostic")
    ((cut,),) = make_suite(model, [str(path)], length=300).rows(0, "agnostic")
    assert cut.question == full.question and len(cut.context) + len(cut.question) == 300
    assert cut.context == full.context[: len(cut.context)]
    assert cut.spans == tuple(s for s in full.spans if s[1] <= len(cut.context)) != full.spans


@pytest.mark.parametrize("positions", [700, 4096])
def test_longbench_v2_loses_the_middle_of_what_the_user_says(tmp_path, positions):
    """By --length, and where the model's positions end: the answer takes 128 of them."""
    model = chatting(CHAT, positions)
    row = {**rows.V2, "context": " ".join(f"Line {i} of the old tower." for i in range(200))}
    path = write(tmp_path / "data.json", row)
    length = None if positions == 700 else 500
    ((cut,),) = make_suite(model, [str(path)], length=length).rows(0, "agnostic")
    whole = model.tokenizer.encode(V2_PROMPT.format(row["context"]), add_special_tokens=False).ids
    head, tail = (model.tokenizer.encode(x, add_special_tokens=False).ids for x in said("#").split("#"))
    limit = (length or positions - 128) - len(head) - len(tail)
    half = limit // 2
    assert [*cut.context, *cut.question] == [*head, *whole[:half], *whole[-half:], *tail]


def test_rows_that_are_too_long_are_left_out_and_counted(model, tmp_path):
    short, long = (
        rows.MRCR,
        {**rows.MRCR, "prompt": json.dumps([{"role": "user", "content": "It rains. " * 900}] * 3)},
    )
    suite = make_suite(model, [str(write(tmp_path / "a.parquet", long, short, long))], length=400)
    assert [r[0].id for r in suite.rows(0, "agnostic")] == ["mrcr_2needle-0"] and suite.contexts == 1
    (note,) = notes_of(suite)
    assert "a.parquet: 2 rows are too long and left out" in note and "row 1 has" in note
    with pytest.raises(InputError, match="no row of .*b.parquet fits .*row 1 has .* tokens, and 400 fit"):
        make_suite(model, [str(write(tmp_path / "b.parquet", long))], length=400)


def test_an_answer_without_a_place_is_refused_with_what_helps(model, tmp_path):
    path = write(tmp_path / "graphwalks.parquet", rows.GRAPH)
    with pytest.raises(
        InputError, match=r"row 1: a question of \d+ tokens and an answer of up to 16384 leave nothing"
    ):
        make_suite(model, [str(path)])
    with pytest.raises(InputError, match=r"graphwalks:FILE,max_new_tokens=\d+"):
        make_suite(model, [str(path)])
    kept = make_suite(model, [f"graphwalks:{path},max_new_tokens=50"]).rows(0, "agnostic")
    assert kept[0][0].max_new_tokens == 50


def test_every_form_has_a_row_here():
    assert {form for form, _ in ROWS.values()} | {"nolima"} == set(FORMS)
