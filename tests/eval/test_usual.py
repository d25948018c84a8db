"""What a comparison does without arguments: needles in English for models that may read it, else recall."""

import dataclasses

import pytest

import kvjax
from kvjax.eval.run.usual import ENGLISH, RECALL, usual_of
from kvjax.eval.tasks.sample import TASKS
from kvjax.eval.tasks.suite import FIRST_IN_ENGLISH, default_tasks
from kvjax.methods.parse import parse_method


@pytest.fixture(scope="module")
def shipped():
    return kvjax.load("recall-tiny")


def like(model, **changes):
    return dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))


def test_a_model_of_a_large_vocabulary_is_asked_in_english(shipped):
    english = like(shipped, vocab=49152, max_positions=8192)
    assert default_tasks(english) == FIRST_IN_ENGLISH and usual_of(english) == ENGLISH
    assert default_tasks(shipped) == TASKS and usual_of(shipped) == RECALL


@pytest.mark.parametrize("changes", [{"vocab": 512}, {"max_positions": 512}])
def test_small_vocabularies_and_short_contexts_are_asked_recall(shipped, changes):
    model = like(shipped, **({"vocab": 49152, "max_positions": 8192} | changes))
    assert default_tasks(model) == TASKS


def test_a_model_without_a_tokenizer_is_asked_recall(shipped):
    bare = dataclasses.replace(like(shipped, vocab=49152, max_positions=8192), tokenizer=None)
    assert default_tasks(bare) == TASKS


def test_every_usual_method_is_known():
    for text in (*ENGLISH.methods, *RECALL.methods):
        assert parse_method(text, {})[0]
