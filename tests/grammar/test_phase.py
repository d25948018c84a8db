"""Phases: what queries and keys turn by, pair by pair, in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, chain
from kvjax.grammar.phase import ByPosition, ByRank, Clamped
from kvjax.grammar.shared_ranges import SharedRanges
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.patterns import Sink
from kvjax.keep.scores.score import KeyNorm, Position
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from tests.float64.ranges import Ranges
from tests.methods.battery import MAIN, model, off
from tests.methods.table import BY_LABEL

HALF = Budget(0.5)
# A past with gaps, in any order, and new tokens behind it; padding at the end of the second row.
PAST = np.array([[[9, -1, 0, 4, 1], [3, 8, -1, -1, 9]], [[0, 1, 2, -1, -1], [2, -1, 1, 0, -1]]])
NEW = np.array([[10, 11, 12, 13], [3, 4, 5, -1]])


def seen_pairs(q_pos, pos):
    q, k = q_pos[:, None, :, None], pos[:, :, None, :]
    return (q >= 0) & (k >= 0) & (k <= q)


def apart(phase, q_pos, sets):
    """By how much each query turns more than each key that it sees, and which pairs some turn has."""
    found, there = [0.0] * len(sets), [0] * len(sets)
    for turn in phase.turns(jnp.asarray(q_pos, jnp.int32), [jnp.asarray(s, jnp.int32) for s in sets]):
        for i, (pos, keys) in enumerate(zip(sets, turn.keys, strict=True)):
            distance = q_pos[:, None, :, None] - pos[:, :, None, :] - turn.min_distance
            mine = seen_pairs(q_pos, pos) & (distance >= 0)
            mine &= True if turn.reach is None else distance < turn.reach
            found[i] = found[i] + mine * (np.asarray(turn.queries)[..., None] - np.asarray(keys)[:, :, None])
            there[i] = there[i] + mine.astype(int)
    return found, there


def by_hand(phase, q_pos, sets):
    """Compute the same, by the definition of each phase."""
    held = np.concatenate([np.broadcast_to(s, (*PAST.shape[:2], s.shape[-1])) for s in sets], -1)

    def rank(b, k, at):
        return sum(0 <= p < at for p in held[b, k])

    found = []
    for pos in sets:
        out = np.zeros((*held.shape[:2], q_pos.shape[1], pos.shape[-1]))
        for b, k, t, s in np.ndindex(out.shape):
            i, j = q_pos[b, t], pos[b, k if pos.shape[1] > 1 else 0, s]
            if isinstance(phase, ByRank):
                out[b, k, t, s] = rank(b, k, i) - rank(b, k, j)
            else:
                out[b, k, t, s] = i - j if isinstance(phase, ByPosition) else min(i - j, phase.distance)
        found.append(out * seen_pairs(q_pos, np.broadcast_to(pos, (*held.shape[:2], pos.shape[-1]))))
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("phase", [ByPosition(), ByRank(), Clamped(1), Clamped(6), Clamped(50)], ids=repr)
@pytest.mark.parametrize("case", ["behind a past", "a first prompt", "one query"])
def test_every_pair_is_as_far_apart_as_its_phase_says(phase, case):
    new = NEW[:, None]
    q_pos, sets = {
        "behind a past": (NEW, [PAST, new]),
        "a first prompt": (NEW - NEW[:, :1], [new - NEW[:, :1, None]]),
        "one query": (NEW[:, 1:2], [PAST, new]),
    }[case]
    found, there = apart(phase, q_pos, sets)
    for got, want, count, pos in zip(found, by_hand(phase, q_pos, sets), there, sets, strict=True):
        np.testing.assert_array_equal(*np.broadcast_arrays(got, want))
        np.testing.assert_array_equal(count, seen_pairs(q_pos, pos))
    if case == "one query":
        assert len(phase.turns(jnp.asarray(q_pos, jnp.int32), [jnp.asarray(s, jnp.int32) for s in sets])) == 1


def keep(phase, score=None, **more):
    return Keep(score or Position(), HALF, Uniform(), (Sink(2),), when=STEP, phase=phase, **more)


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["streamingllm", "lm-infinite"])
def test_a_phase_that_bends_nothing_answers_like_positions(label):
    """Ranks of everything, and distances beyond all others, with windows beside and latents."""
    phase = {"streamingllm": ByRank(), "lm-infinite": Clamped(500)}[label]
    m, want = model("windowed"), []
    for method in (Method(), Method(dataclasses.replace(keep(phase), budget=Budget(1.0)))):
        logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=8, chunk=8)
        want.append([logits, kvjax.step(m, cache, MAIN.steps[0])[0]])
    assert off(*map(np.array, want)) < 1e-5


def test_every_pair_of_shared_ranges_meets_in_one_turn_as_the_ranges_say():
    phase, hand = SharedRanges(2, (3, 5, 1), 0.5, 0.8), Ranges(2, (3, 5, 1), 0.5, 0.8)
    pos = np.arange(16)
    parts = hand.parts(pos)
    for q_pos in (pos, pos[4:5], pos[13:14]):
        turns = phase.turns(jnp.asarray(q_pos[None], jnp.int32), [jnp.asarray(pos[None, None], jnp.int32)])
        found, heavy = (np.zeros((len(q_pos), 16)) for _ in range(2))
        for turn in turns:
            np.testing.assert_array_equal(turn.queries[0, 0], hand.phases(q_pos))
            np.testing.assert_array_equal(turn.keys[0][0, 0], hand.phases(pos))
            asks, held = turn.rule.queries[0][:, None], turn.rule.keys[0][0]
            met = np.array((asks >= 0) & (held >= 0) & (held <= asks))
            met &= turn.reach is None or np.array(asks - held < (turn.reach or 0))
            found += met
            heavy += met * np.array(turn.rule.weight[0])[:, None]
        mine = hand.parts(q_pos)[:, None]
        apart = (parts > 0) & (parts < hand.behind) & (mine != parts) & (mine < hand.behind)
        np.testing.assert_array_equal(found, (pos <= q_pos[:, None]) & ~apart)
        weighs = (parts > 0) & (parts < hand.behind) & (mine == hand.behind)
        np.testing.assert_allclose(heavy, found * np.where(weighs, 0.4, 1.0), rtol=1e-6)


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["4/2", "windowed"])
def test_one_context_that_nothing_sharpens_is_a_text_like_any_other(label):
    m, want = model(label), []
    alone = kvjax.method("ape", contexts=(9,), shared_prefix=2, temperature=1.0, scale=1.0)
    for method in (Method(), alone):
        logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=8, chunk=8)
        want.append([logits, kvjax.step(m, cache, MAIN.steps[0])[0]])
    assert off(*map(np.array, want)) < 1e-5


REFUSED = {
    "no context": (
        lambda: SharedRanges(2, (0,), 1.0, 1.0),
        r"contexts of \(0,\) were given, expected contexts of one token or more",
    ),
    "no temperature": (
        lambda: SharedRanges(2, (3,), 0.0, 1.0),
        "temperature is 0.0 and scale is 1.0, expected",
    ),
    "masses of what is attended in turns": (
        lambda: chain(kvjax.method("snapkv", budget=0.5), kvjax.method("ape")),
        "its score depends on keys or on attention",
    ),
    "a probe's masses": (
        lambda: chain(kvjax.method("kvzip", budget=0.5, prefix=(1, 2)), kvjax.method("ape")),
        "its score depends on keys or on attention",
    ),
    "a class": (lambda: keep(ByRank), "the phase is the class ByRank, not one of its words: write ByRank"),
    "no phase": (lambda: keep(3), "int is no phase: every phase is .* subclasses kvjax.words.Phase"),
    "no distance": (lambda: keep(Clamped(0)), "the largest distance must be a whole number .* got 0"),
    "a read": (
        lambda: chain(kvjax.method("quest", budget=0.5), kvjax.method("renumbered")),
        r"ranks keys at their positions, .* this keep rotates keys anew whenever they are read \(ByRank",
    ),
    "keys that every query meets otherwise": (
        lambda: chain(keep(Clamped(4), KeyNorm())),
        r"under Clamped\(distance=4\) a key is rotated in another way for every query: use a score",
    ),
    "two keeps": (
        lambda: chain(kvjax.method("streamingllm", budget=0.5), kvjax.method("renumbered")),
        "one of them selects no slots",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_phase_cannot_go_with_is_refused_in_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_far_tokens_are_not_attended_apart_where_the_softmax_is_clipped():
    m = model("4/2")
    config = dataclasses.replace(m.config, mixers=(Attention(clip=(-0.1, 1.1)),) * m.config.layers)
    with pytest.raises(InputError, match="near and far tokens are attended apart"):
        kvjax.prefill(Model(config, m.params), MAIN.first, method=BY_LABEL["lm-infinite"].method())
