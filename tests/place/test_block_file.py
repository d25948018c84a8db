"""Blocks of a long text in files: which match a query best, and how much memory it takes to find them."""

import tracemalloc

import numpy as np
import pytest

from kvjax.place import block_file
from kvjax.place.block_file import BlockFile

HEADS, TOKENS, KEYS, WIDTH, FIRST, MOST = 2, 4, 2, 8, 3, 5


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """Return a function that makes a file of random blocks, with all of their representatives."""
    # A few blocks are ranked at a time.
    monkeypatch.setattr(block_file, "AT_ONCE", 2**12)
    opened = []

    def fill(blocks):
        file = BlockFile(tmp_path, f"of {blocks}", HEADS, WIDTH, WIDTH, TOKENS, KEYS)
        opened.append(file)
        keys = np.random.default_rng(1).normal(size=(blocks, HEADS, KEYS, WIDTH)).astype(np.float32)
        file.append(np.zeros((blocks, HEADS, TOKENS, 2 * WIDTH), np.float32), keys)
        return file, keys

    yield fill
    for file in opened:
        file.close()


def test_the_first_blocks_and_those_with_the_largest_products_are_best(filled, rng):
    file, keys = filled(500)
    query = rng.normal(size=(HEADS, 3, WIDTH)).astype(np.float32)
    found = file.best(query, FIRST, MOST)
    for head in range(HEADS):
        score = np.einsum("prh,gh->prg", keys[:, head].astype(np.float64), query[head]).max((1, 2))
        order = FIRST + np.argsort(-score[FIRST:])[:MOST]
        assert sorted(found[head].tolist()) == sorted([*range(FIRST), *order.tolist()])


def test_memory_does_not_grow_with_the_text(filled, rng):
    query, peaks = rng.normal(size=(HEADS, 3, WIDTH)).astype(np.float32), []
    for blocks in (500, 5000):
        file, _ = filled(blocks)
        tracemalloc.start()
        file.best(query, FIRST, MOST)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]
