"""Right answers that are fed in one pass: the same predictions as step by step, and -log p as elsewhere."""

import jax
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.compare import compare
from kvjax.eval.run import scanned as scanned_module
from kvjax.eval.run.plan import batches_of, planned
from kvjax.eval.run.scanned import runs_scanned
from kvjax.eval.tasks.reader import joiner_of
from kvjax.eval.tasks.rows import make_rows, targets_of
from kvjax.eval.tasks.sample import ForcedSample
from kvjax.eval.tasks.suite import make_suite
from kvjax.plan.cache_sizes import abstract_params
from tests.sweep import sweep

QUIET = Console(quiet=True)
ASKED = dict(budgets=[0.5], samples=2, length=128, console=QUIET)


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


@pytest.mark.parametrize("methods", sweep(["snapkv", "snapkv kivi h2o quest"], "snapkv"))
@pytest.mark.parametrize("protocol", sweep(("agnostic", "aware", "multi-turn"), "agnostic"))
def test_one_pass_predicts_what_steps_predict(model, protocol, methods, tmp_path):
    """snapkv takes one pass, kivi and quest several (their tails leave between two), h2o single steps."""
    asked = ASKED | dict(
        methods=methods.split(),
        protocols=(protocol,),
        tasks=["get", "chase"] if " " in methods else ["get"],
        baselines=False,
    )
    written = compare(model, out=tmp_path / "written", **asked)
    gold = compare(model, out=tmp_path / "gold", gold=True, **asked)
    name = lambda row: (row["method"], row["budget"], row["task"], row["id"])  # noqa: E731
    for mine, other in zip(sorted(gold.rows, key=name), sorted(written.rows, key=name), strict=True):
        assert name(mine) == name(other)
        assert [mine[k] for k in ("prediction", "score")] == [other[k] for k in ("prediction", "score")]
        assert (mine["kept_bytes"], mine["span_kept"]) == (other["kept_bytes"], other["span_kept"])
        assert (mine["score"] == 1.0) <= (mine["nll"] < np.log(model.config.vocab))
    assert not any(key.startswith("decode") for cell in gold.metrics["cells"] for key in cell)


@pytest.mark.rotating
def test_a_deep_model_is_looped_over_where_a_method_treats_its_layers_alike(model, tmp_path, monkeypatch):
    """Of four layers two and two are a loop; what picks in one layer for the next runs without."""
    asked = ASKED | dict(
        methods=["pyramidkv"], tasks=["get"], protocols=("agnostic",), samples=1, baselines=False
    )
    plain = compare(model, out=tmp_path / "plain", gold=True, **asked)
    looped = []
    regrouped = type(model).regrouped
    monkeypatch.setattr(scanned_module, "DEEP", 3)
    monkeypatch.setattr(type(model), "regrouped", lambda *a: looped.append(regrouped(*a)) or looped[-1])
    deep = compare(model, out=tmp_path / "deep", gold=True, **asked)
    assert [len(one.params["layers"]) for one in looped] == [2]
    texts = (
        "pyramidkv(budget=0.5)",
        "kivi",
        "tidaldecode(budget=0.5)",
        "gemfilter(budget=0.5, filter_layer=2)",
    )
    assert [runs_scanned(looped[0], kvjax.method(text)) for text in texts] == [True, True, False, False]
    for mine, other in zip(deep.rows, plain.rows, strict=True):
        assert mine.pop("nll") == pytest.approx(other.pop("nll"), rel=1e-4, abs=1e-5)
        assert {**mine, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.rotating
def test_nll_of_the_full_cache_is_the_likelihood_of_the_answer(model, tmp_path):
    found = compare(
        model, ["full"], out=tmp_path / "a", gold=True, baselines=False,
        protocols=("agnostic", "aware"), **ASKED
    )  # fmt: skip
    suite = make_suite(model, length=128, contexts=2)
    samples = {s.id: s for i in range(2) for row in suite.rows(i, "agnostic") for s in row}
    rows = [row for row in found.rows if row["method"] == "full"]
    assert len(rows) == 2 * len(samples)
    for row in rows:
        sample = samples[row["id"]]
        text = [*sample.context, *sample.question, *sample.answer]
        told = kvjax.likelihood(model, [text]).logprobs[0, -len(sample.answer) :]
        assert row["nll"] == pytest.approx(-told.mean(), abs=2e-4)
        # Where the needle lies, and the first sample of every task with what was said to it.
        depth = min(start for start, _ in sample.spans) / len(sample.context)
        assert row["context_tokens"] == len(sample.context)
        assert row["depth"] == pytest.approx(depth, abs=1e-4) and 0 <= depth < 1
    examples = {one["task"]: one for one in found.metrics["examples"]}
    assert examples.keys() == {row["task"] for row in rows}
    for task, one in examples.items():
        first = next(row for row in rows if row["task"] == task)
        assert (one["answer"], one["said"][0]["prediction"]) == (first["answer"], first["prediction"])
        needed = [piece["text"].strip() for piece in one["prompt"] if piece.get("needed")]
        words = [suite.words(samples[first["id"]].context[a:b]) for a, b in samples[first["id"]].spans]
        spans = (joiner_of(span).join(span).strip() for span in words[:4])
        assert all(any(span in piece for piece in needed) for span in spans)
    sizes = [x.size for x in jax.tree.leaves(abstract_params(model.config, "float32"))]
    assert found.metrics["parameters"] == sum(sizes)


def test_rows_of_one_batch_are_of_one_task(model):
    asked = (["full"], [0.5], ["get", "copy"], ("agnostic",), 3, 128, (0,), None)
    plan, _ = planned(model, *asked, gold=True)
    batches = batches_of(plan)
    assert [{s.task for row in b.rows for s in row} for b in batches] == [{"get"}, {"copy"}]
    assert sum(len(b.rows) for b in batches) == 6


def test_targets_stand_where_they_are_predicted():
    sample = ForcedSample("a", "t", (5, 6), (7, 8), (1, 2, 3), ())
    late = targets_of(make_rows([[sample]], "agnostic", 4, 6, 1))
    assert late.tolist() == [[-1, 1, 2, 3, -1, -1]]
    early = targets_of(make_rows([[sample]], "aware", 4, 6, 1))
    assert early.tolist() == [[1, 2, 3, -1, -1, -1]]


def test_answers_without_one_right_form_are_refused(model, tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text('{"input": "<bos> brave\\n<get> brave", "outputs": ["otter"]}\n')
    with pytest.raises(InputError, match="no one right answer that could be fed"):
        make_suite(model, [str(file)], gold=True)
    assert main(["compare", "--tasks", str(file), "--gold", "--samples", "1"])
    assert "leave --gold away" in capsys.readouterr().err
