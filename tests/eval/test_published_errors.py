"""Rows and files of benchmarks that are wrong are refused with file, row and field, before anything runs."""

import pytest

from kvjax.base.errors import InputError
from kvjax.eval.tasks.suite import CombinedSuite, make_suite
from tests.eval import published_rows as rows
from tests.eval.published_rows import CHAT, chatting, write


@pytest.fixture(scope="module")
def model():
    return chatting(CHAT)


WRONG = {
    "a field that is missing": (
        "ruler.jsonl",
        {k: v for k, v in rows.KVPRESS.items() if k != "answer"},
        "line 1: field 'answer' is missing; "
        "expected a text or a list of texts, none of them empty .its fields: context, question",
    ),
    "an empty answer": ("ruler.jsonl", {**rows.KVPRESS, "answer": []}, "field 'answer' is \\[\\]; expected"),
    "an answer of blanks": (
        "ruler.jsonl",
        {**rows.KVPRESS, "answer": [" "]},
        "field 'answer' is \\[' '\\]; expected",
    ),
    "no number": (
        "ruler.jsonl",
        {**rows.KVPRESS, "max_new_tokens": "9"},
        "'max_new_tokens' is '9'; expected a whole",
    ),
    "no tokens": (
        "ruler.jsonl",
        {**rows.KVPRESS, "max_new_tokens": 0},
        "is 0; expected a whole number of at least 1",
    ),
    "a text that is null": (
        "ruler.jsonl",
        {**rows.KVPRESS, "context": None},
        "field 'context' is None; expected a text",
    ),
    "an unknown task": (
        "ruler.jsonl",
        {**rows.KVPRESS, "task": "niha"},
        "the task 'niha' .*did you mean 'niah'",
    ),
    "a kept answer": (
        "zero.jsonl",
        {**rows.KVPRESS, "task": "squality", "answer": ""},
        "'squality' .*ZeroSCROLLS keeps",
    ),
    "no dictionary": ("l.jsonl", {**rows.LOOGLE, "task": "shortdep_cloze"}, "expected a dictionary as text"),
    "no turns": (
        "scbench_kv.jsonl",
        {**rows.KV, "multi_turns": []},
        "'multi_turns' is \\[\\]; expected a list of objects",
    ),
    "a turn without an answer": (
        "scbench_kv.jsonl",
        {**rows.KV, "multi_turns": [{"input": "a"}]},
        "multi_turns 1: field 'answer' is missing",
    ),
    "a task without a name": (
        "kvs.jsonl",
        rows.KV,
        "does not say its task, expected a name such as scbench_kv",
    ),
    "code": ("scbench_repoqa.jsonl", rows.KV, "the task repoqa is scored by parsing code"),
    "a fifth letter": (
        "data.json",
        {**rows.V2, "answer": "E"},
        "row 1: field 'answer' is 'E'; expected A, B, C or D",
    ),
    "no messages": (
        "a.jsonl",
        {**rows.MRCR, "prompt": "hi"},
        "field 'prompt' is 'hi'; expected a list of messages in JSON",
    ),
    "no list of nodes": ("a.jsonl", {**rows.GRAPH, "answer_nodes": "ab"}, "expected a list of nodes"),
    "no task": ("a.jsonl", rows.BABI, "does not say its task, expected qa1 to qa20"),
    "a task that is not there": ("qa21.jsonl", rows.BABI, "does not say its task, expected qa1 to qa20"),
    "no size": ("a.jsonl", rows.LONGPROC, "does not say its task, expected path_traversal"),
    "programs": ("pseudo_to_code_2k.jsonl", rows.LONGPROC, "programs to compile and run"),
    "no metadata": (
        "countdown_2k.jsonl",
        rows.LONGPROC,
        "field 'metadata' is '{}'; expected an object in JSON with nums",
    ),
    "no number of GSM8K": (
        "a.jsonl",
        {**rows.GSM8K, "answer": "7"},
        "expected a solution that ends in '#### NUMBER'",
    ),
    "nothing in a box": (
        "a.jsonl",
        {"problem": "1 + 1?", "solution": "2"},
        "'solution' is '2'; expected a text whose answer stands in",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_row_is_named_with_file_row_and_field(model, tmp_path, what):
    place, row, message = WRONG[what]
    path = write(tmp_path / place, row)
    with pytest.raises(InputError, match=f"(?s){place}.*{message}"):
        make_suite(model, [str(path)])


def test_the_row_that_is_wrong_is_counted(model, tmp_path):
    path = write(tmp_path / "r.parquet", *[rows.KVPRESS] * 19, {**rows.KVPRESS, "answer_prefix": None})
    with pytest.raises(InputError, match=r"r.parquet row 20: field 'answer_prefix' is None; expected a text"):
        make_suite(model, [str(path)])
    path = write(tmp_path / "r.jsonl", rows.KVPRESS, {"context": "a"})
    with pytest.raises(InputError, match=r"r.jsonl line 2: field 'task' is missing|field 'answer"):
        make_suite(model, [str(path)])


def test_files_that_cannot_be_read_are_refused(model, tmp_path):
    whole = write(tmp_path / "ruler.parquet", *[rows.KVPRESS] * 4)
    for name, data, message in (
        ("empty.parquet", b"", "empty.parquet cannot be read as parquet"),
        ("cut.parquet", whole.read_bytes()[:-40], "cut.parquet cannot be read as parquet .*fetch it again"),
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("list.json", b"[]", "list.json is empty"),
        ("texts.json", b'["a"]', "row 1 has the fields text, expected those of a benchmark"),
        (
            "other.parquet",
            write(tmp_path / "o.parquet", {"text": "a"}).read_bytes(),
            "row 1 has the fields text, expected",
        ),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            make_suite(model, [str(tmp_path / name)])
    write(tmp_path / "none.parquet", rows.KVPRESS)
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "none.parquet")[:0]
    pyarrow.parquet.write_table(table, tmp_path / "none.parquet")
    with pytest.raises(InputError, match="none.parquet is empty"):
        make_suite(model, [str(tmp_path / "none.parquet")])


def test_spellings_that_name_no_file_are_refused(model, tmp_path):
    path = write(tmp_path / "ruler.jsonl", rows.KVPRESS)
    for task, message in (
        (f"kvpress:{tmp_path}/none.parquet", "none.parquet does not exist, expected kvpress:FILE"),
        ("kvpress:", "'kvpress:' does not exist, expected kvpress:FILE"),
        (
            f"scbench:{path}",
            "field 'multi_turns' is missing; expected multi_turns .*these are fields of kvpress",
        ),
        (f"kvpress:{path},tsak=vt", "kvpress has no option 'tsak': did you mean 'task'"),
        (f"kvpress:{path},max_new_tokens=many", "max_new_tokens is 'many', expected a whole number"),
    ):
        with pytest.raises(InputError, match=message):
            make_suite(model, [task])
    (tmp_path / "sub").mkdir()
    with pytest.raises(InputError, match="sub holds no .parquet, .jsonl or .json file"):
        make_suite(model, [f"kvpress:{tmp_path}/sub"])


def test_a_folder_is_read_shard_by_shard_beside_other_tasks(model, tmp_path):
    for i in range(2):
        write(tmp_path / "4096" / f"test-0000{i}-of-00002.parquet", rows.KVPRESS)
    (tmp_path / "4096" / "dataset_info.json").write_text("{}")
    (tmp_path / "4096" / ".cache").mkdir()
    write(tmp_path / "4096" / ".cache" / "old.parquet", {"a": 1})
    write(tmp_path / "4096" / "vt.jsonl", {"input": "One. Question: Find x?", "outputs": ["x"], "length": 9})
    mixed = make_suite(model, [str(tmp_path / "4096"), "get"], length=400)
    assert isinstance(mixed, CombinedSuite) and set(mixed.tasks) == {"get", "niah_single_1", "vt"}
    assert [r[0].task for r in mixed.rows(1, "agnostic")] == ["get", "niah_single_1"]
    assert len(mixed.sources) == 3 and mixed.contexts is None
    # The first shard is enough.
    assert make_suite(model, [str(tmp_path / "4096")], contexts=1).contexts == 1
    write(tmp_path / "8192" / "test.parquet", rows.KVPRESS)
    with pytest.raises(InputError, match="holds the task niah_single_1, and .* does, too: name one"):
        make_suite(model, [str(tmp_path / "4096"), str(tmp_path / "8192")])
