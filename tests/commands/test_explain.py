"""`kvjax explain`: every word of a sentence has its say, and the numbers are those of real caches."""

import dataclasses
import json
import re

import jax
import pytest

import kvjax
from kvjax.commands.explain_print import weight
from kvjax.commands.explain_sentences import at_each_step, at_prefill, inside, said
from kvjax.commands.main import main
from kvjax.commands.methods_cards import shown
from kvjax.commands.terminal import size
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.when import Every
from kvjax.keep.algebra import Pool, Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Recent
from kvjax.methods import METHODS, takes_budget
from kvjax.methods.parse import parse_method
from kvjax.state.cache import kept_positions, nbytes
from kvjax.store.affine import Affine
from tests.methods.battery import model
from tests.models.hf_cases import CASES as HF
from tests.sweep import sweep


def below(word) -> list:
    return [word, *(deep for one in inside(word) for deep in below(one))]


def words_told(method) -> list:
    told = [*at_prefill(method, 512), *at_each_step(method)]
    return [deep for one in told for word in one.words for deep in below(word)]


def parts_of(method) -> list:
    """List the words of a sentence that decide something, as a test would list them."""
    keep, store = method.keep, method.store
    found = [method.make, method.reread, method.read, method.host, method.stack]
    found += [] if keep is None or keep.score is None else [keep.score, keep.merge, keep.probe, *keep.protect]
    found += [] if keep is None else [keep.narrow]
    found += [] if store is None else [store.keys, store.values]
    return [word for word in found if word is not None]


@pytest.mark.parametrize("id", METHODS)
def test_every_word_of_a_sentence_has_its_say(id):
    method = shown(id)
    told = words_told(method)
    for part in parts_of(method):
        for word in below(part):
            assert word in told and said(word), word
    # What a word says of itself ends like a sentence or is one formula, and names none of its fields bare.
    assert all(len(said(word)) > 8 for word in told)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (Recent(64), "The newest 64 tokens."),
        (Recent(0.5), "The newest share 0.5 of the budget."),
        (Every(1), "After every token, each KV head evicts slots down to its budget."),
        (Every(128), "After every 128 tokens, each KV head evicts slots down to its budget."),
        (Budget(0.25), "0.25 of all slots."),
        (Budget(64), "64 slots."),
        (
            Affine(2, "channel", 32),
            "2 bits a number, with a scale and a zero of 16 bits for 32 tokens of a channel.",
        ),
        (Affine(8), "8 bits a number, with a scale and a zero of 16 bits for all channels of a token."),
        (Pool(7), 'Smoothing along the slots: "mean" or "max" over 7 neighbours, zeros beyond the ends.'),
    ],
)
def test_a_word_says_its_own_numbers(word, sentence):
    assert said(word) == sentence


@dataclasses.dataclass(frozen=True)
class Mine(Word):
    """Every `step`-th slot matters."""

    step: int

    def __call__(self, view, seen):
        return (view.pos % self.step == 0).astype("float32")


@dataclasses.dataclass(frozen=True)
class Silent(Word):
    step: int


def test_a_word_of_ones_own_is_explained_like_any_other(capsys):
    told = words_told(Method(Keep(Mine(3), Budget(0.5), Uniform())))
    assert [said(word) for word in told if isinstance(word, Mine)] == ["Every 3-th slot matters."]
    assert said(Silent(3)) == ""


def test_a_merge_is_told_where_it_acts():
    d2o, cam = (METHODS[id](budget=0.5) for id in ("d2o", "cam"))
    told = lambda method, part: [w for one in part(method) for w in one.words if w == method.keep.merge]  # noqa: E731
    prompt = lambda method: at_prefill(method, 512)  # noqa: E731
    assert [len(told(m, part)) for m in (d2o, cam) for part in (prompt, at_each_step)] == [1, 1, 0, 1]


@pytest.mark.rotating
def test_the_budget_that_is_told_is_the_number_of_slots_that_stay():
    method = kvjax.method("snapkv", budget=0.3, window=7)
    _, cache = kvjax.prefill(model("4/2"), [list(range(50))], method=method)
    lists = {
        int((pos[0, head] >= 0).sum()) for pos in jax.device_get(kept_positions(cache)) for head in (0, 1)
    }
    (n,) = lists
    (told,) = (one.text for one in at_prefill(method, 50) if "budget" in one.text)
    assert told == f"The budget is n = {n} of 50 tokens (30%) for a KV head."
    deep = kvjax.per_layer(method, (1, 2))
    (told,) = (one.text for one in at_prefill(deep, 50) if "budget" in one.text)
    assert told == f"The budget is n = {n} of 50 tokens (30%) for a KV head in a layer of share 1."


