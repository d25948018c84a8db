"""Facts in place of pairs: each is needed and broken by methods, and messages name methods that help."""

import dataclasses
from functools import cache

import pytest

import kvjax
from kvjax.grammar.facts import INTACT, NEEDLESS, PARTS, Fact, clashes
from kvjax.methods.registry import METHODS, takes_budget
from kvjax.read.pages import PageBounds


@cache
def built():
    return [kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {})) for id in METHODS]


def words(part):
    return [word for method in built() if (word := getattr(method, part)) is not None]


@pytest.mark.parametrize("fact", Fact)
def test_every_fact_is_needed_and_broken_by_words_of_methods(fact):
    assert any(fact in word.requires for part in PARTS for word in words(part))
    assert any(fact in word.breaks for part in PARTS for word in words(part))


def test_a_method_that_is_named_does_not_break_the_fact_or_need_it():
    for (fact, part), id in INTACT.items():
        word = getattr(kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {})), part)
        assert fact not in word.breaks and any(fact in other.breaks for other in words(part))
    for (fact, part), id in NEEDLESS.items():
        method = kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}))
        # Where no word of the part does without it, another part serves.
        word = getattr(method, part)
        assert (word is None or fact not in word.requires) and any(fact in w.requires for w in words(part))


def test_a_message_has_the_fact_who_needs_it_who_breaks_it_and_what_helps():
    quest = kvjax.method("quest", budget=0.5)
    with pytest.raises(ValueError) as error:
        kvjax.chain(kvjax.method("finch", budget=0.5), quest)
    assert str(error.value) == (
        f"finch + quest cannot work: {quest.read!r} ranks keys at their positions, which needs that a key is "
        "rotated by its position for all queries, and this keep rotates keys anew whenever they are read "
        "(ByRank()): use snapkv for this keep, or leave one out"
    )


def test_a_word_of_ones_own_says_what_it_needs():
    @dataclasses.dataclass(frozen=True)
    class Steadfast(PageBounds):
        """Reads that do not mind ranks."""

        @property
        def requires(self):
            return {fact: why for fact, why in super().requires.items() if fact is not Fact.KEYS_BY_POSITION}

    keep = kvjax.method("streamingllm", budget=0.5).keep
    mine, theirs = (
        kvjax.grammar.Method(keep, read=word(kvjax.grammar.Budget(0.5))) for word in (Steadfast, PageBounds)
    )
    assert {clash.fact for clash in clashes(theirs)} - {clash.fact for clash in clashes(mine)} == {
        Fact.KEYS_BY_POSITION
    }


@pytest.mark.parametrize("id", ["a2ats", "reattention"])
def test_a_read_that_places_what_it_picks_is_no_place_in_host_memory(id):
    method = kvjax.method(id, budget=0.5)
    again = kvjax.chain(method.read, method.store)
    assert again.read == method.read and again.host is None
