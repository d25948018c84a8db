"""What commands print to: closed pipes, full devices, terminals of few letters; names that act on one."""

import csv
import io
import os
import shutil
import subprocess
import sys

import pytest

from kvjax.base.streams import escaped, printable
from kvjax.commands import main as cli
from kvjax.commands.main import BAD_INPUT, BROKEN_PIPE, main
from kvjax.eval.report.console import make_console
from kvjax.eval.report.export import csv_text
from kvjax.io.load import SHIPPED
from tests.sweep import sweep

COMMANDS = (
    "", "--help", "methods", "methods --json", "methods snapkv", "info",
    "explain snapkv(budget=0.25)", "inspect recall-tiny", "architectures",
    "plan --model llama-3-8b --context 8k --batch 1 --topology v5e:2x2",
    "generate --tokens 1,2,3 --max-new-tokens 2",
    *(f"{command} --help" for command in cli.COMMANDS),
)  # fmt: skip
OFTEN = ("--help", "methods --json", "methods snapkv", "explain snapkv(budget=0.25)")


def ends(words):
    """Return the exit code of a command line, `--help` included."""
    try:
        return main(words.split())
    except SystemExit as end:
        return end.code or 0


@pytest.mark.parametrize("words", sweep(COMMANDS, *OFTEN[:2]))
def test_a_device_that_is_full_is_one_line(words, monkeypatch, capsys):
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = ends(words)
    said = capsys.readouterr().err
    assert code == BAD_INPUT and "Traceback" not in said
    assert said.splitlines()[-1].startswith("kvjax: error: the output could not be written (No space")


@pytest.mark.rotating
@pytest.mark.parametrize("words", sweep(COMMANDS, *OFTEN))
def test_a_pipe_without_a_reader_is_no_error(words, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert ends(words) == BROKEN_PIPE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", sweep(COMMANDS, *OFTEN))
def test_an_ascii_terminal_gets_ascii(words, monkeypatch):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert ends(words) == 0
    assert out.buffer.getvalue().decode("ascii") or err.buffer.getvalue().decode("ascii")


def test_streams_that_are_closed_are_written_to_nowhere(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert ends("methods snapkv") == 0 and ends("nothing") == BAD_INPUT
    assert sys.stdout is None and sys.stderr is None


@pytest.mark.rotating
@pytest.mark.parametrize("to", ["/dev/full", "closed"])
def test_a_process_ends_without_a_word_of_python(to):
    shell = f'"{sys.executable}" -m kvjax methods ' + (">/dev/full" if to == "/dev/full" else ">&-")
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.returncode == (0 if to == "closed" else BAD_INPUT)
    assert len(done.stderr.splitlines()) == (0 if to == "closed" else 1)


# --- what acts on a terminal --------------------------------------------------------------------------

ACTS = "\x1b]0;title\x07\x1b[2J\x9b31m\rover"
SAFE = "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\x0dover"


def test_control_characters_are_written_out_and_styles_are_not(capsys):
    assert escaped(ACTS + "\n\té–😀") == SAFE + "\n\té–😀"
    out = make_console(force_terminal=True, width=120)
    out.print(ACTS, style="bold")
    assert capsys.readouterr().out == f"\x1b[1m{SAFE}\x1b[0m\n"


@pytest.mark.parametrize(("given", "width"), [({}, 10_000), ({"width": None}, 10_000), ({"width": 30}, 30)])
def test_a_given_width_holds_in_a_pipe_which_has_none_of_its_own(given, width, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    out = make_console(**given)
    out.print("one two " * 10)
    assert out.width == width and len(capsys.readouterr().out.splitlines()) == (1 if width > 80 else 3)


@pytest.mark.parametrize(
    "before", [["inspect"], ["generate", "--tokens", "1", "--model"], [], ["methods"], ["report"]]
)
def test_names_in_errors_do_not_act(before, capsys):
    assert main([*before, ACTS]) == BAD_INPUT
    said = capsys.readouterr().err
    assert not set(said) & {"\x1b", "\x07", "\x9b", "\r"} and "title" in said


@pytest.mark.rotating
def test_brackets_and_colons_of_names_are_no_styles(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # a long path is cut
    folder = tmp_path / "a[bold]b[" / "c]:smile:\x1b[2J"
    shutil.copytree(SHIPPED / "recall-tiny", folder)
    for words in (["inspect", str(folder)], ["generate", "--model", str(folder), "--tokens", "1,2,3"]):
        assert main([*words, *(["--max-new-tokens", "1"] if words[0] == "generate" else [])]) == 0
    out, err = capsys.readouterr()
    assert "a[bold]b[/c]:smile:\\x1b[2J" in out and "\x1b" not in out + err


def test_half_a_character_is_printed_escaped():
    with io.TextIOWrapper(io.BytesIO(), encoding="utf-8") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        with printable():
            print("a\ud800")
            out.flush()
            assert out.buffer.getvalue() == b"a\\ud800\n"
        assert out.errors == "strict"


# --- spreadsheets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["=1+2", "+cmd|' /C calc'!A0", "-x", "@SUM(A1)", " =1", "\t=1"])
def test_cells_that_begin_like_formulas_are_text(cell):
    [row] = csv.DictReader(io.StringIO(csv_text([{"method": cell}])))
    assert row["method"] == f"'{cell}"
    assert csv_text([{cell: 1}]).startswith(("'", "\"'"))


@pytest.mark.parametrize("cell", ["snapkv", "-0.5", "+1e3", -0.25, 3, None, "a=b", ""])
def test_numbers_and_names_stay_as_they_are(cell):
    [row] = csv.DictReader(io.StringIO(csv_text([{"method": cell, "n": 1}])))
    assert row["method"] == ("" if cell is None else str(cell))
