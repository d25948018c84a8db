"""What `kvjax lm-eval` does with requests, without the harness: contexts, batches, writing and bytes."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.api.sampling import Sampler
from kvjax.base.errors import InputError
from kvjax.eval.harness.rows import CacheBytes, ScoredRow, batches, full_bytes, written
from kvjax.eval.harness.sampling import Writing, writing_of
from kvjax.eval.harness.texts import Encoded, HarnessTokenizer, Marker
from kvjax.grammar import Method

PROMPT = "<bos> the river <set> brave otter 17 4 52 <.> road <get> brave otter"
GREEDY = {"max_gen_toks": 4, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


def test_a_context_ends_at_the_last_marker_or_before_the_last_token(model):
    ids = model.tokenizer.encode(PROMPT).ids
    assert HarnessTokenizer(model).prompt(PROMPT) == Encoded(ids, len(ids) - 1)
    assert HarnessTokenizer(model, Marker("brave")).prompt(PROMPT) == Encoded(ids, len(ids) - 2)
    assert HarnessTokenizer(model, Marker("<bos>")).prompt(PROMPT) == Encoded(ids, 1)
    # A word over the border belongs to the question.
    assert HarnessTokenizer(model, Marker("ave otter")).prompt(PROMPT) == Encoded(ids, len(ids) - 2)
    marked = PROMPT.replace("<get>", "| <get>").replace("road", "| road")
    dropped = HarnessTokenizer(model, Marker("| ", drop=True))
    assert dropped.prompt(marked) == Encoded(ids, len(ids) - 3) and dropped.without_marker(marked) == PROMPT


def test_texts_without_a_tokenizer_or_a_marker_are_refused(model):
    with pytest.raises(InputError, match="has no tokenizer, and tasks are texts"):
        HarnessTokenizer(dataclasses.replace(model, tokenizer=None))
    with pytest.raises(InputError, match="names no token that begins or ends a text"):
        HarnessTokenizer(dataclasses.replace(model, special_tokens={}))
    with pytest.raises(InputError, match="the marker is empty"):
        HarnessTokenizer(model, Marker(""))
    with pytest.raises(InputError, match="the marker 'Q:' is not in the context '<bos> the"):
        HarnessTokenizer(model, Marker("Q:")).prompt(PROMPT)
    with pytest.raises(InputError, match="cannot read 'zzzz'"):
        HarnessTokenizer(model).encode("zzzz")


def test_a_message_that_is_continued_ends_the_conversation(model):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<.>{% endfor %}"
    texts = HarnessTokenizer(dataclasses.replace(model, chat_template=template))
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": " river "}]
    assert texts.chat(messages, answer=False) == "[user] the<.>[assistant] river"
    assert texts.chat(messages, answer=True).endswith("river<.>")


def test_batches_hold_every_row_once_and_are_full():
    rows = [ScoredRow([1] * n, 1) for n in (3, 9, 5, 7, 4)]
    found = list(batches(rows, 2))
    assert [places for places, _ in found] == [[1, 3], [2, 4], [0]]
    assert [[len(row.ids) for row in batch] for _, batch in found] == [[9, 7], [5, 4], [3, 3]]
    kinds = [places for places, _ in batches(rows, 2, ["a", "b", "a", "b", "a"])]
    assert kinds == [[2, 4], [0], [1, 3]]
    assert [len(batch) for _, batch in batches(rows, 8)] == [5]


@pytest.mark.rotating
@pytest.mark.parametrize("stop", [(), ("4",)], ids=["all", "a stop string"])
def test_rows_write_what_generate_writes(model, stop):
    """Wherever the context ends: the full cache keeps all of it."""
    ids = model.tokenizer.encode(PROMPT).ids
    how = Writing(4, Sampler(), (), stop)
    rows = [ScoredRow(ids, len(ids) - 3), ScoredRow(ids[:9] + ids[10:], 4), ScoredRow(ids, len(ids))]
    found, held, room = written(model, Method(), rows, how, 0)
    options = dict(max_new_tokens=4, stop_strings=stop)
    want = kvjax.generate(model, [row.ids for row in rows], **options)
    assert found == [
        row[:n] for row, n in zip(np.asarray(want.tokens).tolist(), want.lengths.tolist(), strict=True)
    ]
    assert model.tokenizer.decode(found[0]) == ("17 4" if stop else "17 4 52 <.>")
    weighed = CacheBytes()
    weighed.add(model, held, rows, room, 2)
    assert weighed.kept == weighed.full > 0 and weighed.requests == 2


def test_bytes_of_the_full_cache_are_those_of_a_prefill(model):
    _, cache = kvjax.prefill(model, [[1] * 40, [1] * 17], room=32)
    assert full_bytes(model, 2, 48, 32) == kvjax.nbytes(cache)


def test_options_of_generation_are_taken_or_refused():
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.2}
    how = writing_of(GREEDY | drawn, ["\n", ""])
    assert how.sampler == Sampler(0.7, None, 0.9) and how.stop_strings == ("\n",)
    assert how.processors[0].penalty == 1.2 and how.new == 4
    assert writing_of(GREEDY | {"temperature": 0.7, "num_beams": 1}, []) == Writing(4, Sampler(), (), ())
    with pytest.raises(InputError, match="num_beams=4, and only 1 is possible"):
        writing_of(GREEDY | {"num_beams": 4}, [])
    with pytest.raises(InputError, match="max_length=99, and it is not known: expected until"):
        writing_of(GREEDY | {"max_length": 99}, [])
