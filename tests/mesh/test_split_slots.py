"""Lists whose slots lie on several devices: by the rules `sequence`, and by `tensor` where heads are few."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import layout_class
from kvjax.grammar.fitted import with_fitted
from kvjax.mesh.on_mesh import as_mesh
from kvjax.mesh.rules import Rules, as_rules
from kvjax.state.axes import map_axes
from kvjax.state.cache import Slots
from tests.mesh.test_sharded import EVERY, compiled_step
from tests.mesh.test_step import collectives
from tests.methods.battery import MAIN, ROOM, class_of, first_of_each_class, model, off, positions, talk
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same
from tests.models import conversation
from tests.sweep import sweep

# The classes whose lists can lie apart; those of every other class lie whole.
APART = (
    "full", "random", "sink-recent", "hashevict", "l2compress", "h2o", "snapkv", "snapkv windowed", "keepkv",
    "less", "minicache", "int8", "mikv", "h2o + int8", "alisa", "laq", "ems", "zipcache", "dcp", "qserve",
    "zdc",
)  # fmt: skip
WHOLE = [label for label in first_of_each_class() if label not in APART]
CASES = [(rules, label) for rules in ("sequence", "tensor+sequence") for label in APART]
LAYERS = 2


def slots_apart(cache, parts):
    """Every array of a cache lies where it should, and of every list a device holds one of so many parts."""
    on = cache.on_mesh
    assert on.devices("slots") == parts
    map_axes(lambda axes, x: _lies(x, on.sharding(axes, x.shape)), cache, on)
    for group in cache.groups:
        tail = group.tail
        assert tail.pos.addressable_shards[0].data.shape[3] * parts == tail.capacity


def _lies(x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)
    return x


@pytest.mark.parametrize("rules, label", sweep(CASES, ("sequence", "full")))
def test_a_list_whose_slots_lie_apart_answers_as_one_that_lies_together(rules, label):
    row, done = BY_LABEL[label], talk(label)
    mesh = "data=2,seq=4" if rules == "sequence" else "model=2,seq=4"
    chosen = as_rules(rules, as_mesh(mesh).axis_names)
    if "model" in mesh and model(row.model).config.heads % 4:
        chosen = chosen.but(heads=None, kv_heads=None)
    there, method = kvjax.spread(model(row.model), mesh, chosen), row.method()
    logits, held = kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    assert off(logits, done.prompt[0]) < 1e-5
    assert positions(held) == positions(done.prompt[1])
    slots_apart(held, 4)
    made = there if method.make is None else kvjax.prepare(there, method)
    program, state = compiled_step(made, held)
    if (rules, label) == ("sequence", "full"):
        # Per layer one maximum, and one sum of weights and of outputs; for all layers at once one minimum,
        # the first empty slot, and one sum, how many are empty.
        assert program.as_text().count(" all-reduce(") == 2 * LAYERS + 2
        assert len(collectives(program.as_text())) == (1 + 2) * LAYERS + 2 * LAYERS
    for token, (want, after) in zip(MAIN.steps, done.steps, strict=True):
        logits, state = program(with_fitted(made.params, method), state, token.astype(np.int32), EVERY)
        assert off(logits, want) < same(label)
        assert positions(state) == positions(after)


@pytest.mark.parametrize("label", WHOLE)
def test_classes_whose_lists_must_lie_together_are_refused_by_name_and_left_whole_by_tensor(label):
    row = BY_LABEL[label]
    method, kind = row.method(), class_of(row)[0]
    assert kind == layout_class(method)
    there = kvjax.spread(model(row.model), "seq=4", "sequence")
    with pytest.raises(InputError) as error:
        kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    assert f"here seq=4: its caches are of the class '{kind}'" in str(error.value)
    on = kvjax.pure.static(kvjax.spread(model(row.model), "model=1", "tensor"), method).reading.on_mesh
    assert on.devices("slots") == 1


@pytest.mark.rotating
def test_tensor_splits_slots_where_there_are_fewer_lists_than_devices_and_they_are_large():
    here, mesh = model("4/2"), as_mesh("model=4")
    for least, parts in ((0, 4), (2**20, 1)):
        rules = dataclasses.replace(Rules.named("tensor"), batch=None, slots_from=least)
        there, done = kvjax.spread(here, mesh, rules), talk("full")
        _, held = kvjax.prefill(there, MAIN.first, room=ROOM)
        tail = held.groups[1].tail
        assert isinstance(tail, Slots)
        assert tail.k.addressable_shards[0].data.shape == (1, 4, 2, tail.capacity // parts, 16)
        text = str(kvjax.shardings(held))
        does = "their slots are split instead" if parts == 4 else "every device holds all"
        assert f"2 lists over model=4: {does}" in text
        program, state = compiled_step(there, held)
        logits, _ = program(there.params, state, MAIN.steps[0].astype(np.int32), EVERY)
        assert off(logits, done.steps[0][0]) < 1e-5


@pytest.mark.rotating
def test_latents_are_split_by_their_slots_and_no_device_is_sent_them():
    name = "mla"
    m, done, batch = conversation.model(name), conversation.talk(name), conversation.BATCHES["main"]
    rules = dataclasses.replace(Rules.named("tensor"), batch=None, slots_from=0)
    there, read = kvjax.spread(m, "model=4", rules), np.array(batch.lengths)
    texts = conversation.TEXTS[list(batch.texts)]
    logits, held = kvjax.prefill(there, texts[:, : max(read)], lengths=read, room=conversation.ROOM)
    conversation.close(logits, done.prompt.logits)
    sizes = {x.addressable_shards[0].data.size * 4 for x in jax.tree.leaves(held.groups)}
    assert sizes == {x.size for x in jax.tree.leaves(held.groups)}
    given = texts[np.arange(3), read]
    logits, _ = kvjax.step(there, held, given)
    conversation.close(logits, done.steps[0].logits)
