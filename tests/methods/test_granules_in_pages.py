"""Codes of several tokens in pages of unequal lists: what steps answer, against float64 numpy."""

import numpy as np
import pytest

import kvjax
from kvjax.state.cache import Paged
from tests.float64.codes import affine, coded
from tests.float64.reference import Row
from tests.methods.battery import MAIN, VOCAB, B, kept_of, model, off, positions, prompt_of
from tests.methods.table import BY_LABEL

GROUP, RESIDUAL, STEPS = 4, 3, 12
KIVI = kvjax.method("kivi", bits=4, group=GROUP, residual=RESIDUAL)
# Rows of the table whose lists are unequal.
PAGED = ("adakv", "pyramidkv", "kvzip")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "label", [PAGED[0], *(pytest.param(one, marks=pytest.mark.rotating) for one in PAGED[1:])]
)
def test_unequal_lists_are_encoded_whole_granules_at_a_time(label):
    row = BY_LABEL[label]
    m, method = model(row.model), kvjax.chain(row.method(), KIVI)
    keys, values = affine(4, GROUP, channel=True), affine(4, GROUP)
    slots = []
    for b in range(B):
        prompt = prompt_of(row.model, "main", b)
        attends = coded(keys, values, granule=GROUP, residual=RESIDUAL)
        slots.append(Row(prompt, kept_of(label, prompt), row.phase, attends=attends))
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=STEPS)
    lengths = np.concatenate([
        np.asarray(part.lengths).ravel()
        for group in cache.groups for part in group.parts if isinstance(part, Paged)
    ])  # fmt: skip
    # Pages hold whole granules, and lists are unequal.
    assert (lengths % GROUP == 0).all() and len({*lengths.tolist()}) > 1
    held = {label: [] for label in ("ours", "theirs")}
    for token in np.random.default_rng(2).integers(0, VOCAB, (STEPS, B)):
        logits, cache = kvjax.step(m, cache, token.tolist())
        want = np.stack([one.step(token[b]) for b, one in enumerate(slots)])
        assert off(logits, want) < 0.03
        held["ours"].append(positions(cache))
        held["theirs"].append([[one.positions()[i] for one in slots] for i in range(len(slots[0].slots))])
    assert held["ours"] == held["theirs"]
