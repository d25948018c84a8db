"""Codes of several tokens in pages of unequal lists: what steps answer, against float64 numpy."""

import numpy as np
import pytest

import kvjax
from kvjax.state.cache import Paged
from tests.float64.codes import affine, coded
from tests.float64.reference import Row
from tests.methods.battery import MAIN, VOCAB, B, kept_of, model, off, positions, prompt_of
from tests.methods.table import BY_LABEL
from tests.methods.test_coded_slots import RANK, gear_by_hand
from tests.sweep import sweep

GROUP, RESIDUAL, STEPS = 4, 3, 12
HOW = dict(bits=4, group=GROUP, residual=RESIDUAL)
PER_CHANNEL, PER_TOKEN = affine(4, GROUP, channel=True), affine(4, GROUP)
# A store, and how a granule of its keys and of its values comes back.
STORES = {
    "kivi": (kvjax.method("kivi", **HOW), PER_CHANNEL, PER_TOKEN),
    "gear": (
        kvjax.method("gear", rank=RANK, **HOW),
        lambda x: gear_by_hand(x, -2, PER_CHANNEL),
        lambda x: gear_by_hand(x, -1, PER_TOKEN),
    ),
}
# Rows of the table whose lists are unequal.
PAGED = ("adakv", "pyramidkv", "kvzip")


@pytest.mark.parametrize(("label", "name"), sweep([(a, b) for a in PAGED for b in STORES]))
def test_unequal_lists_are_encoded_whole_granules_at_a_time(label, name):
    row, (store, keys, values) = BY_LABEL[label], STORES[name]
    m, method = model(row.model), kvjax.chain(row.method(), store)
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
