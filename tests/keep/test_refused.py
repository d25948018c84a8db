"""Sentences whose words would silently do something else than they say are refused before anything runs."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, chain
from kvjax.grammar.kinds import Observation, Pattern
from kvjax.grammar.when import STEP, Every, WhenFull
from kvjax.keep.algebra import Pool, Word
from kvjax.keep.budgets.budget import AcrossHeads, AcrossLayers, Uniform
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.probe import ProbeAttention, RepeatContext
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.keep.scores.expected import ExpectedAttention
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm, Novelty, Position, WindowAttention
from kvjax.read.pages import PageBounds
from tests.methods.battery import MAIN, model, off, positions

HALF = Budget(0.5)


@dataclasses.dataclass(frozen=True)
class OfNow(Word):
    """The attention that slots receive of what is read right now."""

    @property
    def needs(self):
        return frozenset({Mass("max")})

    def __call__(self, view, seen):
        return seen.of(Mass("max"))


@dataclasses.dataclass(frozen=True)
class SinceTheMiddle(Observation):
    """A user's own observation, which says nothing about phases."""

    def __call__(self, inputs):
        return inputs.length // 2


@dataclasses.dataclass(frozen=True)
class OfMine(Word):
    @property
    def needs(self):
        return frozenset({SinceTheMiddle()})

    def __call__(self, view, seen):
        return -jnp.abs(view.pos - seen.of(SinceTheMiddle())[:, None, None]).astype(jnp.float32)


def step(score, **more):
    return Keep(score, HALF, Uniform(), when=STEP, **more)


MIDDLE = RepeatContext((1, 2))
REFUSED = {
    "what the newest query gives, after many": (
        Keep(OfNow(), HALF, Uniform(), when=Every(4)),
        r"Every\(tokens=4\) evicts after many queries, .* name traces, such as AccumulatedMass\(Mass\(\)\)",
    ),
    "traces per query head": (
        Keep(AccumulatedAttention(), HALF, Uniform(), per_query_head=True),
        r"recorded per KV head, and this keep selects per query head",
    ),
    "lists that are full before they hold their budget": (
        Keep(KeyNorm(), Budget(16), Uniform(), when=WhenFull(16)),
        r"evicts when a KV head holds that many slots, and the budget is 16: give a smaller budget",
    ),
    "lists that are full and hold a share": (
        Keep(KeyNorm(), HALF, Uniform(), when=WhenFull(16)),
        r"and the budget is 0.5: give a smaller budget",
    ),
    "a user's observation in a step": (step(OfMine()), r"SinceTheMiddle\(\) observes prefills only"),
    "protected slots beyond the budget": (
        Keep(KeyNorm(), Budget(16), Uniform(), (Sink(4), Recent(16))),
        r"20 of .* must stay \(Sink\(tokens=4\), Recent\(tokens=16\)\), more than the budget of 16 slots",
    ),
    "sinks alone": (
        Keep(Position(), Budget(4), Uniform(), (Sink(4),), when=STEP),
        r"5 of .* must stay \(Sink\(tokens=4\), the newest token\), more than the budget of 4 slots",
    ),
    "a probe in a step": (
        step(ProbeAttention(MIDDLE), probe=MIDDLE),
        r"cannot score by a probe .* use when=PREFILL_END",
    ),
    "layers that keep alike and evict apart": (
        step(KeyNorm(), reuse=2),
        r"2 layers keep the tokens that one of them selects, and while decoding, .* select by itself",
    ),
    "layers that keep alike by budgets of their own": (
        Keep(KeyNorm(), HALF, AcrossLayers(), reuse=2),
        r"or by budgets of their own, each would select by itself: use the uniform allocation",
    ),
    "surprise of tokens that upper layers do not see": (
        Keep(Novelty(), HALF, Uniform(), narrow=SelectivePropagation(0, KeyNorm(), 0.5)),
        r"leaves tokens out of the upper layers, and its score needs their probabilities",
    ),
    "a probe that is not read": (
        Keep(ProbeAttention(MIDDLE) >> Pool(3), HALF, Uniform()),
        r"reads the probe RepeatContext.* and the keep's is None: give both the same",
    ),
}


