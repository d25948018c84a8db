"""Two keeps in one method: what is refused would leave out what one of them says."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Method, stages
from kvjax.grammar.phase import ByRank
from kvjax.grammar.stages import PrefillAndDecode, in_stages
from kvjax.grammar.when import PREFILL_END, STEP, Every
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.scores.score import KeyNorm, Position
from tests.methods.battery import ROOM, model
from tests.methods.method_pairs import PROMPTS, STEPS, apart
from tests.methods.test_conditions import H2O, SAME, keep
from tests.sweep import sweep

# A prompt leaves the smallest keys; every token evicts the oldest.
FIRST, LATER = keep(-1.0 * KeyNorm()).keep, keep(Position(), when=STEP).keep


def steps_of(first, later=None):
    """Logits of steps after a prompt that `first` compresses; later: the keep of the steps, another one."""
    _, cache = kvjax.prefill(model("4/2"), PROMPTS, method=Method(first), room=ROOM)
    cache = cache if later is None else dataclasses.replace(cache, method=Method(later))
    found = []
    for tokens in STEPS[:4]:
        logits, cache = kvjax.step(model("4/2"), cache, tokens)
        found.append(logits)
    return np.stack(found)


@pytest.mark.rotating
def test_two_keeps_are_one_at_the_prompt_and_the_other_in_steps():
    assert apart(steps_of(in_stages(FIRST, LATER)), steps_of(FIRST, LATER)) < 1e-5


OTHER = {
    "budget": Budget(0.25),
    "phase": ByRank(),
    "merge": ZipMerge(0.0),
    "lower": SAME,
    "skip_layers": 1,
    "reuse": 2,
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(OTHER))
def test_what_the_first_keep_alone_says_would_be_left_out(name):
    """A prompt would leave other slots to the first step than the first keep alone leaves."""
    assert set(OTHER) == set(stages._SHARED)
    first = dataclasses.replace(FIRST, **{name: OTHER[name]})
    with pytest.raises(ValueError, match="give both the same"):
        in_stages(first, LATER)
    with mock.patch.object(stages, "_SHARED", {}):
        both = in_stages(first, LATER)
    assert apart(steps_of(both)[0], steps_of(first)[0]) > 1e-3


def test_evictions_of_the_first_keep_while_decoding_would_be_left_out():
    with pytest.raises(ValueError, match="the first evicts while decoding, too"):
        in_stages(H2O.keep, LATER)
    one = in_stages(dataclasses.replace(H2O.keep, when=PREFILL_END), LATER)
    assert one.when == STEP and one.score.later == LATER.score


@pytest.mark.rotating
def test_evictions_after_several_tokens_would_be_by_the_score_of_prompts():
    later = dataclasses.replace(LATER, when=Every(2))
    with pytest.raises(ValueError, match="does not evict after every token"):
        in_stages(FIRST, later)
    both = dataclasses.replace(later, score=PrefillAndDecode(FIRST.score, later.score))
    assert apart(steps_of(both), steps_of(FIRST, later)) > 1e-3
