"""A read of everything beside a keep is that keep alone, for pairs drawn among all that can be chained."""

from random import Random

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method
from kvjax.grammar.read_kinds import Placing
from tests.methods.battery import MAIN, VOCAB, B, model, off, positions
from tests.methods.table import ROWS
from tests.sweep import sweep

# How many drawings take turns, and how many pairs each tries.
DRAWS, PAIRS, TOKENS = 20, 2, 16
# magicpig samples; the others attend to all tokens through codes.
INEXACT = {"magicpig", "specache", "lserve"}


def keeps():
    """Rows of methods that keep, and neither encode nor read in part."""
    for row in ROWS:
        method = row.method()
        if method.keep is not None and method.store is None and method.read is None:
            yield row, method


def reads():
    """Yield the reads of rows, which read everything exactly."""
    for row in ROWS:
        if row.whole is not None and len(row.build) == 1 and row.label not in INEXACT:
            method = row.method(row.whole)
            store = method.store
            if method.read is not None and (store is None or store.keys is store.values is None):
                yield row.label, Method(read=method.read, store=store)


def drawn(seed):
    """Labels of pairs that can be chained, in an order of a seed, until there are enough."""
    random, words = Random(f"keep x read, {seed}"), list(reads())
    rows, found = list(keeps()), []
    while len(found) < PAIRS:
        (row, keep), (name, read) = random.choice(rows), random.choice(words)
        # It places what it reads anew, which the keep alone does not.
        if isinstance(read.read, Placing):
            continue
        try:
            both = kvjax.chain(keep, read)
        except ValueError:
            continue
        found.append((row, name, keep, both))
    return found


@pytest.mark.parametrize("seed", sweep(range(DRAWS)))
def test_a_read_of_everything_beside_a_keep_is_the_keep_alone(seed):
    for row, name, keep, both in drawn(seed):
        for (got, held), (want, others) in zip(fed(both, row.model), fed(keep, row.model), strict=True):
            assert off(got, want) < 3e-5, f"{row.label} + {name}"
            assert held == others, f"{row.label} + {name}"


def fed(method, name):
    """Yield the logits and positions of every step of a decode."""
    _, cache = kvjax.prefill(model(name), MAIN.first, method=method, room=TOKENS)
    for token in np.random.default_rng(2).integers(0, VOCAB, (TOKENS, B)):
        logits, cache = kvjax.step(model(name), cache, token.tolist())
        yield np.asarray(logits, np.float64), positions(cache)