@pytest.mark.parametrize(("keep", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_words_that_would_do_something_else_are_refused(keep, message):
    with pytest.raises(ValueError, match=message):
        chain(keep)
    # A method that was built by hand is refused by the verb that first sees it.
    with pytest.raises(InputError, match=message):
        kvjax.prefill(model("4/2"), MAIN.first, method=Method(keep))


def test_what_exists_in_steps_is_let_through():
    scores = (AccumulatedAttention(), Position(), AccumulatedAttention(per_query=True) >> Pool(3), OfNow())
    keeps = [step(score) for score in (*scores, ExpectedAttention(), WindowAttention(4) >> Pool(3))]
    keeps += [Keep(OfMine(), HALF, Uniform()), Keep(AccumulatedAttention(), HALF, AcrossHeads())]
    keeps += [Keep(ProbeAttention(MIDDLE) >> Pool(3), HALF, Uniform(), probe=MIDDLE)]
    assert [chain(keep).keep for keep in keeps] == keeps


@dataclasses.dataclass(frozen=True)
class NewestQuery(Word):
    """What the newest query and every key have in common, asked for in prefills and steps alike."""

    @property
    def needs(self):
        return frozenset({Queries(1)})

    def __call__(self, view, seen):
        q, _ = seen.of(Queries(1))
        b, k, s, h = view.k.shape
        return jnp.einsum("bkgh,bksh->bks", q[:, :, 0].reshape(b, k, -1, h), view.k)


def test_the_newest_query_is_observed_in_steps_as_in_prefills():
    out = kvjax.generate(model("4/2"), [MAIN.first[0]], method=Method(step(NewestQuery())), max_new_tokens=3)
    held = {len(kept) for layer in positions(out.cache) for kept in layer[0]}
    assert held == {(32 + 3) // 2}


@pytest.mark.rotating
def test_single_slots_are_read_like_pages():
    """Pages of one token whose bound is its logit: a budget of everything reads what the full cache holds."""
    m = model("4/2")
    read = Method(read=PageBounds(Budget(1.0), page=1, skip_layers=0))
    got, want = (kvjax.prefill(m, MAIN.first, method=method, room=8)[1] for method in (read, None))
    for token in MAIN.steps:
        a, got = kvjax.step(m, got, token)
        b, want = kvjax.step(m, want, token)
        assert off(a, b) < 1e-5


@pytest.mark.parametrize(
    ("id", "least"), [("sink-recent", 5), ("streamingllm", 5), ("snapkv", 64), ("h2o", 1)]
)
def test_budgets_that_hold_what_is_protected_are_let_through(id, least):
    kvjax.method(id, budget=least)
    if least > 1:
        with pytest.raises(ValueError, match=f"more than the budget of {least - 1} slots"):
            kvjax.method(id, budget=least - 1)


@dataclasses.dataclass(frozen=True)
class Even(Pattern):
    def __call__(self, pos, length, n):
        return pos % 2 == 0


@pytest.mark.parametrize("rows", [[31], [9], [1, 9]], ids=str)
def test_shares_of_a_prompt_must_hold_what_is_protected(rows):
    """The share of the longer of two rows can be too small where that of the shorter one is not."""
    method = Method(Keep(KeyNorm(), HALF, Uniform(), (Sink(1), Even())))
    with pytest.raises(InputError, match=f"of {max(rows)} tokens must stay .*Even"):
        kvjax.prefill(model("4/2"), [[1] * n for n in rows], method=method)


def test_a_comparison_needs_a_slot_for_the_token_that_is_asked_again(tmp_path):
    """Four sinks in four slots would leave none for it."""
    with pytest.raises(InputError, match=r"5 of .* \(Sink\(tokens=4\), QuestionWindow\(tokens=1\)\)"):
        kvjax.compare(methods=["expected-attention:budget=4"], budgets=[0.5], samples=1, out=tmp_path)
    assert not list(tmp_path.rglob("results.jsonl"))
