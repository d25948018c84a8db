"""SCBench: several questions about one context, in one conversation or each of the context alone.

Prompts, answer lengths and metrics: microsoft/MInference, scbench/ (arXiv:2412.10319; MIT), with its chat
template option. Protocol multi-turn is its multi-turn mode, with the right answers in the history; agnostic
is its multi-request mode ("scdq"), in which the context is compressed before any question.

Deviation: tokens that open a text are not doubled, and the context is shortened by the real length of
questions and answers, where SCBench subtracts the answer length times the turns (and 1000). An answer that is
one text is one reference. RepoQA is not read: its score parses code with tree-sitter.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvjax.base.errors import InputError
from kvjax.eval.tasks import metrics
from kvjax.eval.tasks.published import infinitebench
from kvjax.eval.tasks.published.record import (
    BenchmarkForm,
    BenchmarkQuestion,
    BenchmarkRecord,
    Dialogue,
    RecordFile,
)
from kvjax.eval.tasks.published.tables import TableRow, read_rows

_KV = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
_PASSAGE = "Extract the value corresponding to the specified key in the following passage.\n\n"
_PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz "
    "you about the important information.\n\n"
)
_OPTIONS = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\n"

# The text before the context.
_OPENS: Mapping[str, str] = {
    "kv": _KV,
    "kv_hard": _KV,
    "kv_compressible": _PASSAGE,
    "passkey": _PASSKEY,
    "choice_eng": "Read the book and answer the question.\n\n",
    "qa_eng": "Read the book and answer the question. Be very concise in your answer.\n\n",
    "qa_chn": "阅读以下书籍然后回答问题。\n\n",
}
_ENGLISH, _CHINESE = "Question: {question}\nAnswer:", "问题：{question}\n答案："
_CHOICE = "Question: {question}" + _OPTIONS + "The the correct answer is"
# The form of each task's questions; unchanged if not listed.
_ASKED: Mapping[str, str] = {"choice_eng": _CHOICE, "qa_eng": _ENGLISH, "qa_chn": _CHINESE}
# The form of later questions without a chat template.
_LATER: Mapping[str, str] = {**_ASKED, "choice_eng": _CHOICE.replace("The the", "The letter of the")}

_NEW: Mapping[str, int] = {
    **dict.fromkeys(("kv", "kv_hard", "kv_compressible", "hashhop", "prefix_suffix"), 150),
    **dict.fromkeys(("choice_eng", "qa_eng", "qa_chn"), 40),
    "mf": 5, "passkey": 15, "summary": 200, "vt": 30, "many_shot": 10,
}  # fmt: skip
# For tasks in which two kinds of questions alternate: the kinds, and their answer lengths.
_MIXED: Mapping[str, Mapping[str, int]] = {"summary_with_needles": {"summary": 800, "passkey": 15}}

_Metric = Callable[[str, Sequence[str]], float]


def _within(text: str, references: Sequence[str]) -> float:
    return float(references[0] in text)


def _all_within(text: str, references: Sequence[str]) -> float:
    return round(metrics.string_match_all(text, references), 2)


SCORES: Mapping[str, _Metric] = {
    **dict.fromkeys(("kv", "kv_hard", "kv_compressible", "hashhop", "prefix_suffix"), _within),
    "passkey": infinitebench.SCORES["passkey"],
    "choice_eng": lambda text, right: infinitebench.choice(text, right, last_letter=False),
    "qa_eng": infinitebench.any_within,
    "many_shot": infinitebench.any_within,
    "qa_chn": infinitebench.character_f1,
    "mf": infinitebench.find_number,
    "vt": _all_within,
    "summary": lambda text, right: metrics.rouge_l_sum(text, right[0]),
}


def _records(source: RecordFile) -> Iterator[BenchmarkRecord]:
    for row in read_rows(source.file):
        yield _record(row, source.options.get("task") or _task_of(row))


def _task_of(row: TableRow) -> str:
    """Return the task named by a file, or by its folder."""
    known = [*_NEW, *_MIXED, "repoqa", "repoqa_and_kv"]
    for part in (row.file.stem, row.file.parent.name):
        name = re.sub(r"^(scbench|multi_turn)_", "", part)
        if name in known:
            return name
    near = difflib.get_close_matches(row.file.stem, known, 1, cutoff=0.0)[0]
    raise InputError(
        f"{row.file} does not say its task, expected a name such as scbench_{near}.jsonl: rename it, or give "
        f"scbench:{row.file},task={near}"
    )


def _record(row: TableRow, task: str) -> BenchmarkRecord:
    task = task.removeprefix("scbench_")
    if task not in {**_NEW, **_MIXED}:
        why = (
            "is scored by parsing code, which is not done here" if "repoqa" in task else "is none of SCBench"
        )
        known = ", ".join([*_NEW, *_MIXED])
        raise InputError(f"{row.where}: the task {task} {why}, expected one of {known}: leave the file out")
    asked = row.rows("multi_turns")
    context = _text(row, "context" if "context" in row.data else "input")
    turns = tuple(_turn(turn, task) for turn in asked)
    opens = _opens(asked[0], task) + context
    return BenchmarkRecord(row.where, f"scbench_{task}", opens, turns, _dialogue(asked, turns, task, context))


def _opens(first: TableRow, task: str) -> str:
    """Return the text before single questions' context; the array of "mf" follows its first instruction."""
    return first.text("input") + "\n\n" if task == "mf" else _OPENS.get(task, "")


