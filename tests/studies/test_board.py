"""The board: shards in order, nothing known runs again, and what was found becomes lines and a table."""

import functools
import json

import numpy as np
import pytest

import kvjax
from kvjax.io.gin_bindings import load_comparison
from scripts import eval as evaluation
from scripts.studies import board, board_digest, board_picture

GIN = """
compare.model = 'recall-tiny'
compare.tasks = ('get', 'copy')
compare.methods = ('snapkv', 'keydiff')
compare.budgets = (0.5,)
compare.protocols = ('agnostic', 'aware')
compare.samples = 5
compare.seeds = (0, 1)
compare.length = 96
compare.baselines = False
compare.gold = True
"""


def given(text=GIN, **changes):
    lines = (line.partition(" = ") for line in text.strip().splitlines())
    return {key.removeprefix("compare."): eval(value) for key, _, value in lines} | changes


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Run a board of one seed and protocol, with the full cache; return its folder, and the gin file's."""
    folder = tmp_path_factory.mktemp("board")
    text = GIN.replace("('snapkv'", "('full', 'snapkv'").replace("('agnostic', 'aware')", "('agnostic',)")
    (folder / "mine.gin").write_text(text.replace("(0, 1)", "(0,)"))
    evaluation.main(["--gin", str(folder / "mine.gin"), "--out", str(folder / "runs")])
    return folder


def test_methods_come_under_all_protocols_and_all_of_them_before_another_seed(model, monkeypatch):
    monkeypatch.setattr(board, "TOGETHER", 1)
    found = [(s.seed, s.protocol, s.cells[0].label) for s in board.shards(given(), model, [])]
    methods = ("snapkv", "keydiff")
    assert found == [(s, p, m) for s in (0, 1) for m in methods for p in ("agnostic", "aware")]


def test_known_methods_are_left_out_until_their_source_sentence_or_contexts_change(model, out):
    (folder,) = [*(out / "runs").iterdir()]
    lines = [*board.collect(out / "runs")]
    assert {line["revision"] for line in lines} == {
        json.loads((folder / board.ORIGIN).read_text())["revision"]
    }
    first = lambda lines, **changes: next(board.shards(given(**changes), model, lines))  # noqa: E731
    assert (first(lines).protocol, first(lines).seed) == ("aware", 0)
    assert first(lines, samples=6).protocol == "agnostic"
    for name, value in (("source", "other"), ("sentence", "snapkv"), ("fingerprint", "0"), ("length", 97)):
        changed = [{**line, name: value} if line["method"] == "snapkv" else line for line in lines]
        shard = first(changed)
        assert (shard.protocol, [e.label for e in shard.cells]) == ("agnostic", ["snapkv"])
    assert [e.label for e in first([x for x in lines if x["task"] == "get"]).cells] == ["snapkv", "keydiff"]


