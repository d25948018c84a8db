"""Coded files: the same bits in fewer bytes, near the entropy; what was damaged is noticed."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.cache_arrays import SavedArrays, write_parts
from kvjax.io.entropy_coding import coded, decoded
from kvjax.models.files import open_safetensors
from kvjax.store.symmetric import Symmetric, Unpacked
from tests.sweep import sweep

TEXT = [np.random.default_rng(5).integers(0, 100, 300).tolist(), list(range(40))]


def assert_same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    np.testing.assert_array_equal(*(np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)))


@pytest.mark.parametrize(
    "dtype", ["uint32", "uint8", "int8", "int32", "float16", "bfloat16", "float32", "bool"]
)
@pytest.mark.parametrize("shape", [(1, 2, 3, 64, 4), (2, 3, 2, 200), (5000,), (60, 70), (2, 1, 5, 40, 2, 3)])
def test_every_array_comes_back_with_its_bits(rng, dtype, shape):
    """Among them numbers that are none, whose bits are kept, too."""
    value = np.asarray(jnp.asarray(rng.binomial(30, 0.2, shape)).astype(dtype))
    if dtype in ("float16", "float32", "bfloat16"):
        value = np.asarray(jnp.asarray(rng.normal(size=shape)).astype(dtype)).copy()
        value.reshape(-1)[:3] = [np.nan, -np.inf, -0.0]
    small, how = coded(value)
    assert small.dtype == np.uint8 and small.nbytes < value.nbytes
    assert_same_bits(decoded(small, json.loads(json.dumps(how))), value)


def test_codes_take_as_many_bits_as_their_entropy_in_every_channel(rng):
    """Codes of 4 bits in words, of 8 channels that differ, and as many heads."""
    chances = rng.dirichlet(np.full(16, 0.3), (2, 8))
    codes = np.stack([[rng.choice(16, 20_000, p=p) for p in head] for head in chances]).transpose(0, 2, 1)
    words = (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    small, how = coded(words.reshape(1, 1, 2, 20_000, 1))
    counts = [np.bincount(codes[h, :, c], minlength=16) for h in range(2) for c in range(8)]
    bound = sum(scipy.stats.entropy(n, base=2) for n in counts) * 20_000 / 8
    assert how["by"] == "channel" and how["bits"] == 4
    assert bound < small.nbytes < 1.01 * bound + 16 * 16
    pooled = scipy.stats.entropy(sum(counts), base=2) * 16 * 20_000 / 8
    assert small.nbytes < 0.9 * pooled


def test_what_would_not_be_smaller_stays_as_it_is(rng):
    assert coded(rng.integers(0, 256, 10_000).astype(np.uint8)) is None
    assert coded(np.zeros(100, np.uint8)) is None


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


@pytest.fixture(scope="module")
def int4(model):
    return kvjax.prefill(model, TEXT, method="int4")[1]


@pytest.mark.rotating
@pytest.mark.parametrize("method", sweep(["int4", "snapkv(budget=0.5, window=8) + kivi(bits=2)"], "int4"))
def test_a_coded_cache_is_smaller_and_is_the_same_one(model, method, tmp_path):
    _, cache = kvjax.prefill(model, TEXT, method=method)
    kvjax.save_cache(tmp_path / "plain", cache)
    kvjax.save_cache(tmp_path / "small", cache, coder="range")
    sizes = [(tmp_path / name).stat().st_size for name in ("plain", "small")]
    assert sizes[1] < 0.85 * sizes[0]
    back = kvjax.load_cache(tmp_path / "small")
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(back), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


@pytest.mark.rotating
def test_codes_in_bytes_take_their_entropy_in_each_channel_and_packed_ones_more(rng):
    x = jnp.asarray(rng.laplace(size=(1, 1, 2, 4000, 8)) * np.geomspace(0.1, 1, 8), jnp.float32)
    codes = np.asarray(Unpacked(5).encode(x)["codes"])
    small, how = coded(codes)
    lines = np.moveaxis(codes[0, 0], 1, 2).reshape(16, -1)
    bound = sum(
        scipy.stats.entropy(np.unique(line, return_counts=True)[1], base=2) * 4000 / 8 for line in lines
    )
    assert how["by"] == "channel" and bound < small.nbytes < 1.02 * bound + 300
    assert small.nbytes < 0.92 * coded(np.asarray(Symmetric(5).encode(x)["words"]))[0].nbytes


def test_digests_are_those_of_the_arrays_themselves(int4, tmp_path):
    for name, coder in (("plain", None), ("small", "range")):
        kvjax.save_cache(tmp_path / name, int4, coder=coder)
    plain, small = (open_safetensors(tmp_path / name).metadata() for name in ("plain", "small"))
    assert plain["arrays"] == small["arrays"] and (plain["format"], small["format"]) == ("7", "8")


def test_parts_of_several_processes_are_coded_too(rng, tmp_path):
    value = jnp.asarray(rng.binomial(15, 0.3, (2, 1, 2, 300, 8)), jnp.uint8)
    write_parts(tmp_path / "c", {"x": value}, {"kind": "k"}, "range")
    (part,) = tmp_path.glob("c.*")
    assert part.stat().st_size < 0.6 * value.nbytes
    found = SavedArrays(tmp_path / "c", [part.name])
    assert_same_bits(found.read("x", value.dtype, value.shape, (slice(None),) * 5), np.asarray(value))


@pytest.mark.rotating
def test_a_damaged_or_cut_coded_file_is_refused_in_one_sentence(int4, rng, tmp_path):
    file, bad = tmp_path / "small", tmp_path / "bad"
    kvjax.save_cache(file, int4, coder="range")
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    places = [*rng.integers(start, len(data), 12), start, len(data) - 1]
    changed = [data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :] for at in places]
    for wrong in (*changed, data[:-5], data[: start + 100], data[:start]):
        bad.write_bytes(wrong)
        with pytest.raises(InputError, match=r"^[^\n]*bad[^\n]*$"):
            kvjax.load_cache(bad)


def test_coded_bytes_that_are_cut_or_say_too_much_are_refused(rng):
    small, how = coded(rng.binomial(15, 0.3, (1, 1, 2, 500, 8)).astype(np.uint8))
    for wrong in (small[:3], small[:9], small[:-3], small[:20]):
        with pytest.raises(ValueError):
            decoded(wrong, how)
    longer = small.copy()
    longer[:4] = 255
    with pytest.raises(ValueError, match="cut"):
        decoded(longer, how)


def test_a_coder_that_does_not_exist_or_is_not_installed_is_named(int4, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="coder is 'zip', expected 'range', a fitted coder or None"):
        kvjax.save_cache(tmp_path / "c", int4, coder="zip")
    kvjax.save_cache(tmp_path / "c", int4, coder="range")
    monkeypatch.setitem(sys.modules, "constriction", None)
    for call in (
        lambda: kvjax.save_cache(tmp_path / "d", int4, coder="range"),
        lambda: kvjax.load_cache(tmp_path / "c"),
    ):
        with pytest.raises(InputError, match=r"not installed: pip install 'kvjax\[coder\]'"):
            call()
    assert not (tmp_path / "d").exists()