@pytest.mark.parametrize(
    "text", sweep(["snapkv(budget=0.5, window=8) + int8", "h2o(budget=0.25)"], "h2o(budget=0.25)")
)
def test_the_bytes_that_are_told_are_those_of_a_real_cache(text):
    method, m = parse_method(text)[1](), model("4/2")
    _, cache = kvjax.prefill(m, [list(range(64))], method=method, room=0)
    first, grown = weight(method, m.config, 64, "float32")
    assert first.startswith(f"After 64 tokens: {nbytes(cache) / 1024:.1f} KiB, ")
    assert grown.startswith("With capacity for 256 more tokens: ")


def test_a_cache_that_would_weigh_more_than_the_full_one_says_so():
    """CORM carries the last 256 queries."""
    note = "Note: such a cache weighs more than the full cache"
    for text, heavy in (("corm(budget=0.5, newest=4)", True), ("h2o(budget=0.5)", False)):
        told = weight(kvjax.method(text), model("4/2").config, 40, "float32")
        assert any(line.startswith(note) for line in told) == heavy


def test_what_steps_read_and_what_cannot_be_weighed_is_said():
    quest = weight(shown("quest"), kvjax.load("recall-tiny").config, 1024, "float32")
    shares = [float(x) for x in re.findall(r"([\d.]+)% of the full cache", " ".join(quest))]
    assert quest[-1].startswith("A step reads") and shares[-1] < 75 < 100 <= shares[0]
    (told,) = weight(shown("less"), model("4/2").config, 64, "float32")
    assert told.startswith("The bytes are unknown: less was never fitted") and "kvjax fit less" in told


@pytest.mark.rotating
def test_explain_prints_both_parts_and_the_weight(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "snapkv(budget=0.25) + kivi(bits=2)", "--context", "512"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    for part in (
        "keys=Affine(2, axis=", "At the end of a prompt 1. The layers read all 512 tokens",
        "WindowAttention(64): Attention that slots receive from the last 64 queries.",
        "n = 128 of 512 tokens (25%)", "At each step 1. The new token's key and value", "of the full cache's",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "method", "told"),
    [
        ("gpt_oss", "snapkv(budget=0.5,window=8)", "a share of what 1 of 3 layers keep.* windows of 2 stay"),
        ("qwen3_next", "streamingllm(budget=0.5)", "a share of what 1 of 4 layers keep.* states of 3 stay"),
        ("mistral", "streamingllm(budget=0.5)", "No layer keeps every token, so a budget changes nothing"),
        ("gpt_oss", "full", None),
        ("llama", "streamingllm(budget=0.5)", None),
    ],
)
def test_the_layers_that_a_budget_concerns_are_those_of_the_model(name, method, told, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(HF[name]))
    assert main(["explain", method, "--model", str(tmp_path), "--context", "32"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(told, out) if told else "layers keep" not in out and "No layer keeps" not in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("snapkv", "snapkv was given without a budget.*add --budget 0.25"),
        ("snapk --budget 0.5", "unknown method 'snapk': did you mean 'snapkv'?"),
        ("snapkv(budget=0.5", "'snapkv.budget=0.5' has a bracket too few.*write id.key=value."),
        ("snapkv(budgt=0.5)", "no hyper-parameter 'budgt': did you mean 'budget'"),
        ("full --context 99999", "--context is 99999, expected at most the model's 2048 positions"),
        ("snapkv(budget=4)", "must stay .*more than the budget of 4 slots"),
        ("streamingllm(budget=0.5)+quest(budget=0.5)", "streamingllm . quest cannot work"),
    ],
)
def test_what_cannot_be_explained_is_one_line(words, told, capsys):
    assert main(["explain", *words.split()]) == 2
    error = capsys.readouterr().err
    assert re.search(told, error) and error.count("\n") == 1


@pytest.mark.rotating
@pytest.mark.parametrize("id", sweep(["kv-distill", "homer"], "kv-distill"))
def test_what_comes_fitted_with_a_shipped_model_is_weighed_there(id, capsys):
    model = kvjax.load("recall-tiny")
    method = kvjax.method(id, **({"budget": 0.25} if takes_budget(id) else {}))
    budget = ["--budget", "0.25"] if takes_budget(id) else []
    assert main(["explain", id, *budget, "--context", "64"]) == 0
    _, cache = kvjax.prefill(model, [list(range(64))], method=method, room=0)
    assert f"After 64 tokens: {size(nbytes(cache))}, " in capsys.readouterr().out


@pytest.mark.rotating
@pytest.mark.parametrize("method", ["epicache(budget=0.25)", "infinipot(budget=0.25)"])
def test_methods_that_ask_an_instruction_are_weighed(method, capsys):
    assert main(["explain", method]) == 0
    assert "% of the full cache's" in capsys.readouterr().out
