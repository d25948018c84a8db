"""Every row of the table: one prompt, compressed once, against float64 numpy.

The prompt is read once per model and shared by all rows; its batch packs what must not matter: rows of
unequal length, one row twice behind other companions, and garbage where no token is. A whole conversation,
with steps and a second turn, is `test_battery.py`.
"""

import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.methods import METHODS
from kvjax.state.cache import nbytes
from tests.float64.reference import Prompt
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import (
    PACKED,
    PLAIN,
    ROOM,
    SHARED,
    T,
    attends_as,
    compressed,
    decoder,
    kept_of,
    model,
    off,
    packed,
    positions,
    step,
    stored,
)
from tests.methods.rows import WINDOW, PromptSizes, at_budget, count
from tests.methods.table import BY_LABEL, ROWS

TWIN = len(PACKED) - 1
_prompts = {}


def prompt_of(name, row):
    if (name, row) not in _prompts:
        _prompts[name, row] = Prompt(decoder(name), PACKED[row])
    return _prompts[name, row]


def rows(rows, turn=()):
    """One test per row, rotating if it is in `turn`."""

    def marks(row):
        # Rows on one model share its reading of the prompt, and rows of one layout their step.
        group = pytest.mark.xdist_group(f"sentences {row.model}")
        return (group, pytest.mark.rotating) if row.label in turn else (group,)

    return pytest.mark.parametrize("label", [pytest.param(r.label, marks=marks(r)) for r in rows])


# In the plain suite, a few of most families of methods; the others take turns.
WITNESSES = (
    "full", "offloaded", "fp8", "int8", "renumbered",
    "streamingllm", "sepllm", "hashevict", "h2o", "tova",
    "snapkv", "snapkv windowed", "kvzip", "citrus", "l2compress", "keydiff", "locret",
    "adakv", "adakv + renumbered", "criticalkv + int4", "duoattention", "headkv",
    "pyramidkv", "simlayerkv",
    "cam", "gisting", "chai", "kvsharer", "eigen-attention", "think",
    "cq", "q-int4", "mxint8", "cachegen", "llm-int8", "kivi", "q-hitter",
    "quest", "arkvale", "double-sparsity", "tokenselect", "retrievalattention",
)  # fmt: skip
TURNS = {row.label for row in ROWS} - set(WITNESSES)
every = rows(ROWS, TURNS)
# Each row compiles a step of its own: of those that attend alike the first asks, and the others take turns.
# So do those whose steps are held to the same numbers in a conversation of test_battery.py. The lists of
# `full` and `renumbered` are those of many methods.
ASKING = {attends_as(row): row.label for row in reversed(ROWS)}.values()
ALIKE = TURNS | BY_LABEL.keys() - {*ASKING, "full", "renumbered"} | set(PLAIN)
# Whoever keeps everything: one of every way to evict and to store, the others in turn.
WHOLE = ("full", "h2o", "adakv", "quest")


def test_every_method_has_a_row():
    assert set(METHODS) == {id for r in ROWS for id, _ in r.build if len(r.build) == 1}


@every
def test_a_prompt_leaves_the_tokens_that_the_method_says(label):
    found = positions(packed(label).cache)
    for b in range(len(PACKED)):
        row = BY_LABEL[label]
        want = kept_of(label, row.read(prompt_of(row.model, b)))
        for layer, keep in enumerate(want):
            sets = [set(np.flatnonzero(k).tolist()) for k in keep]
            assert found[layer][b] == stored(row, sets), (layer, b)


# In the plain suite, those whose parts of a budget these tell apart and `test_recorded.py` does not hold.
EDGED = ("nacl", "pyramidkv grouped")
EDGES = [r for r in ROWS if r.budgeted]
# At 0.25, a head's share of their made-up profile is a whole number, which float32 and float64 round apart.
WHOLE_SHARES = ("headkv", "retrieval-head")
# Tokens that must stay, where these are more than a window: verbs refuse smaller budgets.
MUST_STAY = {"lukv": 5}


