"""Keys that lie unrotated: every keep chooses the slots that it chooses of keys that are stored rotated."""

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method, Store
from tests.methods.battery import T, model
from tests.methods.table import BY_LABEL, ROWS

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
