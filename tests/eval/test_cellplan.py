"""Cells: texts become sentences, presets fill in what they leave out, anchors are always there."""

import dataclasses

import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import ALWAYS, FIRST, WELL_KNOWN, plan_cells
from kvjax.eval.run.command import command_of
from kvjax.methods import METHODS, takes_budget
from kvjax.models.mixers.attention import Attention


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


def test_the_anchors_come_first_and_once(model):
    entries = plan_cells(model, ["random", "snapkv"], [0.5, 0.25], "short")
    labels = [(e.label, e.budget) for e in entries]
    assert labels[0] == ("full", None) and labels.count(("random", 0.5)) == 1
    assert labels[-2:] == [("snapkv", 0.5), ("snapkv", 0.25)]


def test_a_preset_fills_in_what_a_text_leaves_out(model):
    kivi = plan_cells(model, ["snapkv+kivi:bits=4"], [0.5], "long")[-1].method
    assert kivi.spec[1][2] == ("kivi", (("bits", 4), ("group", 32), ("residual", 128)))
    assert kivi.keep.protect[0].tokens == 64


def test_kvzip_asks_the_shipped_model_in_its_own_words(model):
    kvzip = plan_cells(model, ["kvzip"], [0.5], "short")[-1].method
    assert kvzip.keep.probe.prefix == (model.tokenizer.token_to_id("<copy>"),)
    assert kvzip.keep.score.probe == kvzip.keep.probe


@pytest.mark.rotating
def test_all_stands_for_everything_in_the_table_that_needs_no_fit_or_comes_with_one(model):
    entries = plan_cells(model, ["all"], [0.5], "short")
    # The codebooks of CQ are too large to come with the package.
    assert {e.label for e in entries} == set(METHODS) - {"cq", "commvq"}
    assert all((e.budget is None) != takes_budget(e.label) for e in entries)


def test_without_methods_eight_run_at_two_budgets(model):
    entries = plan_cells(model, None, None, "short")
    assert {e.label for e in entries} == {*ALWAYS, *FIRST} and len({*ALWAYS, *FIRST}) == 8
    assert {e.budget for e in entries} == {None, 0.5, 0.25}


def test_well_known_methods_are_of_every_family(model):
    entries = plan_cells(model, ["well-known", "corm"], [0.5], "short")
    assert {e.label for e in entries} == {*ALWAYS, *WELL_KNOWN, "corm"}
    assert len({info.family for info in kvjax.methods() if info.id in WELL_KNOWN}) >= 8


@pytest.mark.rotating
def test_all_goes_with_other_texts_and_says_what_is_wrong_with_a_named_one(model):
    labels = [e.label for e in plan_cells(model, ["snapkv:window=16", "all"], [0.5], "short")]
    assert {"snapkv", "snapkv:window=16"} < {*labels} and len({*labels}) == len(labels)
    other = dataclasses.replace(model, params=model.params | {"embed": -model.params["embed"]})
    assert "ccm" not in {e.label for e in plan_cells(other, ["all"], [0.5], "short")}
    with pytest.raises(InputError, match="run `kvjax fit ccm --model MODEL"):
        plan_cells(other, ["ccm", "all"], [0.5], "short")


@pytest.mark.rotating
def test_all_leaves_out_what_rewrites_weights_where_a_model_has_others(model):
    mixers = (*[Attention()] * 3, Attention(gate=True))
    gated = dataclasses.replace(model, config=dataclasses.replace(model.config, mixers=mixers))
    entries = plan_cells(gated, ["all"], [0.5], "short")
    assert "palu" not in {e.label for e in entries} and len(entries) > 20


@pytest.mark.parametrize("budgets", [[0.5, 0.5], [1, 0.5, 1.0]])
def test_equal_budgets_are_refused(model, budgets):
    with pytest.raises(InputError, match="--budgets .* has equal numbers, expected every one once"):
        plan_cells(model, ["snapkv"], budgets, "short")


@pytest.mark.parametrize("budgets", [[0.0], [1.5], [-1], [0]])
def test_impossible_budgets_are_refused_before_anything_runs(model, budgets):
    with pytest.raises(ValueError, match="budget"):
        plan_cells(model, ["snapkv"], budgets, "short")


def test_a_comparison_without_baselines_has_the_methods_alone(model):
    entries = plan_cells(model, ["int8"], None, "short", baselines=False)
    assert [entry.label for entry in entries] == ["int8"]
    with pytest.raises(InputError, match="nothing is left to compare without the baselines: give --methods"):
        plan_cells(model, [], None, "short", baselines=False)
    assert command_of(model="m", methods=["int8"], baselines=False).endswith("--methods int8 --no-baselines")
