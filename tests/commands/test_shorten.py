"""`kvjax shorten`: text on the standard output, counts beside it, and what is refused."""

import re

import pytest

from kvjax.commands.main import main

TEXT = "def add(a, b):\n    return a + b\n"
MODEL = ["--model", "bytes-tiny"]


@pytest.mark.rotating
def test_the_text_goes_to_the_output_and_the_counts_beside_it(tmp_path, capsys):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(TEXT * 2)
    two.write_text("x = 1\n")
    assert main(["shorten", *MODEL, "--file", str(one), "--keep", "1"]) == 0
    found = capsys.readouterr()
    assert found.out == TEXT * 2 + "\n" and "kept 64 of 64 tokens (100%)" in found.err
    words = ["--file", str(one), str(two), "--question", "What is x?", "--by", "cpc", "--keep", "0.2"]
    assert main(["shorten", *MODEL, *words]) == 0
    found = capsys.readouterr()
    assert len(found.out) <= 17 and "of 2 documents" in found.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--file", "nothing.txt"], "nothing.txt cannot be read"),
        (["--file", "FILE", "--set", "segment"], "--set was given 'segment', expected a number"),
        (["--file", "FILE", "--set", "segment=0"], "segment is 0, expected at least 1"),
        (["--file", "FILE", "--set", "width=3"], "llmlingua was given the option width, expected segment"),
        (["--file", "FILE", "--by", "cpx"], "by='cpx' was given.*did you mean cpc"),
        (["--file", "FILE", "--keep", "2"], "keep=2.0 was given, expected the share"),
    ],
)
def test_bad_input_is_one_line(words, told, tmp_path, capsys):
    (tmp_path / "a.py").write_text(TEXT)
    words = [str(tmp_path / "a.py") if word == "FILE" else word for word in words]
    assert main(["shorten", *MODEL, *words]) == 2
    error = capsys.readouterr().err
    assert re.search(told, error) and error.count("\n") == 1
