"""A method from a file of one's own: found, built, named, and refused with the reason."""

import textwrap
from pathlib import Path

import pytest

from kvjax.base.errors import InputError
from kvjax.grammar import chain
from kvjax.methods import kivi, snapkv
from kvjax.methods.user import from_file, load_function, sources

SOURCE = """
    from dataclasses import dataclass
    from kvjax.methods import kivi, snapkv
    from numbers_beside import WINDOW

    @dataclass(frozen=True)
    class Word:
        size: "int" = 3

    def short(budget, window=WINDOW):
        return snapkv(budget, window=window)

    def two_bits():
        return kivi(bits=2)

    def many(budget, **rest):
        return snapkv(budget, **rest)

    def nothing(budget):
        return None

    def broken(budget):
        return [][1]

    CONSTANT = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # One name per test: a module of that name that another test imported would be found again.
    helper = f"numbers_beside_{tmp_path.name}"
    (tmp_path / f"{helper}.py").write_text("WINDOW = 8\n")
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(SOURCE).replace("numbers_beside", helper))
    return file


def test_the_function_builds_the_method_and_the_spec_names_it(mine):
    method = from_file("mine.py:short", budget=0.25, window=4)
    assert method.spec == ("mine.py:short", (("budget", 0.25), ("window", 4)))
    assert method.keep == snapkv(0.25, window=4).keep
    assert from_file("mine.py:two_bits").store == kivi(bits=2).store
    assert from_file("mine.py:many", budget=0.5, window=2).keep == snapkv(0.5, window=2).keep


def test_a_helper_beside_the_file_can_be_imported(mine):
    assert from_file("mine.py:short", budget=0.25).keep == snapkv(0.25, window=8).keep


def test_equal_calls_build_equal_methods_until_the_file_changes(mine):
    name = f"{mine}:short"
    assert from_file(name, budget=0.25) == from_file(name, budget=0.25)
    assert load_function(name) is load_function(name)
    before = load_function(name)
    mine.write_text("def short():\n    return None\n")
    assert load_function(name) is not before


BAD = {
    "missing file": (
        "nowhere.py:short",
        {},
        r"nowhere\.py cannot be read \(No such file.*expected the Python file of a method, give its path",
    ),
    "a directory": ("folder.py:short", {}, r"folder\.py is a directory, expected a Python file: give"),
    "no function named": ("mine.py:", {}, r"names no method of a file, expected path/to/file\.py:function"),
    "no file named": ("mine:short", {}, r"names no method of a file, expected path/to/file\.py:function"),
    "misspelt function": ("mine.py:shrt", {}, r"mine\.py has no function 'shrt': did you mean short\?"),
    "absent function": ("mine.py:xyz", {}, r"no function 'xyz': it defines short, two_bits, many"),
    "not a function": ("mine.py:CONSTANT", {}, r"has no function 'CONSTANT'"),
    "wrong return type": (
        "mine.py:nothing",
        {"budget": 0.5},
        r"returned NoneType, expected a kvjax\.grammar\.Method: return what kvjax\.chain",
    ),
    "no budget": ("mine.py:short", {}, r"needs budget=: a fraction such as 0\.25, or a number of slots"),
    "unknown hyper-parameter": (
        "mine.py:short",
        {"budget": 0.5, "windw": 3},
        r"has no hyper-parameter 'windw': did you mean 'window'\?",
    ),
    "a budget where there is none": (
        "mine.py:two_bits",
        {"budget": 0.5},
        r"no hyper-parameter 'budget': it takes none",
    ),
    "failing function": (
        "mine.py:broken",
        {"budget": 0.5},
        r"mine\.py:broken failed: IndexError in line 23: .*: correct",
    ),
}


@pytest.mark.parametrize(("name", "hyper", "message"), BAD.values(), ids=BAD.keys())
def test_whatever_cannot_be_built_says_why(name, hyper, message, mine):
    (mine.parent / "folder.py").mkdir()
    with pytest.raises(InputError, match=message):
        from_file(name, **hyper)


def test_a_value_that_a_word_refuses_keeps_the_words_message(mine):
    with pytest.raises(ValueError, match="budget must be a fraction"):
        from_file("mine.py:short", budget=1.5)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (\n", "SyntaxError in line 1: '\\(' was never closed"),
        ("import os\nimport not_installed_anywhere\n", "ModuleNotFoundError in line 2: No module named"),
    ],
)
def test_a_file_that_fails_to_import_says_where(source, message, tmp_path):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(
        InputError, match=f"bad.py failed to import: {message}.*: correct the file and run again"
    ):
        from_file(f"{tmp_path}/bad.py:f")


def test_the_sources_of_a_method_are_its_file_and_those_of_its_words(tmp_path):
    words, mine = tmp_path / "my_words.py", tmp_path / "mine.py"
    words.write_text(
        "import dataclasses\nfrom kvjax.keep.scores.score import KeyNorm\n"
        "@dataclasses.dataclass(frozen=True)\nclass MyNorm(KeyNorm): pass\n"
    )
    mine.write_text(
        "from kvjax.grammar import Budget, Keep, Method\nfrom kvjax.keep.budgets.budget import Uniform\n"
        "from my_words import MyNorm\n"
        "def mine(budget): return Method(Keep(MyNorm(), Budget(budget), Uniform()))\n"
    )
    method = from_file(f"{mine}:mine", budget=0.25)
    before = sources([method, snapkv(0.5), chain(method, kivi(bits=2))])
    assert [one.split()[0] for one in before] == ["mine.py", "my_words.py"] and sources([snapkv(0.5)]) == []
    words.write_text(words.read_text() + "# edited\n")
    after = sources([method])
    assert after[0] == before[0] and after[1] != before[1]
