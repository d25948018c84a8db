"""Patterns protect slots by position alone, per row."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_budget
from kvjax.keep.patterns import Recent, Sink
from tests.methods.battery import MAIN, kept_of, model, positions, prompt_of
from tests.methods.rows import at_budget
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

LENGTH, N = np.array([12, 5, 3]), np.array([6, 4, 3])


def protected(pattern, rng):
    """(positions, mask) of shuffled slots of three rows of unequal length, some of them empty."""
    pos = np.stack([[rng.permutation(16) for _ in range(2)] for _ in LENGTH]).astype(np.int32)
    pos[pos >= LENGTH[:, None, None]] = -1
    mask = pattern(jnp.asarray(pos), jnp.asarray(LENGTH), jnp.asarray(N))
    return pos, np.asarray(mask) & (pos >= 0)


def kept_sets(pos, mask):
    return [
        [set(p[m].tolist()) for p, m in zip(row, keep, strict=True)]
        for row, keep in zip(pos, mask, strict=True)
    ]


def test_sinks_are_the_first_tokens_of_every_row(rng):
    pos, mask = protected(Sink(4), rng)
    assert kept_sets(pos, mask) == [[{0, 1, 2, 3}] * 2, [{0, 1, 2, 3}] * 2, [{0, 1, 2}] * 2]
    assert not np.asarray(Sink(4)(jnp.full((1, 1, 3), -1), jnp.asarray([3]), jnp.asarray([2]))).any()


def test_recent_tokens_are_counted_from_each_rows_own_end(rng):
    pos, mask = protected(Recent(4), rng)
    assert kept_sets(pos, mask) == [[{8, 9, 10, 11}] * 2, [{1, 2, 3, 4}] * 2, [{0, 1, 2}] * 2]


@pytest.mark.parametrize("share", [0.5, 0.34])
def test_a_fraction_of_recent_tokens_is_a_share_of_the_budget(rng, share):
    pos, mask = protected(Recent(share), rng)
    for row, (length, n) in enumerate(zip(LENGTH, N, strict=True)):
        want = set(range(length - int(n * share + 1e-9), length))
        assert kept_sets(pos, mask)[row] == [want] * 2


def test_what_is_protected_stays_before_what_a_score_wants_at_any_price():
    """CriticalKV's first stage takes 10 of 12 slots, and its window 4 of them: the first stage gives way."""
    tokens = 24
    method = kvjax.method("criticalkv", budget=12, window=4, kernel=1, first=0.84)
    _, cache = kvjax.prefill(model("4/2"), [list(range(1, tokens + 1))], method=method)
    for kept in kvjax.kept_positions(cache):
        for head in kept[0]:
            assert {*range(tokens - 4, tokens)} <= {*head.tolist()} and (head >= 0).sum() == 12


@pytest.mark.parametrize("label", sweep(["snapkv", "adakv", "cake", "morphkv"], "snapkv"))
def test_a_window_above_half_of_the_budget_stays_beside_the_best_others(label):
    """Windows of 4 tokens in budgets of 4 to 8 slots; a window above all of a budget is refused."""
    row = BY_LABEL[label]
    _, cache = kvjax.prefill(model(row.model), MAIN.first, method=row.at_budget(0.25))
    found = positions(cache)
    with at_budget(0.25):
        for b in range(len(MAIN.first)):
            for layer, keep in enumerate(kept_of(label, prompt_of(row.model, "main", b))):
                assert found[layer][b] == [{*np.flatnonzero(k).tolist()} for k in keep], (layer, b)
    with pytest.raises(InputError, match=r"4 of 12 tokens must stay .* more than the budget of 3 slots"):
        check_budget(row.at_budget(0.25), [12])


def test_window_of_a_short_prompt_is_what_there_is():
    method = kvjax.method("snapkv", budget=8, window=6)
    check_budget(method, [4, 6, 8, 9])
