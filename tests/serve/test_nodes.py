"""Shared pages are read once: by pieces of a tree's nodes, with the attention that every row has alone."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops.attention.by_node import attend_by_node
from kvjax.ops.decode.page_pool import make_pool
from kvjax.ops.decode.paged_decode import paged_decode
from kvjax.serve.ledger.nodes import pieces, read_again
from tests.sweep import sweep


def tables_at_random(seed, rows=7):
    """Tables that branch like prompts: a row begins like an earlier one, and has pages of its own behind."""
    draw, found, page = random.Random(seed), [[0, 1, 2]], 3
    for _ in range(rows - 1):
        old = draw.choice(found)
        own = draw.randint(0, 5)
        head = old[: draw.randint(0 if own else 1, len(old))]
        found.append([*head, *range(page, page + own)])
        page += own
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most", [1, 3, 8])
def test_every_page_is_in_one_piece_with_all_rows_that_hold_it(seed, most):
    tables = tables_at_random(seed)
    found = pieces(tables, most)
    listed = [page for one in found for page in one.pages]
    assert sorted(listed) == sorted({page for table in tables for page in table})
    for one in found:
        assert 0 < len(one.pages) <= most
        for i, page in enumerate(one.pages):
            assert one.rows == [row for row, table in enumerate(tables) if page in table]
            assert all(tables[row][one.first + i] == page for row in one.rows)
    assert read_again(tables) == sum(map(len, tables)) - len(listed)


@pytest.mark.parametrize("seed", sweep(range(3), 0))
def test_rows_that_share_pages_attend_as_each_alone(seed, rng):
    tables, page, heads, width, group = tables_at_random(seed), 4, 2, 8, 3
    blocks, rows = 1 + max(max(t) for t in tables), len(tables)
    k, v = rng.normal(size=(2, 1, heads * blocks, page, width)).astype(np.float32)
    # Position i of a row is slot i of its table; its last page is full but for one slot.
    pos = np.zeros((1, heads * blocks, page), np.float32)
    for table in tables:
        for i, block in enumerate(table):
            pos[0, [block, blocks + block]] = i * page + np.arange(page)
    q = rng.normal(size=(rows, heads * group, 1, width)).astype(np.float32)
    stored = np.array([len(t) * page for t in tables])
    want = np.zeros(q.shape)
    for r, table in enumerate(tables):
        for n in range(heads * group):
            at = np.array(table) + n // group * blocks
            kk, vv = (np.float64(x[0, at]).reshape(-1, width) for x in (k, v))
            p = np.exp(kk @ q[r, n, 0])
            want[r, n, 0] = p @ vv / p.sum()
    found = pieces(tables, 2)
    table = np.zeros((len(found) + 1, heads, 2), np.int32)
    of = np.full((len(found) + 1, max(len(one.rows) for one in found)), -1, np.int32)
    lengths = np.zeros((len(found) + 1, heads), np.int32)
    for i, one in enumerate(found):
        table[i, :, : len(one.pages)] = np.array(one.pages) + np.arange(heads)[:, None] * blocks
        of[i, : len(one.rows)], lengths[i] = one.rows, len(one.pages) * page
    pool = make_pool(jnp.asarray(k), jnp.asarray(v), pos=jnp.asarray(pos))
    at = jnp.asarray(stored[:, None] - 1, jnp.int32)

    def over(q, q_pos):
        return paged_decode(q, pool, jnp.asarray(table), jnp.asarray(lengths), q_pos, scale=1.0)[:2]

    got = attend_by_node(over, jnp.asarray(q), at, jnp.asarray(of))
    np.testing.assert_allclose(got, want, atol=2e-5)
    nobody = attend_by_node(over, jnp.asarray(q), at, jnp.full_like(of, -1))
    assert (np.asarray(nobody) == 0).all()