def test_a_finished_shard_does_not_run_again(out, monkeypatch):
    def stop(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr("kvjax.eval.compare.compare", stop)
    evaluation.main(["--gin", str(out / "mine.gin"), "--out", str(out / "runs"), "--resume"])
    with pytest.raises(SystemExit, match="is there already: give --resume"):
        evaluation.main(["--gin", str(out / "mine.gin"), "--out", str(out / "runs")])


def test_a_board_without_tasks_is_refused(tmp_path):
    (tmp_path / "mine.gin").write_text(GIN.replace("compare.tasks", "# compare.tasks"))
    with pytest.raises(SystemExit, match="without compare.tasks: add"):
        evaluation.main(["--gin", str(tmp_path / "mine.gin"), "--out", str(tmp_path / "out")])


def test_a_digest_changes_with_the_words_and_not_with_their_numbers():
    digest = lambda text: board_digest.source_of(kvjax.method(text))  # noqa: E731
    assert digest("snapkv(budget=0.5)") == digest("snapkv(budget=0.25, window=8)")
    assert (
        len({digest(x) for x in ("snapkv(budget=0.5)", "tova(budget=0.5)", "snapkv(budget=0.5) + int8")}) == 3
    )


def test_a_digest_is_of_code_and_not_of_what_is_said_about_it():
    def said(x):
        """Doubles."""
        return 2 * x  # twice

    first = board_digest._text(said)

    def said(x):
        """Give twice what it takes."""
        return 2 * x

    @functools.cache
    def other(x):
        return 3 * x

    class Word:
        """One thing."""

        says = "One thing."

        @property
        def requires(self):
            return 1

        def __call__(self):
            return 1

    word = board_digest._text(Word)

    class Word:
        def __call__(self):
            return 1

    assert board_digest._text(Word) == word

    assert board_digest._text(said) == first != board_digest._text(other).replace("other", "said")


def test_lines_with_more_contexts_or_of_another_source_replace_others(out):
    lines = [*board.collect(out / "runs")]
    fewer = [{**x, "scores": x["scores"][:2], "nll": x["nll"][:2]} for x in lines]
    other = [{**x, "source": "other", "nll": [n + 0.01 for n in x["nll"]]} for x in fewer]
    assert board.joined(fewer, lines) == board.joined(lines, fewer) == board.joined(lines, [])
    assert board.joined(lines, other) == board.joined(other, [])
    moved = [{**x, "source": "moved"} for x in fewer]
    assert board.joined(lines, moved) == board.joined([{**x, "source": "moved"} for x in lines], [])
    assert len(board.joined(lines, [{**x, "seed": 1} for x in lines])) == 2 * len(lines)


def test_a_table_says_what_methods_lose_on_the_same_contexts(out):
    lines = board.joined([], board.collect(out / "runs"))
    text = board.table(lines, "agnostic")
    nll = lambda method, task: next(  # noqa: E731
        np.array(x["nll"]) for x in lines if (x["method"], x["task"]) == (method, task)
    )
    lost = np.mean([(nll("keydiff", task) - nll("full", task)).mean() for task in ("copy", "get")])
    assert "| keydiff | 0.5 |" in text and f"| 5 | {lost:+.3f} [" in text
    # One that lacks a task is not shown, and neither is one under another protocol.
    part = [x for x in lines if (x["method"], x["task"]) != ("keydiff", "get")]
    assert "keydiff" not in board.table(part, "agnostic")
    assert board.table(lines, "aware").count("\n") == 1
    said = board.counts(lines)
    assert said.startswith(
        "So far, of 2 tasks (`copy`, `get`): 3 methods under `agnostic` (`full`, `keydiff`"
    )


def test_a_table_has_a_question_alone_beside_the_same_in_a_conversation():
    def line(protocol, method, budget, nll):
        told = {"length": 1024, "seed": 0, "kept": budget or 1.0, "scores": [0.0] * len(nll)}
        return {"protocol": protocol, "task": "get", "method": method, "budget": budget, "nll": nll, **told}

    lost = {"agnostic": 0.25, "multi-turn": 0.75}
    lines = [line(p, "full", None, [0.5, 1.0, 0.25]) for p in lost]
    lines += [line(p, "keydiff", 0.5, [0.5 + x, 1.0 + x, 0.25 + x]) for p, x in lost.items()]
    lines += [line("multi-turn", "tova", 0.5, [2.5, 3.0, 2.25])]
    numbers = [
        [cell.split()[0] for cell in row.split("|")[4:-1]]
        for row in board.turns_table(lines).splitlines()[2:]
    ]
    assert numbers == [["3", "+0.250", "+0.750"], ["3", "–", "+2.000"]]


def test_the_readme_and_the_picture_have_the_methods_of_the_table(out):
    lines = board.joined([], board.collect(out / "runs"))
    (lost,) = [x for x in board.losses(lines, "agnostic") if x.method == "keydiff"]
    quarter = [{**x, "budget": 0.25} if x["method"] == "keydiff" else x for x in lines]
    sizes = {line["sentence"]: [0.625, 0.5, 1.0] for line in quarter if line["method"] == "keydiff"}
    *_, row = board.short_table(quarter, sizes).splitlines()
    assert row == f"| KeyDiff | 62 | {lost.nats.mean:+.2f} | – |"
    found = {protocol: board.losses(quarter, protocol) for protocol in ("agnostic", "aware")}
    picture = board_picture.picture(found)
    assert picture[1:4] == b"PNG" and picture == board_picture.picture(found)
    assert board_picture.label_of(lost) == "keydiff"
    assert board_picture.label_of(lost._replace(kept=107.2)) == "keydiff, 107%"
    assert board_picture.label_of(lost._replace(budget=None, kept=27.1)) == "keydiff, 27%"


def test_runs_that_asked_other_tasks_are_kept_apart(model, out):
    """Where questions are read first, the longest of all of them decides how many tokens stay."""
    lines = board.joined([], board.collect(out / "runs"))
    others = [{**line, "asked": ["copy"]} for line in lines]
    both = board.joined(lines, others)
    assert len(both) == 2 * len(lines)
    assert board.alike(both, lines[0]["length"], ("get", "copy")) == lines
    assert next(board.shards(given(), model, others)).protocol == "agnostic"
    assert next(board.shards(given(), model, lines)).protocol == "aware"


@pytest.mark.parametrize("name", ["board-1024", "board-2048", "board-4096", "board-8192", "board-turns"])
def test_a_board_of_the_real_model_binds_what_it_needs(name):
    found = load_comparison(name, evaluation.NAMES)
    assert found.keys() >= {*board.NEEDED, "seeds"} and found["gold"]


def test_the_page_has_the_tables_of_its_data():
    assert board.PAGE.agrees() and board.README.agrees()


def test_a_folder_without_shards_is_refused(tmp_path, monkeypatch, capsys):
    before = board.DATA.read_bytes()
    monkeypatch.setattr("sys.argv", ["board", "collect", "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        board.main()
    assert "none holds no shard of a board, expected the --out of scripts.eval" in capsys.readouterr().err
    assert board.DATA.read_bytes() == before