def _turn(turn: TableRow, task: str) -> BenchmarkQuestion:
    kind = turn.filled("task").removeprefix("scbench_") if task in _MIXED else task
    new = _MIXED[task].get(kind) if task in _MIXED else _NEW[task]
    if new is None:
        raise turn.wrong("task", " or ".join(f"scbench_{k}" for k in _MIXED[task]))
    references, score = _references(turn, task), SCORES[kind]
    return BenchmarkQuestion(
        _question(turn, task, _ASKED), references, new, lambda text: score(text, references),
        task=f"scbench_{task}" + (f".{kind}" if task in _MIXED else ""),
    )  # fmt: skip


def _question(turn: TableRow, task: str, forms: Mapping[str, str]) -> str:
    said = turn.filled("input")
    if task == "mf":
        named = re.search(r"The .+ is", said)
        if named is None:
            raise turn.wrong("input", "a sentence like 'The largest number of the list is:'")
        said = f"What is {named[0].lower()[:-3]}?\n\n{said}"
    values = dict(zip("ABCD", _options(turn), strict=True)) if task == "choice_eng" else {}
    return forms[task].format(question=said, **values) if task in forms else said


def _options(turn: TableRow) -> tuple[str, ...]:
    options = turn.texts("options")
    if len(options) != 4:
        raise turn.wrong("options", "four texts")
    return options


def _references(turn: TableRow, task: str) -> tuple[str, ...]:
    """Return the answers; for a multiple choice, its text and its letter."""
    answers = turn.texts("answer")
    if task != "choice_eng":
        return answers
    options = _options(turn)
    if answers[0] not in options:
        raise turn.wrong("answer", "one of the options")
    return answers[0], "ABCD"[options.index(answers[0])]


def _dialogue(
    asked: Sequence[TableRow], turns: Sequence[BenchmarkQuestion], task: str, context: str
) -> Dialogue:
    """Read the conversation: the context is in the first message, and right answers are between messages."""
    first = turns[0].question
    if task == "mf":
        prefix, _, said = first.partition("\n\n")
        opened = f"{prefix}\n\n{context}\n\n{said}"
    else:
        opened = f"{_OPENS.get(task, '')}{context}\n\n{first}"
    answers = tuple(_text(turn, "answer") for turn in asked)
    dot = "." if task == "passkey" else ""
    plain = (
        f"{answer}{dot}\n\n{_question(turn, task, _LATER)}"
        for answer, turn in zip(answers, asked[1:], strict=False)
    )
    later = [turn.question for turn in turns[1:]]
    if task == "mf":
        # In SCBench's chats, later questions begin with the first words of the last one.
        last = turns[-1].question.partition("\n\n")[0]
        later = [f"{last}\n\n{turn.text('input')}" for turn in asked[1:]]
    opens = "This paper" if task == "summary" else ""
    return Dialogue((opened, *later), answers[:-1], (opened, *plain), opens)


def _text(row: TableRow, field: str) -> str:
    """Write a field as a text; lists and numbers as Python writes them, as SCBench's templates do."""
    value = row.data.get(field)
    if value is None or value == "" or value == []:
        raise row.wrong(field, "a text, a list or a number")
    return str(value)


FORM = BenchmarkForm(
    "scbench", ("multi_turns",), _records, cut="middle", apart=True, options=("task",)
)  # fmt: skip
