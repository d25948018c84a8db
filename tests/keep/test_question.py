"""Questions and instructions that judge chunks: kept tokens and answers against explicit slots."""

import copy

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.state.cache import Cache
from tests.float64.reference import Prompt, Row, best, softmax
from tests.methods.battery import decoder, model, off, positions, step
from tests.methods.expected import PREFIX

ASKED, CHUNK, SLOTS = 4, 16, 19
FINCH = kvjax.method("finch", budget=0.5, question=ASKED)
PER_HEAD = kvjax.method("finch", budget=0.5, question=ASKED, variant="kvpress")
CITRUS = kvjax.method("citrus", budget=SLOTS, question=ASKED)
DOUBLE = kvjax.method("citrus", budget=SLOTS, question=ASKED, variant="double")


def asked(row, tokens, weight=lambda before: before):
    """Sum what slots get of some tokens written behind them, by the positions before each query."""
    held = [[[s["pos"] for s in slots] for slots in lists] for lists in row.slots]
    total = [[dict.fromkeys(pos, 0.0) for pos in lists] for lists in held]
    for token in tokens:
        row.step(token)
        for layer, lists in enumerate(row.slots):
            for i, slots in enumerate(lists):
                for slot in slots:
                    total[layer][i].setdefault(slot["pos"], 0.0)
                    total[layer][i][slot["pos"]] += slot["now"] * weight(len(slots) - 1)
    return total


def alike(before):
    """All queries count the same."""
    return 1.0


def for_all(total):
    """Sum the same for every list of a layer: what all of them get."""
    return [[{pos: sum(found[pos] for found in lists) for pos in lists[0]}] * len(lists) for lists in total]


def questioned(tokens, judge, count, chunk_stays=False):
    """Read a row behind a text in chunks, as the papers read it: each with the question behind it."""
    question, row = tokens[-ASKED:], None
    for start in range(0, len(tokens), CHUNK):
        new, end = tokens[start : start + CHUNK], min(start + CHUNK, len(tokens))
        ends = end == len(tokens)
        before = new[: len(new) - ASKED] if ends else new
        if row is None:
            prompt = Prompt(decoder("4/2"), before)
            row = Row(prompt, [np.ones((len(k), len(before)), bool) for k in prompt.k], "rank")
        else:
            for token in before:
                row.step(token)
        total = judge(row if ends else copy.deepcopy(row), question)
        first = end - ASKED if ends else start if chunk_stays else end
        for layer, lists in enumerate(row.slots):
            gone = []
            for slots, found in zip(lists, total[layer], strict=True):
                score = [np.inf if s["pos"] >= first else found[s["pos"]] for s in slots]
                gone.append(np.flatnonzero(~best(np.array(score), count(end))))
            row.remove(layer, gone)
    return row


