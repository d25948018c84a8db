"""Spans of unequal length: sentences that keeps leave in part, events that a further turn cuts anew."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs
from kvjax.keep.scores.tokens import IsTokenType
from kvjax.read.sentences import SentenceMeans, SentenceStart
from tests.float64.reads_by_index import Recalled
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off
from tests.read.test_persistent import model, quarter

EVENTS = dict(gamma=0.3, keys=2, beside=0.3, least=2, events=8, sinks=2, newest=4)
TOKENS = np.random.default_rng(8).integers(0, 64, (4, B))


@pytest.mark.rotating
def test_events_are_recalled_with_their_neighbours_while_tokens_come():
    m, seen, rows = model(layers=2), [], []
    _, cache = kvjax.prefill(m, MAIN.first, method=kvjax.method("em-llm", budget=0.25, **EVENTS), room=8)
    for tokens in MAIN.first:
        prompt, attends = Prompt(Decoder(m), tokens), Recalled(quarter, **EVENTS, seen=seen)
        rows.append(Row(prompt, [np.ones((len(k), len(tokens)), bool) for k in prompt.k], attends=attends))
    for token in TOKENS:
        logits, cache = kvjax.step(m, cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5
    events, similar, near = np.array(seen).T
    # Some layers read events for themselves and for their neighbours, and leave others out.
    assert ((similar > 0) & (near > 0) & (events > similar + near)).any()


def test_a_sentence_begins_after_a_separator_even_if_that_has_left():
    ends, k = IsTokenType((7,)), jnp.asarray([[3.0], [5.0], [1.0], [2.0]])
    word = SentenceMeans(kvjax.words.Budget(4), separators=ends, most=3)
    tokens, pos = jnp.asarray([[1, 1, 7, 1, 1, 7, 1]]), jnp.arange(7)[None]
    nothing = jnp.zeros((1, 1, 7, 1))
    inputs = Inputs(nothing, nothing, nothing, None, pos, jnp.asarray([7]), {}, tokens)
    begins = SentenceStart(ends).start(inputs, 1)[0, 0]
    assert begins.tolist() == [0, 0, 0, 3, 3, 3, 6]
    # Slots of tokens 6, 1, 4 and of a generated one; both separators have left.
    held = jnp.asarray([6, 1, 4, 9])
    traces = {key_of(SentenceStart(ends)): jnp.asarray([6.0, 0, 3, 0]), key_of(ends): jnp.zeros(4)}
    found = word.learn(k, held, traces)
    assert found["starts"].tolist() == [1, 4, 6] and found["keys"][:, 0].tolist() == [5.0, 1.0, 2.5]


@pytest.mark.rotating
def test_a_further_turn_finds_events_in_all_tokens():
    m, method = model(layers=2), kvjax.method("em-llm", budget=0.25, **EVENTS)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=16)
    starts = [np.asarray(group.bodies[0].sums["starts"]) for group in cache.groups]
    _, cache = kvjax.prefill(m, MAIN.second, cache=cache, room=8)
    for group, before in zip(cache.groups, starts, strict=True):
        after = np.asarray(group.bodies[0].sums["starts"])
        lasts = [np.where(x < 2**30, x, -1).max(-1) for x in (before, after)]
        assert (lasts[1] >= lasts[0]).all() and (lasts[1] > lasts[0]).any()


def test_a_keep_that_leaves_tokens_out_of_upper_layers_is_refused():
    with pytest.raises(ValueError, match="learns from all tokens of a prompt"):
        kvjax.chain(kvjax.method("lazyllm"), kvjax.method("em-llm", budget=0.5))
