"""Prompt compression beside eviction: both on the same contexts, and the page has what the data says."""

import numpy as np
import pytest

from scripts.studies import prompts

NOISE = 0.02 * np.array([1, -1, 1, -1, 1, -1])
NLL = np.linspace(0.1, 0.6, prompts.CONTEXTS)


def lines(method, budget, more, protocol="agnostic", tasks=prompts.TASKS):
    """Make a board's lines with one context more than the study has."""
    nll = [*(NLL + more), 99.0]
    one = dict(method=method, budget=budget, protocol=protocol, seed=prompts.SEED, nll=nll)
    return [{**one, "task": task} for task in tasks]


def test_rows_are_paired_with_the_whole_prompt_over_the_full_cache(monkeypatch):
    there = {"cpc 0.5": {task: {"nll": [*NLL + 0.5 + NOISE], "kept": 0.45} for task in prompts.TASKS}}
    found = [
        *lines("full", None, 0.0),
        *lines("tova", 0.5, 0.3 + NOISE),
        *lines("kvzip", 0.5, 0.1, tasks=("vt",)),
    ]
    monkeypatch.setattr(prompts.DATA, "read", lambda: there)
    monkeypatch.setattr(prompts.board, "at_1024", lambda: [*found, {**found[0], "seed": 1}])
    rows = [line.split(" | ") for line in prompts.table().splitlines()[2:]]
    assert [row[0] for row in rows] == ["| prompt: `cpc`", "| cache: `tova`"]
    assert rows[0][1:3] == ["45", "yes"] and rows[1][1:3] == ["50", "no"]
    assert [row[3].split()[0] for row in rows] == ["+0.50", "+0.30"]


def test_the_page_has_what_the_data_says():
    assert prompts.PAGE.agrees()


@pytest.mark.parametrize("name", prompts.ASKING)
def test_compressors_are_those_that_there_are(name):
    from kvjax.prompts.compressors import COMPRESSORS

    assert COMPRESSORS[name].needs_question == prompts.ASKING[name]
