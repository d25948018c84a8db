"""What methods remember of slots and rows: the same numbers however a text is cut into prefills and steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observation
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import AcrossHeads, Uniform
from kvjax.keep.observations.observe import Mass, Queries, QueryMoments
from kvjax.keep.observations.trace import AccumulatedDecayedMass, AccumulatedMass, ConstantTrace
from kvjax.keep.scores.expected import ExpectedAttention
from kvjax.keep.scores.score import AccumulatedAttention, DecayedAttention
from tests.float64.reference import Prompt
from tests.methods.battery import MAIN, decoder, model, positions
from tests.sweep import sweep

SUMS = [AccumulatedAttention(), DecayedAttention(0.9)]
MASSES = (Mass("sum"), Mass("max"), Mass("squares"), Mass("count", 0.05))


@dataclasses.dataclass(frozen=True)
class FirstChannel(Observation):
    """The first number of a token's hidden state, for every head of the model: what a fitted gate may say."""

    def __call__(self, inputs):
        return jnp.repeat(inputs.hidden[:, None, :, 0], 2, axis=1)


RATES = (0.5, 0.97)
ALL = (*map(AccumulatedMass, MASSES), *map(AccumulatedDecayedMass, RATES), ConstantTrace(FirstChannel()))


@dataclasses.dataclass(frozen=True)
class Remembering(Word):
    """Remembers everything, and ranks by the place of a token alone."""

    @property
    def traces(self):
        return frozenset(ALL)

    def __call__(self, view, seen):
        return view.pos.astype(jnp.float32)


REMEMBER = Keep(Remembering(), Budget(1.0), Uniform())


def remembered(cache, row):
    """Per layer {trace: [K, T] in position order} of one row; all of its slots are in the tail."""
    out = []
    for group in cache.groups:
        for layer in range(group.tail.pos.shape[0]):
            pos = np.asarray(group.tail.pos[layer, row])
            order = np.argsort(np.where(pos < 0, 10**6, pos), -1)[:, : (pos[0] >= 0).sum()]
            found = {n: np.asarray(x[layer, row]) for n, x in group.tail.traces.items()}
            out.append({n: np.take_along_axis(x, order, -1) for n, x in found.items()})
    return out


def by_hand(tokens):
    """Compute the same from the float64 maps of the whole text."""
    prompt = Prompt(decoder("4/2"), tokens)
    over = {
        "sum": lambda p: p.sum((1, 2)),
        "max": lambda p: p.max((1, 2)),
        "squares": lambda p: (p**2).sum((1, 2)),
    }
    out = []
    for p in prompt.p:
        heads = p.reshape(2, -1, *p.shape[1:])
        found = {key_of(AccumulatedMass(m)): over[m.reduce](heads) for m in MASSES[:3]}
        found[key_of(AccumulatedMass(MASSES[3]))] = (heads > 0.05).sum((1, 2))
        newer = np.arange(len(tokens))[::-1, None]
        out.append(found | {key_of(AccumulatedDecayedMass(r)): (heads * r**newer).sum((1, 2)) for r in RATES})
    return out


ROW = MAIN.first[0] + MAIN.second[1]


@pytest.mark.rotating
@pytest.mark.parametrize("cuts", [(41,), (20, 21), (32, 5, 4)], ids=str)
def test_traces_are_the_same_however_a_text_is_read(cuts):
    """In one prefill, in several, and with steps behind them; against float64 numpy."""
    at, cache = 0, None
    for n in cuts[: 3 - (len(cuts) == 3)]:
        method = Method(REMEMBER) if cache is None else None
        _, cache = kvjax.prefill(model("4/2"), [ROW[at : at + n]], method=method, cache=cache, room=8)
        at += n
    for token in ROW[at:]:
        _, cache = kvjax.step(model("4/2"), cache, [token])
    for got, want in zip(remembered(cache, 0), by_hand(ROW), strict=True):
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, rtol=2e-5, atol=2e-5)
    whole = remembered(kvjax.prefill(model("4/2"), [ROW], method=Method(REMEMBER), room=8)[1], 0)
    arrived = key_of(ConstantTrace(FirstChannel()))
    for got, want in zip(remembered(cache, 0), whole, strict=True):
        np.testing.assert_allclose(got[arrived], want[arrived], atol=1e-5)
        assert np.ptp(got[arrived]) > 0.1


