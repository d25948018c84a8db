"""The recall language: the token stream, parsed again as text, must say what samples and batches claim."""

from collections import Counter
from zlib import crc32

import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.eval.tasks import recall
from kvjax.eval.tasks.recall import WORDS, make_context, min_tokens, tokenizer
from kvjax.eval.tasks.recall_tasks import (
    MIX,
    TASKS,
    context_samples,
    conversation,
    sample,
    score,
    training_batch,
)
from kvjax.eval.tasks.sample import ForcedSample
from kvjax.eval.tasks.suite import make_suite

TOKENS = 256
EVERY_TASK = tuple(TASKS)
MARKERS = "<pad> <bos> <set> <get> <add> <.> <chase> <all> <,> <tag> <mode> <copy>".split()


def words(ids) -> list[str]:
    return [WORDS[int(i)] for i in ids]


class Parsed:
    """What a reader of the text finds: facts by key with their word spans, second values, votes."""

    def __init__(self, ids):
        self.words = words(ids)
        self.facts: dict[tuple[str, ...], tuple[list[str], tuple[int, int]]] = {}
        self.seconds: dict[tuple[str, ...], tuple[list[str], tuple[int, int]]] = {}
        self.votes: list[tuple[str, tuple[int, int]]] = []
        for at, word in enumerate(self.words):
            if word in ("<set>", "<add>"):
                end = self.words.index("<.>", at)
                key = (self.words[at + 1], self.words[at + 2])
                into = self.facts if word == "<set>" else self.seconds
                assert key not in into, "a key is set once and added to once"
                into[key] = (self.words[at + 3 : end], (at, end + 1))
            elif word == "<tag>":
                self.votes.append((self.words[at + 1], (at, at + 2)))

    def follow(self, key):
        said, spans = [], []
        while True:
            content, span = self.facts[key]
            said += content
            spans.append(span)
            if content[0].isdigit():
                return said, spans
            key = tuple(content)

    def answer(self, question: list[str]) -> tuple[list[str], list[tuple[int, int]]]:
        kind, key = question[0], tuple(question[1:])
        if kind in ("<get>", "<chase>"):
            said, spans = self.follow(key)
            return [*said, "<.>"], spans
        if kind == "<all>":
            (one, a), (two, b) = self.facts[key], self.seconds[key]
            return [*one, "<,>", *two, "<.>"], [a, b]
        assert kind == "<mode>"
        counts = Counter(colour for colour, _ in self.votes).most_common()
        assert len(counts) == 1 or counts[0][1] > counts[1][1], "one colour leads"
        return [counts[0][0], "<.>"], [span for _, span in self.votes]


def check_sample(one: ForcedSample):
    question = words(one.question)
    if one.task == "copy":
        (start, end) = one.spans[0]
        assert words(one.context[start:end]) == question[1:] + words(one.answer)
        assert 8 <= len(one.answer) < 24
        return
    said, spans = Parsed(one.context).answer(question)
    assert words(one.answer) == said
    assert sorted(one.spans) == sorted(spans)


def test_ids_are_those_of_the_recipe():
    assert len(WORDS) == len(set(WORDS)) == 220
    assert list(WORDS[:12]) == MARKERS
    ranges = (recall.FIRST, recall.SECOND, recall.NUMBER, recall.COLOUR, recall.FILLER)
    assert ranges == (12, 12 + 32, 12 + 64, 12 + 128, 12 + 144)
    assert all(WORDS[76 + n] == str(n) for n in range(64))
    assert all(word.isalpha() and word.islower() for word in (*WORDS[12:76], *WORDS[140:]))


def test_filler_follows_the_chain_that_the_weights_know():
    assert recall._NEXT.shape == (64, 4)
    assert recall._NEXT[0].tolist() == CHAIN_ROW_0
    assert crc32(recall._NEXT.astype(np.int64).tobytes()) == CHAIN_CRC


CHAIN_ROW_0 = [60, 24, 62, 59]
CHAIN_CRC = 2025538222


def test_tokenizer_round_trip():
    made = tokenizer()
    assert made.get_vocab_size() == 220
    assert [made.id_to_token(i) for i in range(220)] == list(WORDS)
    ids = [int(i) for i in np.random.default_rng(0).permutation(np.repeat(np.arange(220), 2))]
    assert made.encode(made.decode(ids)).ids == ids
    assert made.encode("<set>brave otter 17 4 52<.>").tokens == "<set> brave otter 17 4 52 <.>".split()


def test_tokenizer_refuses_words_it_does_not_know():
    with pytest.raises(Exception, match="UNK"):
        tokenizer().encode("<get> brave dinosaur")


