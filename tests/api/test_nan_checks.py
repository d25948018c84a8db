"""NaN in scores, weights and logits stops a run and says where it began."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.perplexity import stream_text
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.when import STEP, Every
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.scores.expected import ExpectedAttention
from kvjax.models.model import Model
from kvjax.state.codes import Codec
from tests.methods.battery import MAIN, model
from tests.sweep import sweep


@dataclasses.dataclass(frozen=True)
class LogOfNegative(Word):
    """A score that is no number in one row of one layer."""

    layer: int = 1

    def __call__(self, view, seen):
        row = jnp.arange(view.pos.shape[0])[:, None, None]
        return jnp.where((seen.layer == self.layer) & (row == 2), jnp.nan, view.pos.astype(jnp.float32))


BROKEN = Method(Keep(LogOfNegative(), Budget(0.5), Uniform()))


@dataclasses.dataclass(frozen=True)
class Forgets(Codec):
    """A codec that returns no numbers."""

    granule = 1

    def encode(self, x):
        return {"x": x}

    def decode(self, data, width, dtype):
        return data["x"] * jnp.nan


def spoiled(layer: int | None) -> Model:
    """Make one weight of a layer of a model, or of its embedding, no number."""
    m = model("4/2")
    if layer is None:
        return Model(m.config, {**m.params, "embed": m.params["embed"].at[MAIN.first[0][0]].set(jnp.nan)})
    groups = list(m.params["layers"])
    sizes = [jax.tree.leaves(g)[0].shape[0] for g in groups]
    at = next(i for i in range(len(sizes)) if sum(sizes[: i + 1]) > layer)
    name = next(n for n in groups[at] if "down" in n)
    groups[at] = {**groups[at], name: groups[at][name].at[layer - sum(sizes[:at])].set(jnp.nan)}
    return Model(m.config, {**m.params, "layers": type(m.params["layers"])(groups)})


@pytest.mark.parametrize(
    "hyper", [dict(future=0), dict(future=-5), dict(epsilon=float("nan")), dict(epsilon=float("inf")),
              dict(epsilon=-1.0), dict(sinks=-1)], ids=str,
)  # fmt: skip
def test_expected_attention_refuses_what_gives_no_numbers(hyper):
    with pytest.raises(ValueError, match="needs future >= 1 positions, sinks >= 0 and a finite epsilon >= 0"):
        ExpectedAttention(**hyper)


@pytest.mark.rotating
@pytest.mark.parametrize("verb", sweep([kvjax.prefill, kvjax.generate], kvjax.generate))
@pytest.mark.parametrize("chunk", sweep([None, 16], 16))
def test_a_score_that_is_no_number_names_method_and_layer(verb, chunk):
    with pytest.raises(InputError, match=r"custom: a score of layer 1 \(row 2\) is not a number"):
        verb(model("4/2"), MAIN.first, method=BROKEN, chunk=chunk)


def test_nothing_is_scored_where_nothing_is_compressed():
    logits, cache = kvjax.prefill(model("4/2"), MAIN.first, method=BROKEN, compress=False)
    want, full = kvjax.prefill(model("4/2"), MAIN.first)
    np.testing.assert_allclose(logits, want, atol=1e-5)
    for kept, every in zip(kvjax.kept_positions(cache), kvjax.kept_positions(full), strict=True):
        np.testing.assert_array_equal((kept >= 0).sum(-1), (every >= 0).sum(-1))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("layer", "where"),
    sweep([(0, "layer 0"), (1, "layer 1 or of the last matrix"), (None, "the embedding")], (0, "layer 0")),
)
def test_a_prompt_without_numbers_names_the_first_layer(layer, where):
    with pytest.raises(
        InputError, match=f"the prompt are not numbers .*first in the output of {where}: check"
    ):
        kvjax.generate(spoiled(layer), MAIN.first, max_new_tokens=2, method="int8")


@pytest.mark.rotating
def test_a_float16_model_that_overflows_is_refused_by_prefill_alone():
    m = kvjax.load("recall-tiny", dtype="float16")
    groups = [{**g, "down": g["down"] * 30_000} for g in m.params["layers"]]
    large = dataclasses.replace(m, params={**m.params, "layers": tuple(groups)})
    says = "the logits of the prompt are not numbers .*first in the output of layer .*dtype="
    for options in (dict(), dict(method="int8", chunk=2)):
        with pytest.raises(InputError, match=says):
            kvjax.prefill(large, [[1, 2, 3], [4, 5]], **options)
    assert not jnp.isnan(kvjax.prefill(m, [[1, 2, 3]])[0]).any()


@pytest.mark.rotating
def test_a_step_without_numbers_is_named():
    shown = []
    with pytest.raises(InputError, match="not numbers .* at step 1 with method custom, after"):
        kvjax.generate(
            model("4/2"), MAIN.first, method=Method(store=Store(Forgets(), None)), max_new_tokens=4,
            on_token=lambda i, _: shown.append(i),
        )  # fmt: skip
    assert shown == [0]


@dataclasses.dataclass(frozen=True)
class LogOfAge(Word):
    """A score that is no number once a row has seen 34 tokens."""

    def __call__(self, view, seen):
        old = (seen.length >= 34)[:, None, None]
        return jnp.where(old, jnp.nan, view.pos.astype(jnp.float32))


@pytest.mark.rotating
@pytest.mark.parametrize("when", sweep([STEP, Every(2)], STEP), ids=repr)
def test_slots_that_cannot_be_ranked_in_a_step_stop_the_text_there(when):
    """Else nothing would leave, and new tokens would find no empty slot."""
    method = Method(Keep(LogOfAge(), Budget(0.5), Uniform(), when=when))
    with pytest.raises(InputError, match="or a score of the method, are not numbers .* at step [234] with"):
        kvjax.generate(model("4/2"), MAIN.first, method=method, max_new_tokens=6)


# --- the command line and comparisons --------------------------------------------------------------------


@pytest.fixture(scope="module")
def recall():
    """Load the shipped model, and the same with one weight of its second layer that is no number."""
    m = kvjax.load("recall-tiny")
    groups = list(m.params["layers"])
    name = next(n for n in groups[-1] if "down" in n)
    groups[-1] = {**groups[-1], name: groups[-1][name].at[0].set(jnp.nan)}
    return m, dataclasses.replace(m, params={**m.params, "layers": type(m.params["layers"])(groups)})


@pytest.mark.rotating
def test_the_command_line_stops_with_code_2(recall, monkeypatch, capsys):
    monkeypatch.setattr("kvjax.io.load.load", lambda *_, **__: recall[1])
    monkeypatch.setattr("kvjax.commands.generate_stream.load", lambda *_, **__: recall[1], raising=False)
    assert main(["generate", "--tokens", "1,2,3", "--max-new-tokens", "2"]) == 2
    assert "the logits of the prompt are not numbers (NaN), first in the output of" in capsys.readouterr().err


@pytest.mark.rotating
def test_a_comparison_stops_where_the_model_gives_no_numbers(recall, tmp_path):
    with pytest.raises(InputError, match="the logits of the prompt are not numbers"):
        kvjax.compare(model=recall[1], methods=["full"], samples=1, tasks=["get"], length=64,
                      budgets=[0.5], protocols=("agnostic",), out=tmp_path)  # fmt: skip


@pytest.mark.rotating
def test_a_text_stops_where_a_method_gives_no_numbers(recall, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(["<set> brave otter 17 4 52 <.>"] * 20))
    for method, why in (
        (Method(store=Store(Forgets(), None)), "at step 0 with method mine"),
        (Method(Keep(LogOfNegative(0), Budget(0.5), Uniform())), "mine: a score of layer 0"),
    ):
        with pytest.raises(InputError, match=why):  # fmt: skip
            stream_text(recall[0], [PlannedCell("mine", None, method)], text, length=16, windows=3, steps=4)
