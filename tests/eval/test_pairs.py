"""Associative recall: rows of pairs and of questions, read back in words."""

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.eval.tasks.associative_recall import KEYS, VALUES, pairs_batch
from kvjax.eval.tasks.recall import WORDS, tokenizer


@pytest.mark.parametrize("length", (4, 32, 4 * KEYS))
def test_every_key_is_asked_for_once_and_its_value_was_told(length):
    tokens, weights = pairs_batch(np.random.default_rng(length), 8, length)
    for row, weight in zip(tokens, weights, strict=True):
        first, *words = tokenizer().decode(list(row), skip_special_tokens=False).split()
        told, asked = words[: length // 2], words[length // 2 :]
        assert first == "<bos>" and len(words) == length
        pairs = dict(zip(told[::2], told[1::2], strict=True))
        assert len(pairs) == length // 4
        assert sorted(pairs.items()) == sorted(zip(asked[::2], asked[1::2], strict=True))
        counted = [word for word, counts in zip(words, weight[1:], strict=True) if counts]
        assert counted == asked[1::2] and weight.sum() == len(pairs)


def test_every_word_comes_and_the_order_of_questions_is_drawn():
    tokens, _ = pairs_batch(np.random.default_rng(0), 256, 64)
    keys, values = tokens[:, 1::2], tokens[:, 2::2]
    assert len(np.unique(keys)) == KEYS and len(np.unique(values)) == VALUES
    told, asked = keys[:, :16], keys[:, 16:]
    places = (told[:, None] == asked[..., None]).argmax(-1)
    # Each place is asked for first in a 16th of the rows: 16 of 256, give or take five standard deviations.
    counts = np.bincount(places[:, 0], minlength=16)
    assert counts.min() > 0 and counts.max() < 16 + 5 * 4
    assert {WORDS[i] for i in np.unique(values)} >= {"0", "63"}


def test_rows_repeat_with_their_seed():
    one, two, other = (pairs_batch(np.random.default_rng(seed), 2, 16)[0] for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


@pytest.mark.parametrize("length", (0, 30, 4 * KEYS + 4))
def test_a_length_that_holds_no_such_row_is_refused(length):
    with pytest.raises(InputError, match=f"1 to {KEYS} pairs, got length={length}: give a multiple of 4"):
        pairs_batch(np.random.default_rng(0), 1, length)
