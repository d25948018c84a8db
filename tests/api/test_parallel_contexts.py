"""Rows of unequal contexts in one batch: each as the same row alone, in float64 numpy."""

import numpy as np
import pytest

import kvjax
from tests.float64.ranges import Ranges
from tests.float64.reference import Decoder, Prompt
from tests.methods.battery import MAIN, model

LENGTHS, PREFIX = [[6, 9, 4], [11], [], [3, 8]], [3, 2, 4, 0]
METHOD = "ape(contexts=(), temperature=0.8, scale=0.9)"
# Every row, and what comes after its first turn: a token, then a second turn.
TEXTS = [
    [*row, int(one), *more] for row, one, more in zip(MAIN.first, MAIN.steps[0], MAIN.second, strict=True)
]


def float64(m, row):
    """Compute the logits after every token of a row's whole text, read alone."""
    ranges = Ranges(PREFIX[row], LENGTHS[row] or [1], 0.8, 0.9)
    if not LENGTHS[row]:
        ranges = None
    return Prompt(Decoder(m), TEXTS[row], ranges=ranges).all_logits


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("chunk", [None, pytest.param(5, marks=pytest.mark.rotating)])
def test_each_row_of_an_unequal_batch_is_the_row_alone(chunk, tmp_path):
    m = model("4/2")
    want = [float64(m, row) for row in range(4)]
    cache = kvjax.parallel_contexts(m, LENGTHS, prefix=PREFIX, method=METHOD)
    ends = [len(row) for row in MAIN.first]
    logits, cache = kvjax.prefill(m, MAIN.first, cache=cache, chunk=chunk)
    close(logits, [x[end - 1] for x, end in zip(want, ends, strict=True)])
    # Rows in another order, from a file.
    order = [2, 0, 3, 1]
    kvjax.save_cache(tmp_path / "cache", kvjax.take_rows(cache, order))
    cache = kvjax.load_cache(tmp_path / "cache")
    logits, cache = kvjax.step(m, cache, MAIN.steps[0][order])
    close(logits, [want[row][ends[row]] for row in order])
    logits, cache = kvjax.prefill(m, [MAIN.second[row] for row in order], cache=cache, chunk=chunk)
    close(logits, [want[row][-1] for row in order])


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["windowed", "deep"])
def test_contexts_in_windows_and_stacks_are_those_that_the_method_names(label):
    m, hyper = model(label), dict(temperature=0.8, scale=0.9)
    for row, lengths in enumerate(LENGTHS):
        if not lengths:
            continue
        named = kvjax.method("ape", contexts=tuple(lengths), shared_prefix=PREFIX[row], **hyper)
        want, one = kvjax.prefill(m, [MAIN.first[row]], method=named)
        again, _ = kvjax.step(m, one, MAIN.steps[0][row : row + 1])
        cache = kvjax.parallel_contexts(m, LENGTHS, prefix=PREFIX, method=METHOD)
        got, cache = kvjax.prefill(m, MAIN.first, cache=cache)
        close(got[row], want[0])
        close(kvjax.step(m, cache, MAIN.steps[0])[0][row], again[0])


@pytest.mark.rotating
def test_a_row_that_is_emptied_has_no_contexts():
    m = model("4/2")
    cache = kvjax.parallel_contexts(m, LENGTHS, prefix=PREFIX, method=METHOD)
    _, cache = kvjax.prefill(m, MAIN.first, cache=cache)
    cache = kvjax.reset_rows(cache, [False, True, False, False])
    got, _ = kvjax.prefill(m, MAIN.second, cache=cache)
    close(got[1], Prompt(Decoder(m), MAIN.second[1]).all_logits[-1])
    close(
        got[3],
        Prompt(Decoder(m), [*MAIN.first[3], *MAIN.second[3]], ranges=Ranges(0, [3, 8], 0.8, 0.9)).all_logits[
            -1
        ],
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: kvjax.prefill(m, [[1, 2]], method=METHOD), r"give cache=kvjax\.parallel_contexts"),
        (lambda m: kvjax.parallel_contexts(m, [[3]], method="ape"), "method is .*ape.*contexts of their own"),
        (lambda m: kvjax.parallel_contexts(m, [[3]], method="h2o(budget=0.5)"), "contexts of their own"),
        (lambda m: kvjax.parallel_contexts(m, [3, 4]), r"lengths is \[3, 4\], expected for every row a list"),
        (lambda m: kvjax.parallel_contexts(m, [[3], [0]]), "lengths is 0, expected at least 1"),
        (
            lambda m: kvjax.parallel_contexts(m, [[3], [2]], prefix=[1]),
            "prefix has 1 numbers, lengths 2 rows",
        ),
    ],
)
def test_what_are_no_contexts_of_rows_is_refused(call, said):
    with pytest.raises(kvjax.InputError, match=said):
        call(model("4/2"))
