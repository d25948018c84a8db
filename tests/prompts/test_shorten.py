"""Prompt compression: what stays equals what whole passes without a cache choose; bad input is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import kvjax
from kvjax.models.transformer import hidden
from kvjax.prompts import choose
from kvjax.prompts.text import document

TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "class Point:\n    x = 1\n    y = 2\n",
    "import os\nprint(os.getcwd())\nprint(12345)\n",
)
QUESTION = "What does add return?"


@pytest.fixture(scope="module")
def model():
    return kvjax.load("bytes-tiny")


def log_p(model, ids):
    """log p of every token but the first, in float64, by one pass over the whole text and zeros after it."""
    logits = np.asarray(model([[*ids, *[0] * (-len(ids) % 192)]])[0], np.float64)[: len(ids) - 1]
    peak = logits.max(-1, keepdims=True)
    normal = logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))
    return normal[np.arange(len(ids) - 1), ids[1:]]


def losses(model, before, ids):
    """-log p of each of `ids` behind `before`."""
    return -log_p(model, [*before, *ids])[len(before) - 1 :]


def by_hand(model, documents, shares, segment, begin=None, question=None):
    """Algorithm 2 of LLMLingua, or equation 3 of LongLLMLingua, by whole passes over what is left so far."""
    kept = []
    plain = [] if begin is None else [begin]
    asked = [*plain, *(question or b""), *(b"\n\n" if question else b"")]
    for place, (ids, share) in enumerate(zip(documents, shares, strict=True)):
        stays, at = [], 0
        if place == 0 and begin is None:
            stays, at = [0], 1
            plain, asked = [*plain, ids[0]], [*asked, ids[0]]
        if place:
            plain, asked = [*plain, *b"\n\n"], [*asked, *b"\n\n"]
        while at < len(ids):
            piece = ids[at : at + segment]
            count = max(0, min(round(share * (at + len(piece))) - len(stays), len(piece)))
            score = losses(model, plain, piece)
            if question:
                score = score - losses(model, asked, piece)
            best = sorted(sorted(range(len(piece)), key=lambda i: (-score[i], i))[:count])
            stays += [at + i for i in best]
            new = [piece[i] for i in best]
            plain, asked, at = [*plain, *new], [*asked, *new], at + len(piece)
        kept.append(stays)
    return kept


def outputs_of(model, text):
    """Compute the last layer's output for every token of a text that is read alone."""
    return np.asarray(hidden(model.params, jnp.array([[*text.encode()]]), model.config), np.float64)[0]


def found(short):
    return [(one.document, one.positions.tolist()) for one in short.kept]


@pytest.mark.rotating
@pytest.mark.parametrize("begins", [False, pytest.param(True, marks=pytest.mark.rotating)])
def test_llmlingua_keeps_what_surprises_behind_what_is_kept(begins, model):
    if begins:
        model = dataclasses.replace(model, special_tokens={"bos_token": "<|end|>"})
    text = "".join(TEXTS)
    short = kvjax.shorten(model, text, keep=0.4, segment=20)
    ids = [*text.encode()]
    assert found(short) == [(0, by_hand(model, [ids], [0.4], 20, 256 if begins else None)[0])]
    assert short.tokens == round(0.4 * len(ids)) and short.given == len(ids)
    assert short.text == bytes(ids[i] for i in short.kept[0].positions).decode()


@pytest.mark.rotating
def test_llmlingua_takes_the_documents_of_the_largest_perplexity_in_their_order(model):
    """Algorithm 1: they are added until more than twice the budget is reached; the tokens' share follows."""
    each = [[*text.encode()] for text in TEXTS]
    perplexity = [-log_p(model, ids).mean() for ids in each]
    budget, order, held = 0.25 * sum(map(len, each)), [], 0
    for i in sorted(range(3), key=lambda i: -perplexity[i]):
        if held <= 2 * budget:
            order, held = [*order, i], held + len(each[i])
    order = sorted(order)
    assert len(order) == 2
    short = kvjax.shorten(model, TEXTS, keep=0.25, segment=16)
    want = by_hand(model, [each[i] for i in order], [budget / held] * 2, 16)
    assert found(short) == [*zip(order, want, strict=True)]
    assert short.text.count("\n\n") >= 1