@pytest.mark.parametrize("task", EVERY_TASK)
def test_answers_stand_in_the_context(task):
    for index in range(25):
        one = sample(task, seed=3, index=index, tokens=TOKENS)
        assert one.task == task and len(one.context) == TOKENS and one.context[0] == recall.BOS
        check_sample(one)


def test_chase_follows_several_pointers():
    hops = [len(sample("chase", seed=0, index=i, tokens=TOKENS).spans) for i in range(60)]
    assert min(hops) == 2 and max(hops) >= 3, "a pointer to a value, and pointers to pointers"


@pytest.mark.parametrize("tokens", [128, 1024])
def test_copy_spans_leave_no_doubt_what_comes_next(tokens):
    for index in range(10):
        one = sample("copy", seed=0, index=index, tokens=tokens)
        fours = Counter(zip(*(one.context[i:] for i in range(4)), strict=False))
        said = (*one.question[1:], *one.answer)
        assert all(fours[said[i : i + 4]] == 1 for i in range(len(one.answer)))


@pytest.mark.parametrize("tokens", [128, 512])
def test_multikey_is_a_haystack_of_look_alikes(tokens):
    for index in range(10):
        one = sample("multikey", seed=0, index=index, tokens=tokens)
        _, first, second = words(one.question)
        others = [key for key in Parsed(one.context).facts if key != (first, second)]
        assert len(others) >= 3
        assert all((a == first) != (b == second) for a, b in others)


def test_look_alikes_leave_other_tasks_their_records():
    shared = context_samples(("get", "multikey"), seed=0, index=0, tokens=512)
    _, first, second = words(shared[1].question)
    others = [key for key in Parsed(shared[0].context).facts if key != (first, second)]
    alike = [(a == first) or (b == second) for a, b in others]
    assert 0.4 <= np.mean(alike) <= 0.65
    assert shared[0].question != shared[1].question


