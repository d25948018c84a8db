"""A cache that lies in parts, each with pieces of its arrays: read as one, from whichever pieces hold it."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io import cache_file
from kvjax.io.cache_arrays import SavedArrays, _write, write_parts

WHOLE = (slice(None), slice(None))


@pytest.fixture
def x(rng):
    return rng.normal(size=(4, 6)).astype(jnp.bfloat16)


def in_four(x, folder, leave_out=()):
    """Write an array of bfloat16 in two parts of two pieces each."""
    spans = {f"a@{i}": [[2 * (i // 2), 2 * (i // 2) + 2], [3 * (i % 2), 3 * (i % 2) + 3]] for i in range(4)}
    for part in range(2):
        names = [n for n in list(spans)[2 * part : 2 * part + 2] if n not in leave_out]
        pieces = {n: x[slice(*spans[n][0]), slice(*spans[n][1])].reshape(-1).view(np.uint8) for n in names}
        _write(folder / f"part{part}", pieces, {"pieces": json.dumps({n: spans[n] for n in names})})
    return SavedArrays(folder / "head", ["part0", "part1"])


@pytest.mark.parametrize("index", [WHOLE, (slice(1, 3), slice(2, 5)), (slice(0, 2), slice(0, 3))])
def test_a_piece_is_put_together_from_those_that_hold_it(x, tmp_path, index):
    got = in_four(x, tmp_path).read("a", np.dtype(jnp.bfloat16), x.shape, index)
    assert got.dtype == x.dtype and got.tobytes() == np.ascontiguousarray(x[index]).tobytes()


def test_an_absent_piece_is_missed_where_it_is_needed(x, tmp_path):
    arrays, kind = in_four(x, tmp_path, leave_out=("a@3",)), np.dtype(jnp.bfloat16)
    np.testing.assert_array_equal(arrays.read("a", kind, x.shape, (slice(0, 2), slice(None))), x[:2])
    with pytest.raises(KeyError, match="parts of a"):
        arrays.read("a", kind, x.shape, WHOLE)


@pytest.fixture
def cache():
    model = kvjax.load("recall-tiny")
    return kvjax.prefill(model, [[1, 2, 3, 4]], method=kvjax.method("int8"), room=4)[1]


def test_a_file_of_parts_replaces_one_of_its_own_and_is_replaced_by_one(cache, tmp_path, monkeypatch):
    path = tmp_path / "a.cache"
    monkeypatch.setattr(cache_file, "is_shared", lambda tree: True)
    for _ in range(2):
        kvjax.save_cache(path, cache)
        assert len(list(tmp_path.iterdir())) == 2
        assert kvjax.load_cache(path).method == cache.method
    monkeypatch.undo()
    kvjax.save_cache(path, cache)
    assert [p.name for p in tmp_path.iterdir()] == ["a.cache"]


def test_a_lost_part_is_named(tmp_path):
    write_parts(tmp_path / "a", {"x": jnp.zeros(3)}, {})
    [part] = [p for p in tmp_path.iterdir() if p.name != "a"]
    part.unlink()
    with pytest.raises(InputError, match=f"lacks its part {part.name}"):
        SavedArrays(tmp_path / "a", [part.name])
