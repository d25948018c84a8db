"""Pairs in which one method changes no number are the other one alone, drawn among all that can be chained.

A store beside a keep of everything is the store, slots in host memory beside a keep are the keep, and all
reads of everything beside a store are one.
"""

import dataclasses
from random import Random

import pytest

import kvjax
from kvjax.grammar import Budget, Method
from kvjax.grammar.read_kinds import Placing
from kvjax.read.pages import PageBounds
from scripts.studies.method_pairs import VERBS
from tests.methods.battery import off
from tests.methods.table import ROWS
from tests.methods.test_pairs_of_reads import fed, keeps, reads
from tests.sweep import sweep

# How many drawings of each kind take turns, and how many pairs each tries.
DRAWS, PAIRS = 12, 2
OFFLOADED = kvjax.method("offloaded")


def stores():
    """Rows of methods that encode, and do nothing else."""
    for row in ROWS:
        method = row.method()
        others = [getattr(method, part) for part in VERBS if part != "store"]
        if method.store is not None and others == [None] * len(others):
            yield row, method


def beside_a_whole_keep():
    """Yield a keep of everything and a store, and the store alone.

    A keep that rotates keys anew is left out: its store encodes them before rotation.
    """
    for row, method in keeps():
        if row.whole is not None and method.keep.phase.steady:
            for other, store in stores():
                yield row, other, (row.method(row.whole), store), store


def in_host_memory():
    """Yield a keep and slots in host memory, and the keep alone."""
    for row, keep in keeps():
        yield row, OFFLOADED.id, (keep, OFFLOADED), keep


@dataclasses.dataclass(frozen=True)
class AllPages(PageBounds):
    """Reads every page, behind a tail of as many tokens as another read has."""

    newest: int = 0


def beside_a_whole_read():
    """Yield a store and a read of everything, and the store beside another read of everything.

    A read leaves tokens unencoded until they fill a page, which the store alone does not.
    """
    for name, method in reads():
        read = method.read
        # It places what it reads anew.
        if isinstance(read, Placing) or method.store is not None:
            continue
        whole = AllPages(Budget(1.0), read.granule, read.skip_layers, read.newest)
        for row, store in stores():
            try:
                yield row, name, (store, method), kvjax.chain(store, Method(read=whole))
            except ValueError:
                continue


KINDS = {
    "keep x store": beside_a_whole_keep,
    "keep x host": in_host_memory,
    "store x read": beside_a_whole_read,
}


def drawn(kind, seed):
    """Pairs that can be chained, in an order of a seed, until there are enough."""
    random, found, all = Random(f"{kind}, {seed}"), [], [*KINDS[kind]()]
    while len(found) < PAIRS:
        row, other, parts, alone = random.choice(all)
        if getattr(other, "model", row.model) != row.model:
            continue
        try:
            both = kvjax.chain(*parts)
        except ValueError:
            continue
        found.append((row, f"{row.label} + {getattr(other, 'label', other)}", both, alone))
    return found


@pytest.mark.parametrize(("kind", "seed"), sweep([(kind, n) for kind in KINDS for n in range(DRAWS)]))
def test_a_method_beside_one_that_changes_nothing_is_as_alone(kind, seed):
    for row, name, both, alone in drawn(kind, seed):
        for (got, held), (want, others) in zip(fed(both, row.model), fed(alone, row.model), strict=True):
            assert off(got, want) < 3e-5, name
            assert held == others, name
