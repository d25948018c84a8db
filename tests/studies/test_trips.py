"""How many functions one call enters while JAX traces it: no more than the page says."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from scripts.studies.trips import files_of

PAGE = Path(__file__).parents[2] / "docs/explanation/step.md"
SAID = re.findall(r"at most (\d+) functions in (\d+) files \(`([\w-]+)`\)", PAGE.read_text())


@pytest.mark.parametrize(("functions", "files", "call"), SAID)
def test_a_call_enters_no_more_than_the_page_says(functions, files, call):
    # What an earlier call has cached would not be entered again.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        found = apart.submit(files_of, call).result()
    assert sum(map(len, found.values())) <= int(functions)
    assert len(found) <= int(files)


def test_the_page_says_it_of_a_step_and_of_a_prompt():
    assert {call for *_, call in SAID} == {"h2o-step", "snapkv-prefill"}
