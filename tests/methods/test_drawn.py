"""Sentences of drawn words: each is refused in one sentence when it is built, or it works.

Another seed every day; `KVJAX_SEED=738000 pytest tests/methods/test_drawn.py` draws those of a day again.
"""

import datetime
import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from kvjax.grammar.to_text import written
from tests.methods.drawn import draws, is_one_sentence, legal, ran, traced

DAY = int(os.environ.get("KVJAX_SEED", datetime.date.today().toordinal()))


def drawn(count: int, more: int = 0):
    """`count` draws of the day; what fails is not shrunk, because every try would compile."""

    def decorate(test):
        ways = settings(
            max_examples=count, deadline=None, database=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck), print_blob=False,
        )  # fmt: skip
        return seed(DAY + more)(ways(given(draws())(test)))

    return decorate


def told(random):
    """Tell the sentence of a draw, which a failure prints."""
    one = legal(random)
    note(f"KVJAX_SEED={DAY}, on {one.model}:\n{written(one.method)}")
    return one


@pytest.mark.rotating
@drawn(10)
def test_a_sentence_traces_and_what_was_refused_on_the_way_says_why(random):
    one = told(random)
    assert all(is_one_sentence(refusal) for refusal in one.refusals), one.refusals
    traced(one)


@drawn(2, more=1_000_000)
def test_a_sentence_keeps_what_it_may_and_steps_go_on_from_there(random):
    one = told(random)
    ran(one)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_many_sentences_work(part):
    """300 in parts, between which a process may forget its programs."""

    @drawn(10, more=2_000_000 + 1000 * part)
    def works(random):
        one = told(random)
        assert all(is_one_sentence(refusal) for refusal in one.refusals), one.refusals
        traced(one)
        ran(one)

    works()
