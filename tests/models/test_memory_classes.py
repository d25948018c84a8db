"""The whole conversation, for one architecture of every kind of memory."""

import dataclasses
from itertools import combinations

import jax
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.fork import fork
from kvjax.api.rows import reset_rows
from kvjax.models.params import regroup
from tests.models.architectures import TABLE
from tests.models.conversation import (
    BATCHES,
    ROOM,
    TEXTS,
    close,
    equal,
    model,
    stacked_groups,
    step,
    talk,
    whole,
)  # fmt: skip
from tests.models.memory_classes import PLAIN, REPRESENTATIVES, memory_class


def params(names, always=PLAIN):
    """Run some always, the other architectures in turn."""
    turn = {name: [] if name in always else [pytest.mark.rotating] for name in names}
    return [pytest.param(n, marks=[pytest.mark.xdist_group(n), *marks]) for n, marks in turn.items()]


# A second turn of slots and of what is taken from other layers; the others take turns.
TURNING = ("gqkva", "lisa")
EVERY = pytest.mark.parametrize("name", params(TABLE))
# Slots, states and what is handed on: a scan takes the layers of all others from the stack as it does these.
STACKED = pytest.mark.parametrize(
    "name",
    params(
        [n for n in TABLE if len(stacked_groups(n)) < TABLE[n].config.layers],
        ("gqkva", "retnet", "resformer"),
    ),
)


def test_every_class_of_memory_has_one_representative():
    classes = {name: memory_class(TABLE[name].config) for name in TABLE}
    assert {classes[name] for name in REPRESENTATIVES} == set(classes.values())
    assert all(classes[a] != classes[b] for a, b in combinations(REPRESENTATIVES, 2))


def test_the_plain_suite_has_every_kind_of_memory_but_a_context_and_ids():
    kinds = {name: memory_class(TABLE[name].config) for name in TABLE}
    kept = {"slots", "state", "nothing", "growing", "window", "factors", "shared"}
    words = {word for name in PLAIN for kind in kinds[name] for word in kind.split(", ")}
    assert kept <= words and {kind.split(", ")[0] for of in kinds.values() for kind in of} <= kept


@pytest.mark.rotating
@pytest.mark.parametrize("name", params(TABLE, TURNING))
def test_a_second_turn_continues_some_rows_and_begins_another_anew(name):
    done, m, want = talk(name), model(name), whole(name).logits
    before = done.steps[-1]
    emptied = reset_rows(before.cache, np.array([False, False, True]))
    assert emptied.next.tolist() == [*before.read[:2], 0]
    texts, start = np.array([*done.texts[:2], 3]), np.array([*before.read[:2], 0])
    new = [TEXTS[t, s : s + n].tolist() for t, s, n in zip(texts, start, (5, 9, 4), strict=True)]
    read = start + [5, 9, 4]
    logits, cache = kvjax.prefill(m, new, cache=emptied, room=8)
    close(logits, want[texts, read - 1])
    logits, _ = step(m, cache, TEXTS[texts, read], np.ones(3, bool))
    close(logits, want[texts, read])


@EVERY
def test_a_saved_cache_is_the_one_that_was_saved(name, tmp_path):
    cache = talk(name).steps[-1].cache
    kvjax.save_cache(tmp_path / "cache", cache)
    equal(kvjax.load_cache(tmp_path / "cache"), cache)


@EVERY
def test_a_copied_row_holds_what_its_original_holds(name):
    cache = talk(name).steps[-1].cache
    copies = fork(cache, 2)
    assert copies.next.tolist() == np.repeat(np.asarray(cache.next), 2).tolist()
    equal(copies.groups, jax.tree.map(lambda x: np.repeat(np.asarray(x), 2, axis=1), cache.groups))


@pytest.mark.rotating
@STACKED
def test_stacked_layers_compute_the_same_in_one_program_of_steps(name):
    batch, want = BATCHES["main"], whole(name).logits
    texts, read = np.array(batch.texts), np.array(batch.lengths)
    params = regroup(model(name).params, stacked_groups(name))
    stacked = dataclasses.replace(model(name), params=params)
    logits, cache = kvjax.prefill(stacked, TEXTS[texts, : max(read)], lengths=read, room=ROOM)
    close(logits, want[texts, read - 1])
    before = steps.step._cache_size()
    for i in range(3):
        logits, cache = kvjax.step(stacked, cache, TEXTS[texts, read + i])
        close(logits, want[texts, read + i])
    assert steps.step._cache_size() <= before + 1
