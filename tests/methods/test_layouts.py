"""Classes of layout: which sentence stands for each, and how many decoders the methods of one make."""

import collections

import kvjax
from kvjax.aot.cases.layouts import SENTENCES
from kvjax.compat.layout_class import layout_class
from kvjax.grammar import Method
from kvjax.grammar.kinds import Answering
from kvjax.methods import METHODS, takes_budget
from tests.methods.battery import class_of
from tests.methods.table import ROWS

# Classes whose methods act on prompts alone, and whose steps differ all the same: so many programs.
SEVERAL = {
    "dense, kv heads, evicts at prefill": 3,
    "dense, kv heads, evicts at prefill, merges into slots": 3,
    "dense, kv heads, evicts at prefill, rotates by rank": 2,
    "dense, kv heads, evicts at prefill, rotates by rank, reads twice": 2,
    "dense, kv heads, evicts at prefill, rotates by shared ranges": 2,
    "one pool, kv heads, evicts at prefill": 3,
    "pages, kv heads, evicts at prefill": 4,
}


def test_a_sentence_that_is_compiled_ahead_of_time_stands_for_every_class():
    stand = {(layout_class(one.method()), one.windowed) for one in SENTENCES.values()}
    assert stand == {class_of(row) for row in ROWS}


def built(id):
    return kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}))


def decoders():
    """By class, what the steps of its methods depend on, and whose steps these are."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for id in METHODS:
        found[str(layout_class(built(id)))][built(id).decode_part()].append(id)
    return found


def test_methods_of_one_class_share_a_decoder_but_where_their_steps_differ():
    """Every store and every read has steps of its own, and so has what evicts while decoding."""
    found = {kind: [*keys.values()] for kind, keys in decoders().items() if "evicts every" not in kind}
    apart = {
        kind: len({(built(id).store, built(id).read) for ids in groups for id in ids})
        for kind, groups in found.items()
    }
    expected = apart | SEVERAL
    assert {kind: ids for kind, ids in found.items() if len(ids) != expected[kind]} == {}
    assert set(SEVERAL) <= set(found)


def test_whatever_acts_on_prompts_alone_decodes_like_no_method_at_all():
    """Methods with another reason to differ in steps are left out.

    A later choice goes by what steps remember, keys are rotated by more than their positions, or a merge
    answers for evicted slots.
    """
    plain = Method().decode_part()
    share = {id for keys in decoders().values() for id in keys.get(plain, ())}
    others = {row.id for row in kvjax.methods() if row.phase == "prefill"} - share
    for id in others:
        keep = built(id).keep
        assert keep is not None, id
        steady = keep.phase.steady and not isinstance(keep.merge, Answering)
        assert not steady or (keep.score is not None and keep.score.traces), id
    assert "snapkv" in share and "adakv" not in others