def finch(tokens):
    """For all heads, a query counts by what it sees, its own token too."""
    judge = lambda row, question: for_all(asked(row, question, lambda before: before + 1))  # noqa: E731
    return questioned(tokens, judge, lambda end: end // 2)


def finch_per_head(tokens):
    return questioned(tokens, asked, lambda end: end // 2)


def citrus(tokens):
    """Keep the chunk, and the best for all heads of what stood before it."""
    judge = lambda row, question: for_all(asked(row, question, alike))  # noqa: E731
    return questioned(tokens, judge, lambda end: SLOTS, chunk_stays=True)


def citrus_double(tokens):
    """Chunks attend to slots that chunks chose, the instruction to slots that it chose, and answers to these.

    The keys and values of a chunk are those that it has where it attends to the first of the two.
    """
    text, question = tokens[:-ASKED], tokens[-ASKED:]
    over = answers = None
    for start in range(0, len(text), CHUNK):
        new = text[start : start + CHUNK]
        if over is None:
            prompt = Prompt(decoder("4/2"), new)
            over = Row(prompt, [np.ones((len(k), len(new)), bool) for k in prompt.k], "rank")
            answers = copy.deepcopy(over)
        else:
            given = asked(over, new, alike)
            _cut(over, for_all(given), start)
            for layer, lists in enumerate(answers.slots):
                for i, slots in enumerate(lists):
                    slots += [copy.deepcopy(s) for s in over.slots[layer][i] if s["pos"] >= start]
            answers.next = over.next
        _cut(answers, for_all(asked(copy.deepcopy(answers), question, alike)), start)
    total = asked(answers, question, alike)
    _cut(answers, for_all(total), len(text))
    return answers


def _cut(row, total, first):
    """Only SLOTS slots stay: those from position `first` on, and of older ones the best."""
    for layer, lists in enumerate(row.slots):
        gone = []
        for slots, found in zip(lists, total[layer], strict=True):
            score = [np.inf if s["pos"] >= first else found[s["pos"]] for s in slots]
            gone.append(np.flatnonzero(~best(np.array(score), SLOTS)))
        row.remove(layer, gone)


def infinipot(tokens):
    """Read a text in chunks, distilled after each by surprisal and by what an instruction asks."""
    row, surprise = None, {}
    for start in range(0, len(tokens), CHUNK):
        new, end = tokens[start : start + CHUNK], min(start + CHUNK, len(tokens))
        if row is None:
            prompt = Prompt(decoder("4/2"), new)
            row, found = (
                Row(prompt, [np.ones((len(k), end), bool) for k in prompt.k], "rank"),
                prompt.all_logits,
            )
        else:
            found = [row.step(token) for token in new]
        told = [-np.log(softmax(x)[token]) for x, token in zip(found, new[1:], strict=False)]
        surprise |= dict(zip(range(start, end), [0.0, *told], strict=True))
        total = asked(copy.deepcopy(row), PREFIX, alike)
        for layer, lists in enumerate(row.slots):
            gone = []
            for slots, given in zip(lists, total[layer], strict=True):
                news = best(np.array([surprise[s["pos"]] for s in slots]), end // 4)
                gone.append(
                    np.flatnonzero(~best(np.where(news, np.inf, [given[s["pos"]] for s in slots]), end // 2))
                )
            row.remove(layer, gone)
    return row


INFINIPOT = kvjax.method("infinipot", budget=0.5, share=0.5, prefix=PREFIX)


@pytest.mark.parametrize(
    ("method", "by_hand", "lengths"),
    [
        pytest.param(FINCH, finch, (44, 27), id="finch", marks=pytest.mark.rotating),
        pytest.param(PER_HEAD, finch_per_head, (44, 27), id="finch per head", marks=pytest.mark.rotating),
        pytest.param(CITRUS, citrus, (44, 27), id="citrus"),
        pytest.param(DOUBLE, citrus_double, (52, 43), id="citrus: two caches", marks=pytest.mark.rotating),
        pytest.param(
            DOUBLE,
            citrus_double,
            (20, 11, 52),
            id="citrus: two, short",
            marks=pytest.mark.rotating,
        ),
        pytest.param(INFINIPOT, infinipot, (44, 27), id="infinipot", marks=pytest.mark.rotating),
    ],
)
def test_chunks_are_judged_by_what_is_asked_behind_them(method, by_hand, lengths):
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 64, n).tolist() for n in lengths]
    _, cache = kvjax.prefill(model("4/2"), rows, method=method, chunk=CHUNK, room=8)
    more = rng.integers(0, 64, (2, len(rows)))
    want, got = [by_hand(tokens) for tokens in rows], []
    assert isinstance(cache, Cache)
    for b, row in enumerate(want):
        assert [lists[b] for lists in positions(cache)] == row.positions()
    for tokens in more:
        logits, cache = step(model("4/2"), cache, tokens, append=True)
        got.append(logits)
    for tokens, logits in zip(more, got, strict=True):
        assert off(logits, np.stack([row.step(t) for row, t in zip(want, tokens, strict=True)])) < 3e-5


def test_a_catalyst_is_an_instruction():
    with pytest.raises(InputError, match="infinipot asks an instruction, and this model has no tokenizer"):
        kvjax.prefill(model("4/2"), [[1, 2, 3]], method=kvjax.method("infinipot", budget=0.5))
    with pytest.raises(ValueError, match="a catalyst is an instruction, got no tokens"):
        kvjax.method("infinipot", budget=0.5, prefix=())


def test_a_question_that_does_not_fit_the_budget_is_refused():
    with pytest.raises(InputError, match="the last 4 of 6 tokens are the question .* budget of 3 slots"):
        kvjax.prefill(model("4/2"), [[1] * 6, [2] * 9], method=FINCH)
