"""Reads over slots that leave while decoding, and over unequal lists: float64 numpy, and their twins."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method
from kvjax.state.cache import Paged
from tests.float64 import granules, reads, reads_by_index
from tests.float64.reference import Prompt, Row, best
from tests.methods.battery import MAIN, VOCAB, B, decoder, kept_of, model, off, positions, prompt_of
from tests.methods.rows import THETA
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

BUDGET, RECENT, TOKENS = 14, 4, 40


def half(n):
    return max(1, n // 2)


def read(id, share=0.5, **hyper):
    """Return the read of a method and the store that it needs, in every layer."""
    word = kvjax.method(id, budget=share, **hyper)
    return Method(read=word.read, store=word.store)


QUEST = dict(page=4, skip_layers=0)
# The read, its form, the tokens of a granule, and the newest that are always read.
FORMS = {
    "quest": (read("quest", **QUEST), granules.quest(half, 4), 4, 0),
    "sparq": (read("sparq", channels=4, newest=3), granules.sparq(half, 4), 1, 3),
}


def h2o_kept(prompt):
    """Keep the newest tokens, and those of the largest mass."""
    found = []
    for p in prompt.p:
        mass = p.reshape(2, -1, *p.shape[1:]).sum((1, 2))
        mass[:, prompt.length - RECENT :] = np.inf
        found.append(best(mass, np.full(2, BUDGET)))
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("name", FORMS)
def test_what_is_read_receives_attention_and_the_worst_of_all_slots_leaves(name):
    word, attends, group, residual = FORMS[name]
    method = kvjax.chain(kvjax.method("h2o", budget=BUDGET, recent=RECENT / BUDGET), word)
    rows = []
    for first in MAIN.first:
        prompt = Prompt(decoder("4/2"), first)
        how = dict(bits=None, group=group, residual=residual, attends=attends)
        places = -(-(BUDGET + 1 - residual) // group)
        worst = granules.heaviest(BUDGET, RECENT)
        rows.append(granules.Granules(prompt, h2o_kept(prompt), **how, places=places, worst=worst))
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=TOKENS)
    for token in np.random.default_rng(5).integers(0, VOCAB, (TOKENS, B)):
        logits, cache = kvjax.step(model("4/2"), cache, token.tolist())
        for b, row in enumerate(rows):
            assert off(np.asarray(logits[b], np.float64), row.step(token[b])) < 1e-5
            assert [lists[b] for lists in positions(cache)] == row.positions()
    # Pages were emptied and, where they hold several tokens, gathered.
    assert all(row.memory["emptied"] for row in rows)
    assert group == 1 or any(row.memory["gathered"] for row in rows)


# Rows of the table whose lists are unequal, and reads with the form that they have over plain lists.
PAGED = ("adakv", "pyramidkv", "kvzip")
OF_SLOTS = {
    "sparq": (read("sparq", channels=4, newest=4), reads.sparq(half, channels=4, newest=4)),
    "double-sparsity": (read("double-sparsity", channels=5, newest=4), reads.ranked(reads.heavy(5), half, 4)),
    "pqcache": (
        read("pqcache", parts=2, code_bits=2, turns=3, newest=4),
        reads.ranked(reads.product_codes(parts=2, bits=2, turns=3), half, 4),
    ),
    "clusterkv": (
        read("clusterkv", clusters=4, turns=3, sinks=2, newest=4, skip_layers=0),
        reads.ranked(reads.clusters(4, 3), half, 4, sinks=2),
    ),
    "tokenselect": (read("tokenselect", sinks=2, newest=4), reads.voted(half, newest=4, sinks=2)),
    "magicpig": (
        read("magicpig", planes=2, tables=8, sinks=2, newest=4, skip_layers=0),
        reads.magicpig(half, planes=2, tables=8, sinks=2, newest=4),
    ),
    "reattention": (
        read("reattention", page=4, newest=6, sinks=2),
        reads.reattention(half, page=4, newest=6, sinks=2, theta=THETA),
    ),
    "a2ats": (
        read("a2ats", clusters=4, turns=3, sinks=2, newest=4, window=6),
        reads_by_index.a2ats(half, clusters=4, turns=3, window=6, sinks=2, newest=4, theta=THETA),
    ),
}
# Lists of one older key have no angle about their mean, and segments of equal tokens tie.
UNEQUAL = [("adakv", name) for name in OF_SLOTS]
EQUAL = ("snapkv kvpress", "tokenselect")
UNEQUAL.append(EQUAL)
UNEQUAL += [("pyramidkv", name) for name in OF_SLOTS if name not in ("magicpig", "reattention")]
UNEQUAL.append(("kvzip", "reattention"))


@pytest.mark.rotating
@pytest.mark.parametrize(("label", "name"), sweep(UNEQUAL, *UNEQUAL[:1], ("adakv", "pqcache"), EQUAL))
def test_slots_of_unequal_lists_are_read_as_those_of_plain_ones(label, name):
    row, (word, attends) = BY_LABEL[label], OF_SLOTS[name]
    held = [prompt_of(row.model, "main", b) for b in range(B)]
    rows = [Row(prompt, kept_of(label, prompt), row.phase, attends=attends) for prompt in held]
    steps(kvjax.chain(row.method(), word), row.model, rows, lambda row: row.positions())


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["snapkv kvpress", "adakv"])
def test_layers_read_those_of_the_picked_tokens_that_they_hold(label):
    row, rows = BY_LABEL[label], []
    for b in range(B):
        prompt = prompt_of(row.model, "main", b)
        attends = reads.tidal(half, picks=(0,), newest=4)
        rows.append(Row(prompt, kept_of(label, prompt), row.phase, attends=attends))
    word = read("tidaldecode", skip_layers=0, reselect=0, newest=4)
    steps(kvjax.chain(row.method(), word), row.model, rows, lambda row: row.positions())


@pytest.mark.parametrize("label", sweep(PAGED, "adakv"))
def test_pages_of_unequal_lists_are_read_by_their_bounds(label):
    row, rows = BY_LABEL[label], []
    for b in range(B):
        prompt = prompt_of(row.model, "main", b)
        how = dict(bits=None, group=4, residual=0, places=20, attends=granules.quest(half, 4))
        kept = kept_of(label, prompt)
        rows.append(granules.Granules(prompt, kept, **how, worst=lambda *_: None))
    steps(kvjax.chain(row.method(), read("quest", **QUEST)), row.model, rows, lambda row: row.positions())


def steps(method, name, rows, held):
    """Yield steps of a method, beside those of its float64 rows."""
    _, cache = kvjax.prefill(model(name), MAIN.first, method=method, room=TOKENS)
    paged = [part for group in cache.groups for part in group.parts if isinstance(part, Paged)]
    lengths = np.concatenate([np.asarray(part.lengths).ravel() for part in paged] or [np.zeros(0)])
    assert len({*lengths.tolist()}) != 1
    for token in np.random.default_rng(2).integers(0, VOCAB, (12, B)):
        logits, cache = kvjax.step(model(name), cache, token.tolist())
        for b, row in enumerate(rows):
            assert off(np.asarray(logits[b], np.float64), row.step(token[b])) < 1e-5
            assert [lists[b] for lists in positions(cache)] == held(row)


# Rows of the table that evict while decoding, or leave heads unequal numbers, and reads of all there is.
KEEPS = (
    "h2o", "tova", "r-kv", "lagkv", "scissorhands", "corm", "pagedeviction", "adakv", "pyramidkv", "kvzip",
    "duoattention", "kvzap", "dms", "d2o", "cam", "keepkv", "zeromerge", "h2o + int8", "adakv + int4",
    "h2o + kivi", "adakv + kivi",
)  # fmt: skip
WHOLE = {
    "quest": QUEST,
    "sparq": dict(newest=4),
    "infllm": dict(page=4, newest=4, sinks=2),
    "pqcache": dict(newest=4, code_bits=2),
    "loki": dict(newest=4),
    "double-sparsity": dict(newest=4),
    "clusterkv": dict(newest=4, clusters=4, skip_layers=0),
    "tokenselect": dict(newest=4, sinks=2),
}
DUO_AND_QUEST = ("duoattention", "quest")
# Pages that are not whole yet are not encoded, so no store alone has the same codes of single tokens.
OF_PAGES = ("quest", "infllm", "clusterkv", "tokenselect")
PAIRS = [(a, b) for a in KEEPS for b in WHOLE if not ("int" in a and b in OF_PAGES)]


@pytest.mark.rotating
@pytest.mark.parametrize(("label", "name"), sweep(PAIRS, DUO_AND_QUEST))
def test_a_read_of_all_that_a_keep_leaves_is_the_keep_alone(label, name):
    row, word = BY_LABEL[label], read(name, 1.0, **WHOLE[name])
    alone = row.method()
    both = kvjax.chain(alone, word)
    if "int" in label:
        # The newest tokens, which the read leaves to the tail, are not encoded yet.
        alone = dataclasses.replace(alone, store=dataclasses.replace(alone.store, residual=word.read.newest))
    for (got, held), (want, others) in zip(fed(both, row.model), fed(alone, row.model), strict=True):
        # Codes that both make of equal numbers in another order may differ in one.
        assert off(got, want) < (2e-2 if "kivi" in label else 2e-5)
        assert held == others


@pytest.mark.rotating
@pytest.mark.parametrize("keep", sweep(("adakv", "duoattention", "h2o", "kvzip"), "kvzip"))
def test_first_layers_that_read_everything_lie_in_the_pages_of_those_that_pick(keep):
    """Also where a prompt is read in pieces, and in a second turn."""
    alone = BY_LABEL[keep].method()
    both = kvjax.chain(alone, read("quest", 1.0, page=8, skip_layers=1))
    # A piece of a prompt must have more tokens than the window protects.
    found, chunk = [], None if keep == "adakv" else 13
    for method in (alone, both):
        _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=4, chunk=chunk)
        _, cache = kvjax.prefill(model("4/2"), MAIN.second, cache=cache, room=12)
        assert len(cache.groups) == 2
        for token in np.random.default_rng(2).integers(0, VOCAB, (12, B)):
            logits, cache = kvjax.step(model("4/2"), cache, token.tolist())
        found.append((np.asarray(logits, np.float64), positions(cache)))
    assert off(found[1][0], found[0][0]) < 2e-5 and found[0][1] == found[1][1]


def fed(method, name):
    """Yield the logits and positions of every step of a decode."""
    _, cache = kvjax.prefill(model(name), MAIN.first, method=method, room=TOKENS)
    for token in np.random.default_rng(2).integers(0, VOCAB, (20, B)):
        logits, cache = kvjax.step(model(name), cache, token.tolist())
        yield np.asarray(logits, np.float64), positions(cache)


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(("d2o", "cam", "keepkv", "lagkv"), "d2o"))
def test_what_lies_beside_slots_is_of_what_they_hold_once_others_left_or_merged_into_them(label):
    row = BY_LABEL[label]
    for word in (read("quest", **QUEST), read("sparq", newest=4)):
        _, cache = kvjax.prefill(
            model("4/2"), MAIN.first, method=kvjax.chain(row.method(), word), room=TOKENS
        )
        for token in np.random.default_rng(3).integers(0, VOCAB, (20, B)):
            _, cache = kvjax.step(model("4/2"), cache, token.tolist())
        for group in cache.groups:
            k, v, pos, summary, sums = (
                jax.tree.map(np.asarray, getattr(group.bodies[0], name))
                for name in ("k", "v", "pos", "summary", "sums")
            )
            live = (pos >= 0)[..., None]
            for name in sums:
                np.testing.assert_allclose(sums[name], np.where(live, v, 0).sum(-2), rtol=1e-4, atol=1e-4)
            if summary:
                low, high = (np.repeat(summary[name], 4, axis=-2) for name in ("low", "high"))
                assert ((k >= low) & (k <= high) | ~live).all()
            assert live.any() and (sums or summary)
