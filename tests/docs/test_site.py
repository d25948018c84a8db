"""The site's pages: code runs and prints what they say, commands parse, generated pages are whole."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import kvjax
from kvjax.commands.main import main, make_parser
from kvjax.models.architectures import architectures
from scripts.site import api, commands, families
from scripts.site import architectures as architecture_cards
from tests.models.gguf_files import CONVERTED

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(p for folder in ("tutorials", "how-to") for p in (DOCS / folder).glob("*.md"))
BLOCK = re.compile(r"^ *```(python|console)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
RUN = [page for page in PAGES if BLOCK.search(page.read_text())]
# Each compiles its own programs: one runs every time, the others in turn.
EVERY_TIME = ("write-a-method",)
IN_TURN = [
    pytest.param(page, id=page.stem, marks=() if page.stem in EVERY_TIME else pytest.mark.rotating)
    for page in RUN
]


def run(kind, code, page, names):
    """Run a block as a reader would: Python in one session, commands one after the other."""
    if kind == "python":
        exec(compile(code, f"{page.stem}.md", "exec"), names)
    else:
        for line in code.splitlines():
            assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.rotating
@pytest.mark.parametrize("page", IN_TURN)
def test_a_page_runs_and_prints_its_comments(page, capsys, tmp_path, monkeypatch):
    for file in (*(DOCS / "examples").glob("*.py"), DOCS.parent / "README.md"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # one page sets it
    names, blocks = {}, BLOCK.findall(page.read_text())
    for kind, code in blocks:
        run(kind, code, page, names)
    printed = iter(capsys.readouterr().out.splitlines())
    code = "\n".join(code for kind, code in blocks if kind == "python")
    shown = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert shown and [text for text in shown if text not in printed] == []  # in this order


def test_the_pages_that_run_are_found():
    assert len(RUN) > 10 and {"compress-a-cache", "train-and-convert"} <= {page.stem for page in RUN}


WITH_COMMANDS = [p for p in (*PAGES, *DOCS.glob("*.md")) if re.search("^kvjax ", p.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_parse(page):
    blocks = re.findall(r"```(?:console)?\n(.*?)```", page.read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    for line in re.findall(r"^kvjax .*$", text, re.MULTILINE):
        words = shlex.split(re.sub(r"[<>] .*|&.*", "", line), comments=True)[1:]
        # lm-eval hands on what it does not know.
        parse = make_parser().parse_known_args if words[0] == "lm-eval" else make_parser().parse_args
        assert parse(words)


def test_the_python_of_every_page_compiles():
    found = 0
    for page in DOCS.glob("**/*.md"):
        for code in re.findall(r"^ *```python.*?\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(code, page.name, "exec")
            found += 1
    assert found > 40


def test_every_public_name_stands_in_the_reference_once():
    names = [name for _, group in api.GROUPS.values() for name in group.split()]
    assert sorted([*names, *api.MODULES]) == sorted([*kvjax.__all__, "nnx"])


def test_every_command_and_every_architecture_has_its_section():
    text = commands.page()
    assert all(f"## kvjax {name}\n\n```text\nusage: kvjax {name}" in text for name in commands.COMMANDS)
    cards = architecture_cards.page()
    assert all(f"\n## {one.id}\n" in cards and one.title in cards for one in architectures())


def test_docstrings_keep_their_examples_and_lose_their_markup():
    lines = ["`x` and *b", "", ">>> f(*a)", "[`1`]", "", "n_ of ``y``"]
    assert api.plain_docstring(lines) == ["``x`` and \\*b", "", ">>> f(*a)", "[`1`]", "", "n_ of ``y``"]


@pytest.mark.parametrize("page", families.PAGES)
def test_families_on_pages_are_those_that_load(page):
    text = (families.ROOT / page).read_text()
    assert families.with_table(text, families.NAME, families.PAGES[page]()) == text
    # The table names the families whose files llama.cpp's converter wrote, and no other.
    assert {*families.GGUF} == {config["model_type"] for config in CONVERTED.values()}
    assert all(row.title for row in families.FAMILIES.values())
