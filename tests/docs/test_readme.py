"""The README and the page of kernels say what is so: commands parse, Python runs and prints what it says."""

import os
import re
import shlex
from pathlib import Path

import pytest

import kvjax
from kvjax.commands.main import make_parser
from scripts.site import api, methods

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
BLOCKS = CODE.findall(README)
KERNELS = CODE.findall((ROOT / "docs" / "kernels.md").read_text())
# Pages that are written by hand or by scripts; the site's build checks links between all of its pages.
PAGES = [
    p for p in ROOT.glob("docs/**/*.md") if p.relative_to(ROOT).parts[1] not in ("reference", "notebooks")
]
COMMANDS = sorted(set(re.findall(r"(?:^|`|&& )(kvjax(?: [^`\n]+)?)(?=`|\n)", README, re.MULTILINE)))


# What `docs/conf.py` makes (`scripts.site.write`).
MADE = {f"docs/reference/{name}.md" for name in ("architectures", "commands", "methods/index")}
MADE |= {f"docs/reference/methods/{name}.md" for name in methods.families()}
MADE |= {f"docs/reference/api/{name}.md" for name in (*api.GROUPS, *api.MODULES, "index")}
MADE |= {f"docs/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}


@pytest.mark.parametrize("command", ["kvjax compare", "pytest"])
def test_one_line_does_all_the_setting_up(command):
    assert f"```\npip install -e '.[dev]' && {command}\n```" in README


def test_the_first_block_runs_and_prints_its_comments(capsys):
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    sizes, first, second = capsys.readouterr().out.splitlines()
    kept = re.findall(r"\d+", re.fullmatch(r"\d+ bytes; (.*) tokens per head", sizes)[1])
    assert sum(map(int, kept)) == len(kept) * (33 // 2)
    assert BLOCKS[0].count(f"  # {first}\n") == BLOCKS[0].count(f"  # {second}\n") == 1


def test_the_second_block_is_snapkv():
    names = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    for hyper in ({}, {"window": 16, "kernel": 7}):
        assert names["snapkv"](0.25, **hyper).keep == kvjax.method("snapkv", budget=0.25, **hyper).keep
    assert len(BLOCKS) == 2


# Each compiles kernels that tests/kernels holds against their equations: one always runs, the others in turn.
IN_TURN = [pytest.param(number, marks=pytest.mark.rotating) for number in range(1, len(KERNELS))]


@pytest.mark.parametrize("number", [0, *IN_TURN])
def test_the_blocks_of_the_page_of_kernels_run_each_alone(number):
    exec(compile(KERNELS[number], f"docs/kernels.md, block {number}", "exec"), {})


def test_the_chain_in_the_text_is_a_method():
    texts = re.findall(r"`(snapkv\(.*?\) \+ kivi\(.*?\))`", README)
    wanted = kvjax.chain(kvjax.method("snapkv", budget=0.25), kvjax.method("kivi", bits=2))
    assert texts and all(kvjax.method(text) == wanted and repr(wanted) == text for text in texts)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    make_parser().parse_args(shlex.split(command)[1:])


def test_the_commands_were_found():
    assert {"kvjax compare", "kvjax methods", "kvjax inspect DIR", "kvjax compare --model DIR"} <= {*COMMANDS}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in PAGES)])
def test_what_is_linked_or_named_exists(page):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:kvjax|models|tests|docs|configs|scripts)/[\w/.-]+)`", text)
    found = {x: os.path.normpath(Path(page).parent / x) for x in links}
    absent = [x for x, path in found.items() if not (ROOT / path).exists() and path not in MADE]
    absent += [x for x in paths if not (ROOT / x).exists()]
    assert not absent
