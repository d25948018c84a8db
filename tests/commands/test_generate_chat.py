"""`kvjax generate --chat` answers line after line, and says on standard error what the cache holds."""

import contextlib
import io
import shutil
import threading

import pytest

import kvjax
from kvjax.commands import generate_chat
from kvjax.commands.main import main
from kvjax.io.load import SHIPPED

FIRST = (
    "<bos> along the river <set> brave otter 17 4 52 <.> a hill <set> calm fox 8 30 11 <.> <get> brave otter"
)
SECOND = "<get> calm fox"


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(SHIPPED / "recall-tiny", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    return tmp_path / "chat"


@pytest.fixture
def told(folder, monkeypatch, capsys):
    """Run a conversation of these lines; return its exit code, answers, and what standard error said."""

    def run(*lines, words=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        start = ["generate", "--chat", "--model", str(folder), "--max-new-tokens", "4"]
        code = main([*start, *words])
        out = capsys.readouterr()
        return code, out.out.splitlines(), out.err.splitlines()

    return run


@pytest.mark.rotating
def test_lines_are_questions_and_the_cache_is_shown_as_it_grows(told):
    code, said, shown = told(FIRST, "", SECOND, words=["--method", "kvzip", "--budget", "0.5"])
    assert (code, said) == (0, ["17 4 52 <.>", "8 30 11 <.>"])
    reports = [line for line in shown if line.startswith("[read")]
    first, second = len(FIRST.split()), len(SECOND.split())
    assert f"read {first}, wrote 4" in reports[0] and f"read {second}, wrote 4" in reports[1]
    assert f"keeps {first // 2 + 4} of {first + 4} tokens" in reports[0]
    assert all("of the full cache's" in line and "made for 512 tokens" in line for line in reports)
    # One answer after another from one cache compiles nothing anew.
    assert any("compiling" in line for line in shown) and "compiled in" not in reports[1]


@pytest.mark.rotating
def test_commands_act_and_are_no_questions(told, tmp_path, folder):
    path = tmp_path / "talk.cache"
    lines = [
        "/cache",
        "/save x",
        FIRST,
        "/save",
        f"/save {path}",
        "/cache",
        "/nosuch",
        "/reset",
        "/exit",
        FIRST,
    ]
    code, said, shown = told(*lines)
    assert (code, said) == (0, ["17 4 52 <.>"])
    text = "\n".join(shown)
    assert text.count("nothing was read yet") == 2 and "/save needs a file's name" in text
    assert "slots per KV head" in text and "/nosuch is no command" in text
    model = kvjax.load(folder)
    talk = kvjax.load_chat(path, model, max_new_tokens=4)
    assert talk.say(SECOND) == "8 30 11 <.>" and [m["role"] for m in talk.messages[:2]] == [
        "user",
        "assistant",
    ]
    assert kvjax.load_cache(path).next.tolist() == [len(FIRST.split()) + 4]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(told, monkeypatch):
    @contextlib.contextmanager
    def pressed():
        event = threading.Event()
        event.set()
        yield event

    monkeypatch.setattr(generate_chat, "ends_a_part", pressed)
    code, said, shown = told(FIRST, FIRST)
    assert code == 0 and said == ["17", "17"]
    assert sum("wrote 1" in line for line in shown) == 2


@pytest.mark.rotating
def test_an_error_at_a_terminal_leaves_the_conversation(told, monkeypatch):
    lines = iter(["nosuchword", FIRST])

    def ask(prompt):
        assert prompt == "> "
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(generate_chat, "is_attended", lambda: True)
    code, said, shown = told()
    assert code == 0 and said[-2:] == ["17 4 52 <.>", ""]
    assert any("begins anew" in line for line in shown)


BAD = {
    "an unknown word": (["nosuchword"], [], "nosuchword"),
    "a template with --system": (
        [],
        ["--system", "x", "--prompt", "a"],
        "--system was given, expected a conversation",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_answered_is_said_in_one_line(what, told):
    lines, words, why = BAD[what]
    code, said, shown = told(*lines, words=words)
    assert code == 2 and said == [] and why in shown[-1]
    assert not any("Traceback" in line for line in shown)


def test_a_model_without_a_template_is_refused_with_what_to_do(capsys):
    assert main(["generate", "--chat", "--model", "recall-tiny"]) == 2
    said = capsys.readouterr().err
    assert "recall-tiny has no chat template" in said and "chat_template.jinja" in said
