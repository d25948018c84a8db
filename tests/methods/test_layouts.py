"""Classes of layout: which sentence stands for each, and how many decoders the methods of one make."""

import collections

import kvjax
from kvjax.aot.cases.layouts import SENTENCES
from kvjax.compat.layout_class import layout_class
from kvjax.grammar import Method
from kvjax.grammar.protocols import Answering
from kvjax.methods import METHODS, takes_budget
from tests.methods.battery import class_of
from tests.methods.table import ROWS

# Classes whose methods do different things in a step: so many programs over caches of one layout.
SEVERAL = {
    "dense, kv heads, evicts at prefill": 3,
    "dense, kv heads, evicts at prefill, rotates by rank, reads twice": 2,
    "dense, kv heads, evicts every few steps": 6,
    "dense, kv heads, evicts every few steps, merges into slots": 2,
    "dense, kv heads, evicts every step by mass": 4,
    "dense, kv heads, evicts every step by mass, merges into slots": 4,
    "dense, kv heads, evicts every step by query": 6,
    "dense, kv heads, evicts never, granule codes": 3,
    "dense, kv heads, evicts never, token codes": 7,
    "dense, kv heads, evicts never, reads pages": 4,
    "dense, kv heads, evicts never, reads pages, skips layers": 2,
    "dense, kv heads, evicts at prefill, granule codes": 2,
    "one pool, kv heads, evicts at prefill": 3,
    "dense, kv heads, evicts at prefill, merges into slots": 2,
    "dense, kv heads, evicts at prefill, rotates by rank": 2,
    "dense, kv heads, evicts at prefill, rotates by shared ranges": 2,
    "dense, kv heads, evicts every step": 4,
    "pages, kv heads, evicts at prefill": 4,
    "pages, kv heads, evicts every step": 4,
}


def test_a_sentence_that_is_compiled_ahead_of_time_stands_for_every_class():
    stand = {(layout_class(one.method()), one.windowed) for one in SENTENCES.values()}
    assert stand == {class_of(row) for row in ROWS}


def decoders():
    """By class, what the steps of its methods depend on, and whose steps these are."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for id in METHODS:
        method = kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}))
        found[str(layout_class(method))][method.decode_part()].append(id)
    return found


def test_methods_of_one_class_share_a_decoder_but_where_their_steps_differ():
    found = {kind: [*keys.values()] for kind, keys in decoders().items()}
    assert {kind: ids for kind, ids in found.items() if len(ids) != SEVERAL.get(kind, 1)} == {}
    assert set(SEVERAL) <= set(found)


def test_whatever_acts_on_prompts_alone_decodes_like_no_method_at_all():
    """Unless a later choice goes by what steps remember, keys turn by more than their positions, or a merge
    answers for what has left."""
    plain = Method().decode_part()
    share = {id for keys in decoders().values() for id in keys.get(plain, ())}
    others = {row.id for row in kvjax.methods() if row.phase == "prefill"} - share
    for id in others:
        keep = kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {})).keep
        assert keep is not None, id
        steady = keep.phase.steady and not isinstance(keep.merge, Answering)
        assert not steady or (keep.score is not None and keep.score.traces), id
    assert "snapkv" in share and "adakv" not in others
