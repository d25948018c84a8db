"""What tokens are: traces of their ids, in prompts, steps and narrowed prompts, and ids of a tokenizer."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep
from kvjax.grammar.kinds import Inputs
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.keep.scores.score import KeyNorm
from kvjax.keep.scores.tokens import IsTokenType, SeparatorsFirst
from tests.methods.battery import MAIN, model, positions


def test_a_trace_of_ids_is_one_for_its_tokens_and_needs_ids():
    x, tokens = jnp.zeros((2, 3, 4, 8)), jnp.asarray([[1, 5, 5, 2], [7, 1, 0, 0]])
    inputs = Inputs(x, x, x, x[:, 0], jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32))
    found = IsTokenType((5, 7)).start(inputs._replace(tokens=tokens), 3)
    want = np.isin(np.asarray(tokens), (5, 7))
    np.testing.assert_array_equal(found, np.broadcast_to(want[:, None], (2, 3, 4)))
    with pytest.raises(InputError, match="asks for token ids, and vectors were given: give token ids"):
        IsTokenType((5,)).start(inputs, 3)
    with pytest.raises(InputError, match="has no ids yet"):
        IsTokenType().start(inputs._replace(tokens=tokens), 3)


def test_tokens_of_upper_layers_are_those_that_went_on():
    """Three layers, the upper ones of which see some tokens alone."""
    marks = tuple(range(0, 64, 3))
    narrow = SelectivePropagation(0, KeyNorm(), 0.6, window=2)
    keep = Keep(SeparatorsFirst(IsTokenType(marks)), Budget(0.2), Uniform(), narrow=narrow)
    _, cache = kvjax.prefill(model("deep"), MAIN.first, method=kvjax.chain(keep), room=4)
    whole = kvjax.chain(Keep(KeyNorm(), Budget(1.0), Uniform(), narrow=narrow))
    _, seen = kvjax.prefill(model("deep"), MAIN.first, method=whole, room=4)
    for kept, here in zip(positions(cache), positions(seen), strict=True):
        for lists, known, tokens in zip(kept, here, MAIN.first, strict=True):
            for mine, able in zip(lists, known, strict=True):
                best = sorted(able, key=lambda j, t=tokens: (t[j] in marks, j))
                assert mine == set(best[-max(1, len(tokens) // 5) :])


@pytest.mark.rotating
def test_separators_are_those_of_the_models_tokenizer_in_prompts_and_steps():
    recall = kvjax.load("recall-tiny")
    named = [recall.tokenizer.token_to_id(mark) for mark in ("<.>", "<,>")]
    rows = [np.random.default_rng(0).integers(12, 220, 40).tolist()]
    rows[0][5], rows[0][9] = named
    for method in (
        kvjax.method("sepllm", budget=10, sinks=1, window=4),
        kvjax.method("sepllm", budget=10, sinks=1, window=4, separators=tuple(named)),
    ):
        _, cache = kvjax.prefill(recall, rows, method=method, room=8)
        _, cache = kvjax.step(recall, cache, np.array(named[:1], np.int32))
        for token in (20, 30, 40, 50, 60):
            _, cache = kvjax.step(recall, cache, np.array([token], np.int32))
        assert {*range(41, 46), 40, 5, 9, 0} < positions(cache)[0][0][0]
    bare = model("4/2")
    with pytest.raises(InputError, match="this model has no tokenizer: give their ids as separators="):
        kvjax.prefill(bare, MAIN.first, method=kvjax.method("sepllm", budget=10, sinks=1, window=4))
