"""Codes that are fitted to layers and heads, in pages of unequal lists: what steps answer, in float64."""

import numpy as np
import pytest

import kvjax
from kvjax.state.cache import Paged
from tests.float64.codes import affine, coded, in_layers, of_lists
from tests.float64.reference import Row
from tests.methods.battery import MAIN, VOCAB, B, kept_of, model, off, prompt_of
from tests.methods.table import BY_LABEL
from tests.methods.table_bases import sums
from tests.sweep import sweep

STEPS = 4
GRANULES = dict(granule=4, residual=2)
# Keys of 4 bits in the first layer and of 1 bit in the second one.
ASYMKV = (
    kvjax.method("asymkv", key_layers=1, high=4, group=4, residual=2),
    in_layers(*(coded(affine(bits, 4, channel=True), affine(1, 4), **GRANULES) for bits in (4, 1))),
)
# Keeps of the table whose lists are unequal: budgets that move between heads, and between layers.
KEEPS = ("adakv", "kvzip")
# Stores of the table: sums of atoms and ranges of a head, bases and shifts, vectors of unrotated keys, codes
# of several tokens, codes that learn from a row's queries.
STORES = ("csr", "smoothquant", "omniquant", "cq", "qserve", "resq", "skvq", "oscar", "wkvquant", "squat")
CASES = [(keep, store) for keep in KEEPS for store in (*STORES, "asymkv")]


def of_store(label):
    """Return a store, and how queries attend to what comes back of its codes."""
    return ASYMKV if label == "asymkv" else (BY_LABEL[label].method(), BY_LABEL[label].attends)


def check_steps(keep, stored, attends):
    """Raise AssertionError where steps of a keep of the table over a store answer otherwise than float64."""
    m, method = model("4/2"), kvjax.chain(BY_LABEL[keep].method(), stored)
    prompts = [prompt_of("4/2", "main", b) for b in range(B)]
    rows = [Row(prompt, kept_of(keep, prompt), attends=attends) for prompt in prompts]
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=STEPS)
    layers = [np.asarray(part.lengths) for g in cache.groups for part in g.parts if isinstance(part, Paged)]
    assert all(one.any() for one in layers) and len({*np.concatenate(layers).ravel().tolist()}) > 1
    for token in np.random.default_rng(2).integers(0, VOCAB, (STEPS, B)):
        logits, cache = kvjax.step(m, cache, token.tolist())
        apart = [off(logits[b], rows[b].step(token[b])) for b in range(B)]
        # In float32, a number between two codes may become the other one, in some row.
        assert np.median(apart) < 1e-4 and max(apart) < 0.03


@pytest.mark.rotating
@pytest.mark.parametrize(("keep", "store"), sweep(CASES, ("adakv", "csr"), ("kvzip", "asymkv")))
def test_unequal_lists_are_encoded_by_what_is_fitted_to_each(keep, store):
    check_steps(keep, *of_store(store))


@pytest.mark.rotating
@pytest.mark.parametrize("keep", KEEPS)
def test_a_read_of_all_pages_of_fitted_codes_is_attention_to_all(keep):
    """Under a read, tokens are encoded a page at a time."""
    quest = kvjax.method("quest", budget=1.0, page=4, skip_layers=0)
    atoms = of_lists(sums("key"), sums("value"), granule=4)
    check_steps(keep, kvjax.chain(of_store("csr")[0], quest), atoms)


def test_pools_of_layers_that_are_encoded_differently_are_cut_to_their_pages():
    """KVzip may keep all of its slots in one layer, and yet every page that is stored is in use."""
    method = kvjax.chain(BY_LABEL["kvzip"].method(), ASYMKV[0])
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=STEPS)
    used = [int((np.asarray(pool.owner) >= 0).sum()) for pool in cache.pools]
    assert len(used) == 2
    assert all(len(pool.owner) < 2 * n for pool, n in zip(cache.pools, used, strict=True))
