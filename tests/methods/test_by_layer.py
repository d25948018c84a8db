"""A method of its own for every layer: each layer is what its method makes of it alone."""

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.state.cache import nbytes
from tests.float64.reference import Row
from tests.methods.battery import MAIN, ROOM, kept_of, model, off, positions, prompt_of
from tests.methods.expected import GATE, GATE_THRESHOLD
from tests.methods.golden import model as deeper
from tests.methods.rows import PAGE, WINDOW
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

WHOLE = "full"
# What the layers of "4/2" follow, by rows of the table, and what codes may change of the logits.
PAIRS = {
    "evicting in steps below everything": ("h2o", WHOLE, 3e-5),
    "codes below pages": ("int8", "adakv", 0.02),
    "by mass below by query": ("vatp", "tova", 3e-5),
    "granules below prompts": ("kivi", "criticalkv", 0.3),
    "a residue below every few steps": ("less", "lagkv", 3e-5),
}


def victims(labels):
    """Find what leaves each layer after a token; a layer knows itself by its slots."""

    def victim(lists, length, queries):
        mine = BY_LABEL[labels[lists[0][0]["layer"]]].victim
        return [None] * len(lists) if mine is None else mine(lists, length, queries)

    return victim


class Leaves:
    """What slots that leave do to the others, in the layers whose method says so."""

    def __init__(self, labels):
        self.each = [BY_LABEL[label].leave for label in labels]

    def __call__(self, memory, lists, gone):
        mine = next((self.each[slots[0]["layer"]] for slots in lists if slots), None)
        if mine is not None:
            mine(memory, lists, gone)

    def answer(self, memory, layer, head, q):
        return (
            self.each[layer].answer(memory, layer, head, q)
            if hasattr(self.each[layer], "answer")
            else (0.0, 0.0)
        )


@pytest.mark.parametrize("name", sweep(PAIRS, next(iter(PAIRS))))
def test_every_layer_keeps_drops_and_costs_what_its_method_says(name):
    *labels, error = PAIRS[name]
    m, alone = model("4/2"), [BY_LABEL[label].method() for label in labels]
    method = kvjax.by_layer(alone)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    each = [kvjax.prefill(m, MAIN.first, method=one, room=ROOM)[1] for one in alone]
    # Layers are counted half by half; what rows have read is counted once in each.
    assert 2 * (nbytes(cache) - 16) == sum(nbytes(one) - 16 for one in each)
    rows = []
    for b in range(len(MAIN.first)):
        prompt = prompt_of("4/2", "main", b)
        kept = [kept_of(label, prompt)[layer] for layer, label in enumerate(labels)]
        assert [lists[b] for lists in positions(cache)] == [[set(np.flatnonzero(k)) for k in x] for x in kept]
        rows.append(Row(prompt, kept, leave=Leaves(labels)))
    for token in MAIN.steps:
        logits, cache = kvjax.step(m, cache, token)
        want = [row.step(t, victim=victims(labels)) for row, t in zip(rows, token, strict=True)]
        assert off(logits, np.stack(want)) < error
    for b, row in enumerate(rows):
        assert [lists[b] for lists in positions(cache)] == row.positions()


def by_layer_of(row):
    """Return the row's method for every layer of its model; None if it concerns all layers together."""
    try:
        return kvjax.by_layer([row.method()] * model(row.model).config.layers)
    except InputError:
        return None


def two_turns(m, method):
    """Logits of a prompt, two steps and a second prompt, and what is kept in the end."""
    logits, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    out = [np.asarray(logits)]
    for tokens in MAIN.steps[:2]:
        logits, cache = kvjax.step(m, cache, tokens)
        out.append(np.asarray(logits))
    logits, cache = kvjax.prefill(m, MAIN.second, cache=cache, room=ROOM)
    return np.stack([*out, np.asarray(logits)]), positions(cache)


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep([r.label for r in ROWS if by_layer_of(r) is not None], "tidaldecode"))
def test_one_method_for_every_layer_is_that_method(label):
    row = BY_LABEL[label]
    m = model(row.model)
    (want, kept), (got, held) = two_turns(m, row.method()), two_turns(m, by_layer_of(row))
    assert off(got, want) < 1e-4 and held == kept


@pytest.mark.rotating
def test_a_text_may_be_read_in_chunks_and_in_turns():
    m, method = model("4/2"), kvjax.by_layer([BY_LABEL["adakv"].method(), BY_LABEL["h2o"].method()])
    texts = MAIN.first[:2]
    want, whole = kvjax.prefill(m, texts, method=method, room=ROOM, chunk=16)
    _, cache = kvjax.prefill(m, [row[:16] for row in texts], method=method, room=ROOM)
    logits, cache = kvjax.prefill(m, [row[16:] for row in texts], cache=cache, room=ROOM)
    assert positions(whole) == positions(cache)
    assert off(want, logits) < 1e-5


def test_what_concerns_all_layers_or_two_kinds_of_pages_is_refused():
    for id, hyper in (
        ("streamingllm", {}), ("kvzip", {}), ("fastkv", {}), ("snapkv", dict(variant="paper")),
    ):  # fmt: skip
        with pytest.raises(InputError, match="concern all layers together"):
            kvjax.by_layer([None, kvjax.method(id, budget=80, **hyper)])
    with pytest.raises(InputError, match="concern all layers together"):
        kvjax.by_layer([None, kvjax.method("gemfilter", budget=80)])
    gated = kvjax.method("kvzap", fitted=GATE, threshold=GATE_THRESHOLD, window=WINDOW, page=PAGE)
    with pytest.raises(InputError, match="its layers have several"):
        kvjax.by_layer([BY_LABEL["adakv"].method(), gated])
    with pytest.raises(InputError, match="its layers already say all"):
        kvjax.by_layer([kvjax.by_layer([None, None]), None])
    with pytest.raises(ValueError, match="which no chain can add to"):
        kvjax.chain(kvjax.by_layer([None, None]), kvjax.method("int8"))
    with pytest.raises(InputError, match="expected a list with one for every layer"):
        kvjax.by_layer("int8")
    with pytest.raises(ValueError, match="needs budget="):
        kvjax.by_layer(["snapkv"])
    with pytest.raises(InputError, match="2 sentences were given for the 3 layers"):
        kvjax.prefill(deeper("groups"), MAIN.first, method=kvjax.by_layer([None, "int8"]))


def test_equal_lists_are_equal_methods():
    lists = [[None, "int8"], [kvjax.method("full"), kvjax.method("int8")]]
    one, other = (kvjax.by_layer(x) for x in lists)
    assert one == other and hash(one) == hash(other) and one != kvjax.by_layer(["int8", None])