@pytest.mark.rotating
@rows(EDGES, {r.label for r in EDGES} - set(EDGED))
@pytest.mark.parametrize("budget", [0.25, 0.75])
def test_other_budgets_leave_the_tokens_that_the_method_says(label, budget):
    """With windows of 4 tokens: of 32, two windows; of all, less than 2 (n - window)."""
    row = BY_LABEL[label]
    budget = 0.34375 if label in WHOLE_SHARES and budget == 0.25 else budget
    cache = compressed(row.model, row.at_budget(budget)).cache
    found = positions(cache)
    with at_budget(budget):
        for b in range(len(PACKED)):
            if count(len(PACKED[b])) < MUST_STAY.get(label, WINDOW):
                continue  # verbs refuse it
            want = kept_of(label, row.read(prompt_of(row.model, b)))
            for layer, keep in enumerate(want):
                held = [set(np.flatnonzero(k).tolist()) for k in keep]
                assert found[layer][b] == held, (layer, len(PACKED[b]))


@pytest.mark.rotating
@pytest.mark.xdist_group("sentences 4/2")
def test_methods_that_leave_caches_of_one_shape_share_one_decoder():
    """What they do with a prompt differs, and their steps do not."""
    caches = [packed(label).cache for label in ("random", "criticalkv", "expected-attention")]
    assert len({cache.method for cache in caches}) == 3
    programs = set()
    for cache in caches:
        step(model("4/2"), cache, [r[-1] for r in PACKED], append=False)
        programs.add(steps.step_keeping._cache_size())
    assert len(programs) == 1


@rows([r for r in ROWS if r.error is not None], ALIKE)
def test_the_last_token_asked_again_attends_to_what_is_kept(label):
    row = BY_LABEL[label]
    want = []
    for b, tokens in enumerate(PACKED):
        prompt = row.read(prompt_of(row.model, b))
        slots = Slotwise(prompt, kept_of(label, prompt), row.phase, row.leave, row.attends)
        want.append(slots.step(tokens[-1], append=False))
    assert off(packed(label).asked, np.stack(want)) < row.error


@every
def test_a_row_leaves_the_same_behind_other_companions(label):
    for lists in positions(packed(label).cache):
        assert lists[TWIN] == lists[SHARED]


@rows(ROWS, ALIKE)
def test_a_row_answers_the_same_behind_other_companions(label):
    done = packed(label)
    assert off(done.asked[TWIN], done.asked[SHARED]) < 1e-6


@every
def test_bytes_are_those_of_the_claim(label):
    row = BY_LABEL[label]
    c = model(row.model).config
    sizes = PromptSizes(len(PACKED), c.kv_heads, c.heads, c.head_dim, c.layers, T, ROOM)
    assert nbytes(packed(label).cache) == row.nbytes(sizes)


@rows(ROWS)
def test_equal_arguments_give_one_object(label):
    row = BY_LABEL[label]
    assert row.method() == row.method() and hash(row.method()) == hash(row.method())
    if len(row.build) == 1:
        assert row.method() is row.method()


@pytest.mark.rotating
@rows([r for r in ROWS if r.whole is not None], {r.label for r in ROWS} - set(WHOLE))
def test_a_budget_that_covers_the_prompt_changes_nothing(label):
    full = kvjax.prefill(model(BY_LABEL[label].model), PACKED, room=ROOM)[1]
    done = packed(label, whole=True)
    asked, _ = step(model(BY_LABEL[label].model), full, [r[-1] for r in PACKED], append=False)
    assert off(done.asked, asked) < 1e-5
    for got, want in zip(positions(done.cache), positions(full), strict=True):
        for lists, row in zip(got, want, strict=True):
            assert lists == row[:1] * len(lists)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["4/2", "6/3", "deep", "windowed"])
def test_the_shared_reading_gives_the_logits_of_the_prompt(name):
    m = model(name)
    logits, _ = kvjax.prefill(m, PACKED, room=ROOM)
    want = np.stack([prompt_of(name, b).all_logits[-1] for b in range(len(PACKED))])
    assert off(logits, want) < 1e-5