def kept(method, cache=None, tokens=MAIN.first):
    _, cache = kvjax.prefill(model("4/2"), tokens, method=method, cache=cache)
    return cache, positions(cache)


@dataclasses.dataclass(frozen=True)
class Traced(Word):
    """The sum of some traces."""

    masses: tuple[Mass, ...]
    looks = False

    @property
    def traces(self):
        return frozenset(map(AccumulatedMass, self.masses))

    def __call__(self, view, seen):
        return sum(view.of(AccumulatedMass(m)) for m in self.masses)


def test_a_score_of_sum_and_largest_differs_from_both():
    both, summed, largest = (
        kept(Method(Keep(Traced(masses), Budget(0.5), Uniform())))[1]
        for masses in ((Mass("sum"), Mass("max")), (Mass("sum"),), (Mass("max"),))
    )
    assert both != summed and both != largest and summed != largest


@pytest.mark.parametrize(
    "score", sweep([AccumulatedAttention(), DecayedAttention(0.9)], AccumulatedAttention())
)
@pytest.mark.rotating
def test_equal_budgets_in_pages_keep_what_dense_storage_keeps_over_turns_and_steps(score):
    """A step between the turns, and a turn that evicts nothing: traces in pages grow in all of them."""
    found = []
    for allocate in (AcrossHeads(floor=1.0), Uniform()):
        cache, _ = kept(Method(Keep(score, Budget(0.5), allocate, page=8)))
        _, cache = kvjax.step(model("4/2"), cache, MAIN.steps[0])
        _, cache = kvjax.prefill(model("4/2"), MAIN.second, cache=cache, compress=False, room=16)
        found.append(kept(None, cache, MAIN.second)[1])
    assert found[0] == found[1]


@pytest.mark.rotating
def test_a_score_of_all_queries_evicts_at_every_step():
    method = ExpectedAttention(future=8)
    out = kvjax.generate(
        model("4/2"), [MAIN.first[0]], method=Method(Keep(method, Budget(0.5), Uniform(), when=STEP)),
        max_new_tokens=3,
    )  # fmt: skip
    assert {len(held) for layer in positions(out.cache) for held in layer[0]} == {(32 + 3) // 2}


CARRIED = [Queries(3), QueryMoments(2), QueryMoments(0, covariance=False)]


@pytest.mark.rotating
@pytest.mark.parametrize("observation", CARRIED, ids=repr)
def test_what_rows_carry_is_what_all_tokens_at_once_give(observation, rng):
    """Cut into pieces of unequal length, with a piece in which one row has no token."""
    b, n, t, h = 2, 4, 11, 6
    count = np.array([11, 7])
    pos = np.where(np.arange(t) < count[:, None], np.arange(t), -1).astype(np.int32)
    q, raw = (jnp.asarray(rng.normal(size=(b, n, t, h)), jnp.float32) for _ in range(2))

    def inputs(start, stop):
        piece = slice(start, stop)
        return Inputs(
            q[:, :, piece], raw[:, :, piece], q[:, :2, piece], jnp.zeros((b, stop - start, 5)),
            jnp.asarray(pos[:, piece]), jnp.asarray(np.minimum(count, stop), jnp.int32),
        )  # fmt: skip

    carried = observation.start(inputs(0, 1))
    for start, stop in ((0, 4), (4, 5), (5, 8), (8, 11)):
        carried = observation.carry(carried, inputs(start, stop))
    got, want = observation.read(carried), observation(inputs(0, 11))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)
