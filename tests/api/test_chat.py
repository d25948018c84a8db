"""A conversation answers as the template's whole text would, and reads new tokens alone."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.api import chat_text
from kvjax.api.chat_text import CachedText, added
from kvjax.api.prefill import read_prompt
from kvjax.models.tokenizer import chat as encode_chat
from kvjax.state.cache import nbytes
from kvjax.train.data.byte_tokenizer import END
from tests.api.chatting import STOP, TEMPLATE, compilations, letters, plain_render, talker
from tests.methods import battery
from tests.methods.table import BY_LABEL, ROWS
from tests.sweep import sweep

QUESTIONS = ["what is seventy?", "and twice that, please", "why?"]


@pytest.fixture
def quick(monkeypatch):
    """Templates without a process of their own."""
    monkeypatch.setattr(chat_text, "render_chat", plain_render)


def talk(method=None, model=None, **options):
    return kvjax.chat(model or talker(), method, processors=[letters], max_new_tokens=24, **options)


def whole(model, messages):
    """Return the answer to a conversation that is read at once."""
    ids = encode_chat(model, messages)
    out = kvjax.generate(model, [ids], processors=[letters], max_new_tokens=24)
    return out.texts[0]


@pytest.mark.rotating
def test_an_answer_is_that_to_the_templates_whole_text():
    told, messages = talk(system="Be brief."), [{"role": "system", "content": "Be brief."}]
    for text in QUESTIONS[:2]:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": whole(talker(), messages)})
        assert told.say(text) == messages[-1]["content"]
    assert told.messages == messages
    # The stop token is in the cache already; the template's text goes on behind it.
    assert told.turns[1].read == len(f"[user]{QUESTIONS[1]}") + 1 + len("[assistant]")
    assert not told.turns[1].again
    held = sum(turn.read + turn.written for turn in told.turns)
    assert held == int(told.cache.next[0]) == len(encode_chat(talker(), messages, False))


@pytest.mark.rotating
def test_pieces_are_the_answer_and_an_answer_may_end_early(quick):
    told, other = talk(), talk()
    answer = other.say(QUESTIONS[0])
    assert "".join(told.copy().stream(QUESTIONS[0])) == answer
    pieces = told.stream(QUESTIONS[0])
    begun = [next(pieces), next(pieces)]
    pieces.close()
    assert told.messages[-1] == {"role": "assistant", "content": "".join(begun)}
    assert answer.startswith("".join(begun)) and len(answer) > 2
    # What the model had not said itself, the end of its answer, is read with the next question.
    said = told.say(QUESTIONS[1])
    assert told.turns[1].read == len(f"[user]{QUESTIONS[1]}[assistant]") + 2
    out = kvjax.generate(
        talker(), [talker().tokenizer.encode(plain_render(None, told.messages[:-1])).ids],
        processors=[letters], max_new_tokens=24,
    )  # fmt: skip
    assert said == out.texts[0]


@pytest.mark.parametrize("method", sweep([None, "snapkv(budget=0.5,window=4)", "h2o(budget=0.5)"], None))
def test_copies_go_their_own_ways(method, quick):
    told = talk(method)
    told.say(QUESTIONS[0])
    other, before = told.copy(), told.cache
    answer, more = other.say(QUESTIONS[1]), other.say(QUESTIONS[2])
    assert len(told.messages) == 2 and told.cache is before
    assert (told.say(QUESTIONS[1]), told.say(QUESTIONS[2])) == (answer, more)
    np.testing.assert_array_equal(told.cache.next, other.cache.next)


@pytest.mark.rotating
def test_an_error_leaves_a_conversation_where_it_stood(quick):
    told = talk(model=talker(max_positions=128))
    told.say("hello")
    answer = told.copy().say("go on")
    with pytest.raises(kvjax.InputError, match="model's last is 128"):
        told.say("x" * 200)
    with pytest.raises(kvjax.InputError, match="half a character"):
        told.say("\ud800")
    assert len(told.messages) == 2 and told.say("go on") == answer


@pytest.mark.rotating
def test_an_answer_ends_at_the_last_position(quick):
    told = kvjax.chat(talker(max_positions=64), processors=[lambda x, _: x.at[:, STOP].set(-1e9)])
    told.say("x" * 20)
    assert int(told.cache.next[0]) == 64
    with pytest.raises(kvjax.InputError, match="last position|last is 64"):
        told.say("more")


def test_a_reset_conversation_is_a_new_one(quick):
    told = talk(system="Be kind.")
    first = told.say(QUESTIONS[0])
    told.reset()
    assert told.cache is None and told.messages == [{"role": "system", "content": "Be kind."}]
    assert told.say(QUESTIONS[0]) == first


@pytest.mark.rotating
def test_a_template_that_rewrites_an_answer_has_all_read_again(monkeypatch):
    def forgetful(model, messages, add_generation_prompt=True):
        last = len(messages) - 1
        kept = [{**m, "content": m["content"][: None if i == last else 3]} for i, m in enumerate(messages)]
        return plain_render(model, kept)

    monkeypatch.setattr(chat_text, "render_chat", forgetful)
    told = talk()
    told.say(QUESTIONS[0])
    said = told.say("second")
    text = forgetful(None, told.messages[:-1])
    assert told.turns[1].again and told.turns[1].read == len(talker().tokenizer.encode(text).ids)
    ids = talker().tokenizer.encode(text).ids
    assert said == kvjax.generate(talker(), [ids], processors=[letters], max_new_tokens=24).texts[0]


ADDED = {
    "what comes behind an answer": ("[u]hi" + END + "[a]yes" + END + "[u]so?", "[u]so?"),
    "white space around an answer": ("[u]hi" + END + "[a] yes " + END + "[u]so?", "[u]so?"),
    "another end": ("[u]hi" + END + "[a]yes</s>[u]so?", None),
    "another answer": ("[u]hi" + END + "[a]no" + END + "[u]so?", None),
    "another question": ("[u]ho" + END + "[a]yes" + END + "[u]so?", None),
    "nothing": ("[u]hi" + END + "[a]yes" + END, None),
}


@pytest.mark.parametrize("what", ADDED)
def test_only_what_is_new_behind_the_same_text_is_read(what):
    text, expected = ADDED[what]
    said = CachedText("[u]hi" + END + "[a]", tuple(b"yes"), "yes", STOP)
    assert added(talker(), text, said) == expected
    # Where no token ended the answer, its end is read.
    ended = None if expected is None else END + expected
    found = added(talker(), text, said._replace(stop=None))
    assert expected is None or found.strip() == ended


def test_an_answer_with_tokens_that_no_text_shows_is_read_again():
    said = CachedText("[a]", (*b"yes", STOP, *b"no"), "yesno", STOP)
    assert added(talker(), "[a]yesno" + END + "[u]", said) is None


REFUSED = {
    "no template": (None, {}, "talker has no chat template, expected a model that was made to chat"),
    "a system's message": (
        "{{ raise_exception('no system here') if messages[0].role == 'system' }}", {"system": "x"},
        "no system here",
    ),
    "no answer": (TEMPLATE, {"max_new_tokens": 0}, "max_new_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_chat_is_refused_before_anything_is_read(what):
    template, options, why = REFUSED[what]
    with pytest.raises(kvjax.InputError, match=why):
        kvjax.chat(talker(template), **options)


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(kvjax.InputError, match="no tokenizer, expected one to chat with"):
        kvjax.chat(dataclasses.replace(talker(), tokenizer=None))


METHODS = ["full", "snapkv(budget=0.5,window=4)", "h2o(budget=0.5)", "kivi(bits=2,residual=32)",
           "streamingllm(budget=64)", "int4", "adakv(budget=0.5,window=4)"]  # fmt: skip
QUICK = METHODS[:2]


@pytest.mark.rotating
@pytest.mark.parametrize("method", sweep(METHODS, *QUICK))
def test_ten_turns_compile_three_decoders_at_most_and_the_second_turn_nothing(method, quick):
    jax.clear_caches()  # of programs that an earlier test compiled
    told = kvjax.chat(talker(), method, processors=[letters], max_new_tokens=40)
    texts = ["x" * (25 + 13 * i % 40) for i in range(10)]
    found, sizes = [], []
    for text in texts:
        with compilations() as programs:
            told.say(text)
        found.append(programs)
        sizes.append(told.capacity)
    decoders = [name for programs in found for name in programs if "write_slice" in name]
    assert 1 <= len(decoders) <= 3 and len(found[0]) > 1
    assert found[1] == []
    # It compiles in the first two turns of a size alone.
    assert sizes[0] == 512 and sizes[-1] == 1024
    assert not any(programs for i, programs in enumerate(found) if i > 1 and sizes[i - 2] == sizes[i])


@pytest.mark.rotating
@pytest.mark.parametrize("method", sweep(["full", "snapkv(budget=0.5,window=4)"], "full"))
def test_a_cache_that_generate_goes_on_from_doubles(method):
    model, rng, cache, decoders = talker(), np.random.default_rng(0), None, []
    for _ in range(10):
        ids = rng.integers(97, 123, (1, int(rng.integers(20, 50)))).tolist()
        given = dict(method=method) if cache is None else dict(cache=cache)
        with compilations() as programs:
            cache = kvjax.generate(model, ids, max_new_tokens=30, stop=[], **given).cache
        decoders.append(sum("write_slice" in name for name in programs))
    assert sum(decoders) <= 3 and decoders[0] == 1 and sum(decoders[3:]) <= 1


def test_bytes_count_the_slots_that_are_empty(quick):
    told, model = talk(), talker()
    told.say("hello")
    one = model.config.layers * (2 * model.config.head_dim * 4 + 4)  # a key, a value and a position
    assert told.capacity == 512 and nbytes(told.cache) == 512 * one + 4
    assert int(told.cache.next[0]) < 100


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep([row.label for row in ROWS], "critiprefill"))
def test_two_turns_in_doubling_sizes_leave_what_exact_ones_leave(label):
    row = BY_LABEL[label]
    two_turns(battery.model(row.model), row.method())


@pytest.mark.rotating
@pytest.mark.parametrize("label", sweep(["critiprefill", "quest", "h2o"], "critiprefill"))
def test_two_turns_in_doubling_sizes_of_a_method_of_one_layer_are_exact(label):
    row = BY_LABEL[label]
    model = battery.model(row.model)
    two_turns(model, kvjax.by_layer([row.method(), *[None] * (model.config.layers - 1)]))


def two_turns(model, method):
    # Float noise moves a code to its neighbour now and then.
    error = 1e-4 if method.store is None else 2e-3
    first, second = battery.MAIN.first, battery.MAIN.second
    logits, exact = kvjax.prefill(model, first, method=method, room=32)
    near, doubling = read_prompt(model, first, method=method, cache=None, room=32, turn=True)
    np.testing.assert_allclose(near, logits, atol=error)
    assert battery.positions(doubling) == battery.positions(exact)
    logits, exact = kvjax.prefill(model, second, cache=exact, room=32)
    near, doubling = read_prompt(model, second, method=None, cache=doubling, room=32, turn=True)
    np.testing.assert_allclose(near, logits, atol=error)
    assert battery.positions(doubling) == battery.positions(exact)