def test_density_of_evaluation_contexts_is_that_of_the_recipe():
    records = [len(Parsed(sample("get", seed=0, index=i, tokens=512).context).facts) for i in range(10)]
    assert set(records) == {int(512 * 0.35) // 7}


@pytest.mark.parametrize("tokens", [64, 100, 511, 2048])
def test_one_context_serves_every_task(tokens):
    samples = context_samples(EVERY_TASK, seed=1, index=2, tokens=tokens)
    assert [one.task for one in samples] == list(EVERY_TASK)
    assert len({one.context for one in samples}) == 1 and len(samples[0].context) == tokens
    assert len({one.id for one in samples}) == len(samples)
    for one in samples:
        check_sample(one)


def test_samples_are_pure_functions_of_their_arguments():
    assert sample("get", seed=5, index=7, tokens=128) == sample("get", seed=5, index=7, tokens=128)
    forward = context_samples(("get", "chase"), seed=0, index=0, tokens=128)
    assert forward == context_samples(("chase", "get"), seed=0, index=0, tokens=128)[::-1]
    for task in EVERY_TASK:
        several = [sample(task, seed=seed, index=i, tokens=128) for seed in (0, 1) for i in range(4)]
        assert len({(one.context, one.question) for one in several}) == len({one.id for one in several}) == 8


def test_samples_do_not_drift_between_releases():
    ids = [t for task in EVERY_TASK for t in _flat(sample(task, seed=0, index=0, tokens=128))]
    assert crc32(np.asarray(ids, np.int32).tobytes()) == SAMPLES_CRC


SAMPLES_CRC = 468095027


def _flat(one: ForcedSample) -> tuple[int, ...]:
    return (*one.context, *one.question, *one.answer)


def test_conversation_asks_different_things_about_one_context():
    turns = conversation(("get", "chase", "all"), seed=0, index=0, tokens=512, turns=9)
    assert [turn.task for turn in turns[:4]] == ["get", "chase", "all", "get"]
    assert len({turn.context for turn in turns}) == 1
    assert len({turn.question for turn in turns}) == 9 == len({turn.id for turn in turns})
    for turn in turns:
        check_sample(turn)


def test_contexts_have_their_length_at_every_density(rng):
    for tokens in range(min_tokens(family=True), 160, 7):
        for density in (None, 0.05, 0.35, 0.75):
            family = float(rng.integers(2))
            context = make_context(rng, tokens, density=density, family=family)
            assert len(context.tokens) == tokens
            assert [r.span[0] for r in context.records] == sorted(r.span[0] for r in context.records)


@pytest.mark.parametrize("length", [128, 300, 1024])
def test_training_weights_are_one_on_answers_only(rng, length):
    tokens, weights, kinds = training_batch(rng, 3, length)
    assert tokens.shape == weights.shape == kinds.shape == (3, length + 1)
    assert (tokens.dtype, weights.dtype, kinds.dtype) == (np.int32, np.float32, np.int8)
    assert set(np.unique(weights)) <= {np.float32(0), np.float32(0.1), np.float32(1)}
    np.testing.assert_array_equal(weights == 1, kinds > 0)
    for row in range(3):
        context_tokens = int((weights[row] == np.float32(0.1)).sum())
        assert 0.49 * length <= context_tokens <= 0.76 * length
        assert (weights[row, :context_tokens] == np.float32(0.1)).all()
        check_questions(tokens[row], weights[row], kinds[row], context_tokens)


def check_questions(tokens, weights, kinds, at: int):
    """Each stretch of weight 0 is a prompt; the stretch of weight 1 after it is what the context says."""
    parsed, asked = Parsed(tokens[:at]), []
    while at < len(tokens):
        start = at + int(np.argmax(weights[at:] == 1))
        if weights[start] != 1:
            return
        prompt = words(tokens[at:start])
        stop = start + int(np.argmax(weights[start:] == 0)) if (weights[start:] == 0).any() else len(tokens)
        task, answer = EVERY_TASK[kinds[start] - 1], words(tokens[start:stop])
        assert (kinds[start:stop] == kinds[start]).all()
        if task == "copy":
            assert " ".join(prompt[1:] + answer) in " ".join(parsed.words)
        else:
            said, _ = parsed.answer(prompt)
            assert answer == (said if stop < len(tokens) else said[: len(answer)])
            asked.append((task, tuple(prompt)))
        at = stop
    modes = [task for task, _ in asked if task == "mode"]
    assert len(modes) <= 1, "a second <mode> could be answered by repetition"


def test_training_mix_reaches_every_task_and_obeys_weights():
    _, _, kinds = training_batch(np.random.default_rng(0), 16, 512)
    assert set(np.unique(kinds)) == set(range(len(TASKS) + 1))
    _, _, only = training_batch(np.random.default_rng(0), 2, 128, {"get": 1.0})
    assert set(np.unique(only)) == {0, 1 + EVERY_TASK.index("get")}
    assert set(MIX) == set(TASKS)


def test_methods_are_not_ranked_on_mode():
    assert [task for task in TASKS if not TASKS[task].ranked] == ["mode"]


def test_training_batches_repeat_with_their_seed():
    one, two, other = (training_batch(np.random.default_rng(seed), 2, 128)[0] for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_score():
    assert score("get", (80, 81, 82, 5), (80, 81, 82, 5)) == 1.0
    assert score("get", [80, 81, 82, 5, 160], (80, 81, 82, 5)) == 1.0
    assert score("get", [80, 81, 82], (80, 81, 82, 5)) == 0.0
    assert score("all", [80, 81, 83, 5], (80, 81, 82, 5)) == 0.0
    assert score("copy", np.asarray([160, 161, 1]), (160, 161, 162, 163)) == 0.5
    assert score("copy", [], (160, 161)) == 0.0


@pytest.mark.parametrize(
    ("task", "near"), [("gte", "get"), ("niah_singel_1", "niah_single_1"), ("rulr", "ruler"), ("vts", "vt")]
)
def test_a_mistyped_task_finds_the_nearest_of_all(task, near):
    with pytest.raises(InputError, match=f"unknown task '{task}': did you mean '{near}'"):
        make_suite(kvjax.load("recall-tiny"), [task])


def test_errors_say_what_to_do():
    with pytest.raises(InputError, match="unknown recall task 'chas': did you mean 'chase'"):
        sample("chas", seed=0, index=0, tokens=128)
    with pytest.raises(InputError, match="needs? .*30 tokens or more, got 20"):
        sample("all", seed=0, index=0, tokens=20)
    least = min_tokens(values=1, pointers=1, seconds=1, family=True)
    with pytest.raises(InputError, match=f"{least} tokens or more"):
        context_samples(EVERY_TASK, seed=0, index=0, tokens=least - 1)
    assert len(context_samples(EVERY_TASK, seed=0, index=0, tokens=least)) == len(EVERY_TASK)
    with pytest.raises(InputError, match="no recall task"):
        context_samples((), seed=0, index=0, tokens=128)
    with pytest.raises(InputError, match="1 turn or more"):
        conversation(("get",), seed=0, index=0, tokens=128, turns=0)
    with pytest.raises(InputError, match="tokens or more, got length=40"):
        training_batch(np.random.default_rng(0), 1, 40)
