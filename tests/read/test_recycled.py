"""Selections that later tokens reuse: which slots every step reads, in float64, over whatever holds them."""

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compress.unread import unread_bytes
from kvjax.grammar import Budget, Method, Store
from kvjax.models.mixers.attention import Attention
from kvjax.read.recycled import RecycledSlots
from kvjax.steps import Run
from tests.float64.reads import recycled
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, B, off, step
from tests.read.test_persistent import model, quarter

STRIDE, NEWEST, STEPS = 3, 2, 8
METHOD = kvjax.method("recycled-attention", budget=0.25, stride=STRIDE, newest=NEWEST)
TOKENS = np.random.default_rng(5).integers(0, 64, (STEPS, B))


@pytest.fixture(scope="module")
def small():
    return model(layers=2)


def written(m, method, prompts=MAIN.first, tokens=TOKENS):
    logits, cache = kvjax.prefill(m, prompts, method=method, room=len(tokens) + 8)
    out = [logits]
    for token in tokens:
        logits, cache = kvjax.step(m, cache, token)
        out.append(logits)
    return np.stack(out), cache


def by_hand(m, tokens):
    """Per row, the logits of all steps, and what each read: {(layer, list): positions by step}."""
    found = []
    for number, prompt in enumerate(MAIN.first):
        seen, prompt = [], Prompt(Decoder(m), prompt)
        attends = recycled(quarter, stride=STRIDE, newest=NEWEST, seen=seen)
        row = Row(prompt, [np.ones((len(k), prompt.length), bool) for k in prompt.k], attends=attends)
        logits, reads = [row.step(token) for token in tokens[:, number]], {}
        for _, layer, head, positions in seen:
            reads.setdefault((layer, head), []).append(positions)
        found.append((prompt.length, np.stack(logits), reads))
    return found


@pytest.mark.rotating
def test_tokens_read_what_the_last_selecting_token_attended_to_most_and_what_came_since(small):
    logits, _ = written(small, METHOD)
    for row, (length, want, reads) in enumerate(by_hand(small, TOKENS)):
        assert off(logits[1:, row], want) < 3e-5
        for steps in reads.values():
            for i, positions in enumerate(steps):
                chosen = i // STRIDE * STRIDE
                newer = set(range(length + chosen - NEWEST, length + i + 1))
                if i == chosen:
                    assert positions == set(range(length + i + 1))
                else:
                    assert newer <= positions
                    assert len(positions - newer) == quarter(length + chosen - NEWEST)
        # Selections differ, so what is read is not the first one for ever.
        assert any(steps[1] - steps[4] for steps in reads.values())


@pytest.mark.rotating
def test_a_token_that_is_asked_again_gets_the_same_answer_whosever_turn_it_is(small):
    logits, cache = kvjax.prefill(small, MAIN.first, method=METHOD, room=STEPS)
    for token in TOKENS[: STRIDE + 2]:
        logits, cache = kvjax.step(small, cache, token)
        again, cache = kvjax.step(small, cache, token, append=False)
        assert off(again, logits) < 1e-6


def test_rows_take_turns_by_their_own_tokens(small):
    """One row waits for two steps, so its turn comes when the others read a selection."""
    _, cache = kvjax.prefill(small, MAIN.first, method=METHOD, room=STEPS)
    want, waits = by_hand(small, TOKENS), [1, 2]
    at = np.zeros(B, int)
    for turn in range(STEPS - 2):
        append = np.ones(B, bool)
        append[1] = turn not in waits
        tokens = TOKENS[at - ~append, np.arange(B)]
        logits, cache = step(small, cache, tokens, append)
        for row in range(B):
            assert off(logits[row], want[row][1][at[row] - (not append[row])]) < 3e-5
        at = at + append


@pytest.mark.rotating
def test_a_stride_of_one_is_full_attention(small):
    every = kvjax.method("recycled-attention", budget=0.25, stride=1, newest=NEWEST)
    assert off(written(small, every)[0], written(small, None)[0]) < 1e-5


KEEPS = ["snapkv(budget=0.5, window=4)", "h2o(budget=0.5)", "adakv(budget=0.5, window=4)", "int8"]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "other", [KEEPS[0], *(pytest.param(k, marks=pytest.mark.rotating) for k in KEEPS[1:])]
)
def test_all_of_what_another_method_holds_is_that_method(small, other):
    """A budget of everything; marks move with slots that are evicted, encoded or in pages."""
    other = kvjax.method(other)
    whole = kvjax.method("recycled-attention", budget=1.0, stride=STRIDE, newest=1)
    found, twin = (written(small, m)[0] for m in (kvjax.chain(other, whole), other))
    assert off(found, twin) < (0.02 if other.store else 1e-5)
    few = kvjax.method("recycled-attention", budget=0.25, stride=STRIDE, newest=1)
    assert off(written(small, kvjax.chain(other, few))[0], twin) > 1e-3


@pytest.mark.rotating
def test_keys_that_lie_unrotated_are_selected_as_rotated_ones(small):
    unrotated = kvjax.chain(METHOD, Method(store=Store(unrotated=True)))
    assert off(written(small, unrotated)[0], written(small, METHOD)[0]) < 1e-5


def test_a_step_is_said_to_leave_unread_what_strides_leave_on_average(small):
    _, cache = kvjax.prefill(small, MAIN.first, method=METHOD, room=8)
    gms = Run(small.config, METHOD).groups(small.params)
    body = cache.groups[0].bodies[0].capacity
    left = B * 2 * (body - quarter(body) - STRIDE) * 16 * 4
    assert [unread_bytes(gm, group) for gm, group in zip(gms, cache.groups, strict=True)] == [
        2 * (left * 2 // 3)
    ] * 2


def test_what_cannot_reuse_selections_is_refused(small):
    mixers = (Attention(), Attention(source=0))
    with pytest.raises(InputError, match="a selection is that of one layer, and layers share their slots"):
        kvjax.prefill(model(layers=2, mixers=mixers), MAIN.first, method=METHOD)
    with pytest.raises(ValueError, match="a number of tokens, at least 1, got 0"):
        RecycledSlots(Budget(0.5), stride=0)
    with pytest.raises(ValueError, match="brings what is picked to the device"):
        kvjax.chain(METHOD, kvjax.method("offloaded"))
