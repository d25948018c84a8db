"""The estimate before a comparison: it counts what is read, and grows with what is asked."""

import re

import pytest

import kvjax
from kvjax.eval.run import estimate
from kvjax.eval.run.plan import batches_of, planned


@pytest.fixture
def told(monkeypatch):
    """Return what is said of a plan on a device of 10^9 operations per second."""
    model = kvjax.load("recall-tiny")
    monkeypatch.setattr(estimate, "rate", lambda: 1e9)

    def text(methods=("snapkv",), samples=100, tasks=("get",), length=512):
        asked = ([*methods], [0.5], [*tasks], ("agnostic",), samples, length, (0,), None)
        plan, _ = planned(model, *asked)
        return estimate.estimate(plan, batches_of(plan))

    return text


def minutes(text):
    return int(re.search(r"about (\d+) minutes", text)[1])


def test_a_short_run_needs_no_estimate(told):
    assert told(samples=4) == ""


@pytest.mark.rotating
def test_the_estimate_counts_prompts_cells_and_tokens(told):
    text = told()
    assert text.startswith("100 prompts of up to 512 tokens, 4 cells each: about")
    assert minutes(told(samples=400)) > 3 * minutes(text)


def test_methods_that_read_by_themselves_and_probes_take_longer(told):
    assert minutes(told(["kvzip"])) > minutes(told()) + 1
    assert minutes(told(["lazyllm"])) > minutes(told()) + 1


def test_operations_are_those_of_the_paper(told):
    """Two per weight and token, embedding aside, and 4 T^2 d per layer (Kaplan et al., arXiv:2001.08361)."""
    model = kvjax.load("recall-tiny")
    c = model.config
    layer = c.d_model * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.d_model * c.d_ff
    matrices = c.layers * layer
    attention = 4 * c.layers * 512**2 * c.heads * c.head_dim
    assert estimate.operations(model, 512) == pytest.approx(2 * 512 * matrices + attention, rel=0.03)
