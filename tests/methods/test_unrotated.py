"""Keys that lie unrotated: every keep chooses the slots that it chooses of keys that are stored rotated."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from tests.float64.reference import rope
from tests.methods.battery import T, model
from tests.methods.method_pairs import answers, apart, exact
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

UNROTATED = Method(store=Store(unrotated=True))
FIRST = ("compactor",)


def chains(row):
    """Whether a row chooses slots, and its sentence can be stored unrotated."""
    method = row.method()
    if method.keep is None or method.store is not None or method.make is not None:
        return False
    try:
        kvjax.chain(method, UNROTATED)
    except ValueError:
        return False
    return True


LABELS = [row.label for row in ROWS if chains(row)]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "label", [x if x in FIRST else pytest.param(x, marks=pytest.mark.rotating) for x in LABELS]
)
def test_what_stays_is_what_stays_of_rotated_keys(label):
    row = BY_LABEL[label]
    asked, method = model(row.model), row.method()
    prompt = [np.random.default_rng(0).integers(1, asked.config.vocab, T).tolist()]
    found = []
    for one in (method, kvjax.chain(method, UNROTATED)):
        logits, cache = kvjax.prefill(asked, prompt, method=one, room=4)
        stepped, cache = kvjax.step(asked, cache, [3])
        found.append((logits, stepped, [np.sort(np.asarray(x)) for x in kvjax.kept_positions(cache)]))
    (a, b, kept), (c, d, other) = found
    for mine, theirs in zip(kept, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_allclose(np.stack([c, d]), np.stack([a, b]), rtol=1e-4, atol=1e-4)


MERGING = [label for label in LABELS if BY_LABEL[label].method().keep.merge is not None]


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(MERGING, "d2o"))
def test_merges_of_unrotated_keys_answer_as_those_of_rotated_keys(label):
    method = BY_LABEL[label].method()
    got, want = answers(kvjax.chain(method, exact(unrotated=True))), answers(method)
    assert apart(got[0], want[0]) < 2e-5
    for mine, theirs in zip(*map(kvjax.kept_positions, (got[1], want[1])), strict=True):
        np.testing.assert_array_equal(np.sort(mine), np.sort(theirs))


def test_a_merged_key_is_the_mean_of_rotated_keys_rotated_back_to_its_slot():
    """Compressive Transformer: 8 tokens as they are, the older ones as the mean of every 4, in float64."""
    asked, rate = model("4/2"), 4
    prompt = [np.random.default_rng(4).integers(1, asked.config.vocab, 32).tolist()]
    _, whole = kvjax.prefill(asked, prompt, method=exact(unrotated=True), room=4)
    both = kvjax.chain(
        kvjax.method("compressive-transformer", budget=16, rate=rate, recent=0.5), exact(unrotated=True)
    )
    _, found = kvjax.prefill(asked, prompt, method=both, room=4)
    theta = asked.config.rope.theta
    for one, other in zip(whole.groups, found.groups, strict=True):
        k, pos = (np.asarray(x)[0, 0] for x in (other.tail.keys().k, other.tail.pos))
        raw = np.asarray(one.tail.keys().k, np.float64)[0, 0]
        assert sorted(pos[0][pos[0] >= 0]) == [3, 7, 11, 15, 19, 23, *range(24, 32)]
        for head, slot in zip(*np.nonzero((pos >= 0) & (pos < 24)), strict=True):
            at = np.arange(pos[head, slot] + 1 - rate, pos[head, slot] + 1)
            mean = rope(raw[head, at], at, theta).mean(0, keepdims=True)
            want = rope(mean, [-int(pos[head, slot])], theta)[0]
            np.testing.assert_allclose(k[head, slot], want, rtol=1e-5, atol=1e-6)


@pytest.mark.rotating
def test_unequal_lists_whose_keys_turn_by_rank_evict_while_decoding():
    """Which slots leave is told by position here: turning by rank moves none of them."""
    asked, prompt = kvjax.load("recall-tiny"), [list(range(1, 80))]
    found = []
    for text in ("duoattention", "duoattention + renumbered"):
        _, cache = kvjax.prefill(asked, prompt, method=text, room=4)
        _, cache = kvjax.step(asked, cache, [3])
        found.append([sorted(np.asarray(x).ravel().tolist()) for x in kvjax.kept_positions(cache)])
    assert found[0] == found[1]