@pytest.mark.rotating
def test_longllmlingua_orders_documents_by_the_question_and_contrasts_tokens(model):
    each, asked = [[*text.encode()] for text in TEXTS], [*QUESTION.encode()]
    restriction = b" We can get the answer to this question in the given documents."
    behind = [losses(model, ids, [*asked, *restriction]).mean() for ids in each]
    order = sorted(range(3), key=lambda i: behind[i])
    short = kvjax.shorten(model, TEXTS, keep=0.5, question=QUESTION, by="longllmlingua", tilt=0.2, segment=16)
    lengths = np.array([len(each[i]) for i in order])
    free = 0.5 + np.array([0.2, 0.0, -0.2])
    move = (0.5 * lengths.sum() - (free * lengths).sum()) / lengths.sum()
    want = by_hand(model, [each[i] for i in order], free + move, 16, question=asked)
    assert found(short) == [*zip(order, want, strict=True)]
    assert abs(short.tokens - 0.5 * short.given) <= 2


@pytest.mark.rotating
def test_cpc_keeps_the_sentences_nearest_to_the_question(model):
    asked, score = outputs_of(model, QUESTION).mean(0), []
    for number, text in enumerate(TEXTS):
        outputs, at = outputs_of(model, text), 0
        for line in text.splitlines(keepends=True):  # each is a sentence here
            mine, at = [*range(at, at + len(line))], at + len(line)
            mean = outputs[mine].mean(0)
            score.append((mean @ asked / np.linalg.norm(mean) / np.linalg.norm(asked), number, mine))
    room = round(0.4 * sum(map(len, TEXTS)))
    want = {0: [], 1: [], 2: []}
    for _, number, mine in sorted(score, key=lambda one: -one[0]):
        if len(mine) <= room:
            room -= len(mine)
            want[number] += mine
    short = kvjax.shorten(model, TEXTS, keep=0.4, question=QUESTION, by="cpc")
    assert dict(found(short)) == {n: sorted(at) for n, at in want.items() if at}


def test_words_belong_to_the_sentence_in_which_they_begin(model):
    words = Tokenizer(
        models.WordLevel({"It": 0, " is": 1, " 1.5.": 2, " Then?": 3, "\n": 4, "No": 5}, unk_token="It")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^ \n]+|\n"), "isolated")
    made = document(words, "It is 1.5. Then?\n\nNo")
    assert made.ids.tolist() == [0, 1, 2, 3, 4, 4, 5]
    assert made.sentences.tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_shares_are_moved_alike_until_the_budget_is_met():
    shares, lengths = np.array([0.9, 0.5, 0.1]), np.array([10, 20, 30])
    for tokens in (0.0, 12.0, 30.0, 60.0):
        scaled = choose.scaled(shares, lengths, tokens)
        assert (scaled * lengths).sum() == pytest.approx(tokens) and (scaled[:-1] >= scaled[1:]).all()
        assert scaled.min() >= 0 and scaled.max() <= 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    "by", ["llmlingua", *(pytest.param(by, marks=pytest.mark.rotating) for by in ("longllmlingua", "cpc"))]
)
def test_all_tokens_stay_where_all_may(by, model):
    short = kvjax.shorten(model, TEXTS[0], keep=1.0, question=QUESTION, by=by)
    assert short.text == TEXTS[0] and short.tokens == short.given == len(TEXTS[0])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (dict(by="llmlingu"), "by='llmlingu' was given, expected one of .*: did you mean llmlingua"),
        (dict(keep=0), "keep=0 was given, expected the share"),
        (dict(keep=True), "keep=True was given"),
        (dict(by="cpc"), "cpc chooses by a question, and none was given: add one"),
        (dict(segment=0), "segment"),
        (dict(tilt=0.1), "llmlingua was given the option tilt, expected segment, coarse: leave it out"),
        (dict(documents=[]), "documents are .*, expected a text or several"),
        (dict(documents=["a", " "]), "none of them empty"),
        (dict(documents="a" * 9000), "the longest document and the question have 9000 tokens"),
    ],
)
def test_bad_input_is_refused_before_the_model_reads(given, told, model):
    with pytest.raises(kvjax.InputError, match=told):
        kvjax.shorten(model, given.pop("documents", "some text"), **given)


def test_a_model_without_a_tokenizer_is_refused(model):
    with pytest.raises(kvjax.InputError, match="has no tokenizer, expected a model that reads text"):
        kvjax.shorten(dataclasses.replace(model, tokenizer=None), "some text")
