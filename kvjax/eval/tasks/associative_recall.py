"""Associative recall: pairs of a key and a value, and then every key once more, followed by its value.

As in MQAR, multi-query associative recall (Arora et al., 2023, arXiv:2312.04927), a row has many questions,
so that every row gives much training signal. Keys, values and tokenizer are words of the recall language:

    <bos> brave 17 otter 4 calm 52   calm 52 brave 17 otter 4

Unlike MQAR's, keys are queried one right after the other, with no filler between.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Int32

from kvjax.base.errors import InputError
from kvjax.eval.tasks.recall import BOS, COLOUR, FIRST, NUMBER

KEYS = NUMBER - FIRST
VALUES = COLOUR - NUMBER
# Tokens of a pair: when it is given, and when it is queried.
ROW_TOKENS = 4


def pair_count(length: int) -> int:
    """How many pairs a row of so many tokens has.

    Raises InputError if `length` is no multiple of 4, or asks for more pairs than there are keys.

    >>> pair_count(64)
    16
    """
    count, rest = divmod(length, ROW_TOKENS)
    if rest or not 1 <= count <= KEYS:
        raise InputError(
            f"rows of pairs have {ROW_TOKENS} tokens for each of 1 to {KEYS} pairs, got length={length}: "
            f"give a multiple of {ROW_TOKENS} up to {ROW_TOKENS * KEYS}"
        )
    return count


def pairs_batch(
    rng: np.random.Generator, rows: int, length: int
) -> tuple[Int32[np.ndarray, "B T"], Float32[np.ndarray, "B T"]]:
    """Rows of T = `length` + 1 ids with length / 4 pairs, and weights: 1 on values that are asked for.

    Keys of a row differ, and each is asked for once. Raises InputError as `pair_count` does.

    >>> tokens, weights = pairs_batch(np.random.default_rng(0), 2, 16)
    >>> tokens.shape, weights[0].nonzero()[0].tolist()
    ((2, 17), [10, 12, 14, 16])
    """
    count = pair_count(length)
    keys = FIRST + rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :count]
    pairs = np.stack([keys, NUMBER + rng.integers(0, VALUES, keys.shape)], -1)
    order = rng.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)
    asked = np.take_along_axis(pairs, order[..., None], 1)
    tokens = np.concatenate([np.full((rows, 1), BOS), *(x.reshape(rows, -1) for x in (pairs, asked))], 1)
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, length // 2 + 2 :: 2] = 1.0
    return tokens.astype(np.int32), weights
