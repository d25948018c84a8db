"""Tasks that are Python functions: what they may give, what is refused, and a comparison that asks them."""

import importlib.util
import io
import json
from inspect import unwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import plan_cells
from kvjax.eval.tasks.sample import TASKS
from kvjax.eval.tasks.suite import make_suite
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_task.py"
CONFIG = Config(vocab=256, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=24, max_positions=128)


@pytest.fixture(scope="module")
def bare():
    """Make a model without a tokenizer."""
    return Model(CONFIG, init(CONFIG, jax.random.key(0)), name="bare")


@pytest.fixture(scope="module")
def behind():
    spec = importlib.util.spec_from_file_location("own_task", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.behind


def test_a_function_asks_the_same_by_seed_and_context_and_others_by_other_ones(bare, behind):
    suite, again, other = (make_suite(bare, [behind], length=64, seed=seed) for seed in (0, 0, 1))
    (one,), (two,) = suite.rows(0, "aware")[0], suite.rows(1, "aware")[0]
    assert one == again.rows(0, "agnostic")[0][0] and one.context not in (
        two.context,
        other.rows(0, "aware")[0][0].context,
    )
    assert suite.tasks == ("behind",) and len(one.context) + len(one.question) == 64
    at = one.context.index(one.question[1], one.context.index(3) + 1)
    assert one.context[at + 1] == one.answer[0]
    assert suite.grade(one, [*one.answer, 9]).score == 1.0 and suite.grade(one, [0]).score == 0.0
    assert suite.words([3, 250]) == ["3", "250"]


def test_texts_are_read_by_the_models_tokenizer_as_one():
    model = kvjax.load("recall-tiny")
    texts = "<bos> along the river <set> brave otter 17 4 52 <.>", " <get> brave otter", " 17 4 52 <.>"
    (sample,) = make_suite(model, [lambda rng, tokens: texts]).rows(0, "aware")[0]
    whole = model.tokenizer.encode("".join(texts)).ids
    assert [*sample.context, *sample.question, *sample.answer] == whole and len(sample.question) == 3


def test_functions_stand_beside_tasks_that_are_built_in_and_in_files():
    model = kvjax.load("recall-tiny")
    suite = make_suite(model, ["get", f"{EXAMPLE}:behind"], length=96)
    assert suite.tasks == ("get", "behind") and [row[0].task for row in suite.rows(0, "aware")] == [
        "get",
        "behind",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "the task mine gave 3, expected .context, question, answer."),
        (([1], [2]), "expected .context, question, answer."),
        (([1], [], [2]), "gave an empty question"),
        (([1], [2], [256]), "gave ids from 256 to 256, expected 0 to 255"),
        (([1], [-2], [2]), "gave ids from -2"),
        (([1.5], [2], [3]), "expected three texts, or three lists of token ids"),
        (([1], "two", [3]), "expected three texts, or three lists of token ids"),
        (([1] * 64, [2], [3]), "of 65 tokens, expected at most 64"),
        (("a", "b", "c"), "has no tokenizer"),
        (ValueError("no luck"), "the task mine failed: ValueError: no luck"),
    ],
)
def test_what_a_function_gives_that_cannot_be_asked_is_said_in_one_sentence(bare, given, message):
    def mine(rng, tokens):
        if isinstance(given, Exception):
            raise given
        return given

    with pytest.raises(InputError, match=message) as error:
        make_suite(bare, [mine], length=64).rows(0, "aware")
    assert "\n" not in str(error.value)


def test_tasks_that_are_none_are_named(bare, behind):
    with pytest.raises(InputError, match="a task is 3, expected a name, a path of a file, or a function"):
        unwrap(make_suite)(bare, [3])
    for tasks, message in (
        ([behind, f"{EXAMPLE}:behind"], "two tasks are called behind"),
        ([f"{EXAMPLE}:behnd"], "no function 'behnd': did you mean behind"),
        (list(TASKS), "bare has no tokenizer, and the task get asks in words: .*tasks=.function."),
    ):
        with pytest.raises(InputError, match=message):
            make_suite(bare, tasks)
    with pytest.raises(InputError, match="leave out the protocol multi-turn"):
        make_suite(bare, [behind]).rows(0, "multi-turn")


@pytest.mark.rotating
def test_a_model_without_a_tokenizer_is_compared_by_a_function(bare, behind, tmp_path):
    found = kvjax.compare(
        bare, ["int8"], tasks=[behind], budgets=[0.5], protocols=["aware"], samples=2, length=32,
        out=tmp_path / "run",
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    assert {cell.method for cell in found.cells} >= {"full", "int8"}
    assert all(list(cell.tasks) == ["behind"] for cell in found.cells)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["settings"]["sources"][0].startswith("function behind ")
    assert "--tasks behind" in metrics["command"]
    # What the full cache says is what the model says of the whole text.
    row = next(row for row in found.rows if row["method"] == "full")
    suite = make_suite(bare, [behind], length=32)
    samples = [suite.rows(i, "aware")[0][0] for i in range(2)]
    (sample,) = [s for s in samples if s.id == row["id"]]
    logits, _ = kvjax.prefill(bare, [[*sample.context, *sample.question]])
    assert row["prediction"] == str(int(np.argmax(logits[0])))


@pytest.mark.parametrize("model", [["snapkv"], 3, None])
def test_what_is_no_model_is_refused_before_anything(model):
    with pytest.raises(InputError, match="model is .*, expected a name, or what kvjax.load returns: "):
        unwrap(kvjax.compare)(model)


def test_a_method_that_is_none_is_refused_before_anything(bare, behind):
    with pytest.raises(InputError, match="a method is 3, expected text such as 'snapkv', a Method, or"):
        unwrap(plan_cells)(bare, [3], None, "short")
