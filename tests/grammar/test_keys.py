"""Words of a user that print as the library's do have observations and traces of their own."""

import copy
import dataclasses
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Observation, Trace
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.merge_counted import CountedMerge
from kvjax.keep.observations.observe import Queries as LastQueries
from kvjax.keep.observations.trace import AccumulatedMass as SinceArrival
from kvjax.keep.patterns import QuestionWindow, Recent
from kvjax.keep.scores.score import AccumulatedAttention, WindowAttention
from kvjax.state.cache import Slots
from kvjax.store.merged import MergedLayers
from tests.methods.battery import MAIN, model


@dataclasses.dataclass(frozen=True)
class Queries(Observation):
    """The positions of new tokens: nothing like the library's word of this name."""

    last: int

    def __call__(self, inputs):
        return inputs.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class LastPosition(Word):
    """The same for every slot: the sum of what the user's observation recorded."""

    last: int

    @property
    def needs(self):
        return frozenset({Queries(self.last)})

    def __call__(self, view, seen):
        found = seen.of(Queries(self.last)).sum(-1)
        return jnp.broadcast_to(found[:, None, None], view.pos.shape)


@dataclasses.dataclass(frozen=True)
class AccumulatedMass(Trace):
    """Twice the position at which a token came; no query changes it."""

    mass: object = SinceArrival().mass

    def start(self, inputs, heads):
        found = 2.0 * inputs.pos.astype(jnp.float32)
        return jnp.broadcast_to(found[:, None], (found.shape[0], heads, found.shape[1]))

    def grow(self, old, seen):
        return old


@dataclasses.dataclass(frozen=True)
class OwnTrace(AccumulatedMass):
    """The same under another name."""


@dataclasses.dataclass(frozen=True)
class Newest(Word):
    """The attention that a slot received, and far more for every later position."""

    trace: object

    @property
    def traces(self):
        return frozenset({SinceArrival(), self.trace})

    def __call__(self, view, seen):
        return view.of(SinceArrival()) + 1e3 * view.of(self.trace)


def scores(score):
    found = kvjax.scores(model("4/2"), MAIN.first, Method(Keep(score, Budget(0.5), Uniform())))
    return [np.asarray(x) for x in found.scores]


@pytest.mark.rotating
def test_observations_that_print_alike_are_both_recorded():
    assert repr(Queries(4)) == repr(LastQueries(4)) and key_of(Queries(4)) != key_of(LastQueries(4))
    mine, theirs = scores(LastPosition(4)), scores(WindowAttention(4))
    for both, a, b in zip(scores(LastPosition(4) + WindowAttention(4)), mine, theirs, strict=True):
        np.testing.assert_allclose(both, a + b, rtol=1e-6)
    assert all((np.ptp(x) > 0.1) for x in theirs)


def test_traces_that_print_alike_are_both_remembered():
    m, found = model("4/2"), {}
    for trace in (AccumulatedMass(), OwnTrace()):
        keep = Keep(Newest(trace), Budget(8), Uniform(), when=STEP)
        _, cache = kvjax.prefill(m, MAIN.first, method=Method(keep), room=4)
        for token in MAIN.steps:
            _, cache = kvjax.step(m, cache, token)
        found[trace] = [part for group in cache.groups for part in group.parts if isinstance(part, Slots)]
    for trace, mine in found.items():
        for part, other in zip(mine, found[OwnTrace()], strict=True):
            assert set(part.traces) == {key_of(trace), key_of(SinceArrival())}
            np.testing.assert_array_equal(part.pos, other.pos)
            np.testing.assert_array_equal(part.traces[key_of(trace)], other.traces[key_of(OwnTrace())])
            want = np.where(np.asarray(part.pos) >= 0, 2.0 * np.asarray(part.pos), 0.0)
            np.testing.assert_array_equal(part.traces[key_of(trace)], want)


@dataclasses.dataclass(frozen=True)
class Times(Observation):
    """The positions of new tokens times a factor that is not printed."""

    factor: int = dataclasses.field(repr=False)

    def __call__(self, inputs):
        return self.factor * inputs.pos.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class TimesTwice(Word):
    """The sums of what observations of both factors recorded, one weighing a thousand times the other."""

    factors: tuple[int, int]

    @property
    def needs(self):
        return frozenset(map(Times, self.factors))

    def __call__(self, view, seen):
        a, b = (seen.of(Times(factor)).clip(0).sum(-1) for factor in self.factors)
        return jnp.broadcast_to((a + 1000 * b)[:, None, None], view.pos.shape)


def test_words_that_print_the_same_are_told_apart_by_their_fields():
    assert repr(Times(1)) == repr(Times(2)) and key_of(Times(1)) != key_of(Times(2))
    last = np.asarray(MAIN.first[0]).size - 1
    total = last * (last + 1) / 2
    for one in scores(TimesTwice((1, 2))):
        np.testing.assert_allclose(one[0, ..., 0], 2001 * total)


def test_a_key_is_the_word_and_its_text_the_words_class_and_fields():
    for word in (LastQueries(4), SinceArrival(), AccumulatedAttention()):
        key = key_of(word)
        assert str(key) == repr(word) and key.word == word and key == key_of(copy.deepcopy(word))
        assert pickle.loads(pickle.dumps(key)) == key and {key: 1}[key_of(word)] == 1
        assert key != str(key) and str(key) not in {key: 1}


def test_a_share_that_equals_a_number_is_another_word_or_refused():
    """In Python 1 == 1.0, so that one of them would run the program that was compiled for the other."""
    for window in (Recent, QuestionWindow):
        assert window(1) != window(1.0) and window(1) == window(1) and window(0.5) == window(0.5)
        assert len({window(1), window(1.0), window(1)}) == 2
    assert Recent(1) != QuestionWindow(1)
    assert CountedMerge(newest=1) != CountedMerge(newest=1.0) and CountedMerge() == CountedMerge()
    one, all_ = (
        Keep(AccumulatedAttention(), Budget(8), Uniform(), protect=(Recent(n),), when=STEP) for n in (1, 1.0)
    )
    assert one != all_
    with pytest.raises(ValueError, match="start of MergedLayers must be"):
        Method(stack=MergedLayers(start=1.0))
