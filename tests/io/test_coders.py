"""Fitted coders of files and streams against float64, and what is damaged, missing or of another model."""

import functools
import itertools
import os

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.io.coded_cache import coder_of
from kvjax.io.transform_coder import allotted, turned
from tests.methods.battery import model

TEXTS = [np.random.default_rng(i).integers(0, 64, 60).tolist() for i in range(4)]
ROWS = [np.random.default_rng(9).integers(0, 64, n).tolist() for n in (50, 31)]


@functools.cache
def fitted(kind):
    return kvjax.fit_coder(model("4/2"), TEXTS, kind, **({"newest": 8} if kind == "kvtc" else {}))


@functools.cache
def filled():
    return kvjax.prefill(model("4/2"), ROWS, room=4)[1]


def held(cache, row):
    """Keys and values [L, K, T, H] of a row, by their positions."""
    out = [[], []]
    for group in cache.groups:
        order = np.argsort(np.asarray(group.tail.pos[0, row, 0]))[-len(ROWS[row]) :]
        for side, x in zip(out, (group.tail.k, group.tail.v), strict=True):
            side.append(np.asarray(x[:, row])[:, :, order])
    return [np.concatenate(side) for side in out]


def transformed(x, of):
    """KVTC in float64: the sum of what every group of components gives back."""
    a = {n: np.asarray(y[0], np.float64) for n, y in fitted("kvtc").arrays.items()}
    rows = x.astype(np.float64).transpose(2, 0, 1, 3).reshape(x.shape[2], -1)
    y, out, at = rows - a[f"{of} mean"], a[f"{of} mean"], 0
    for size, bits in a[f"{of} groups"].astype(int):
        part = a[f"{of} basis"][:, at : at + size]
        z, at = y @ part, at + size
        if bits:
            half = lambda w: w.astype(np.float16).astype(float)  # noqa: E731
            low = half(z.min(1, keepdims=True))
            step = half((z.max(1, keepdims=True) - low) / (2**bits - 1))
            out = out + (np.clip(np.rint((z - low) / step), 0, 2**bits - 1) * step + low) @ part.T
    return out.reshape(x.shape[2], *x.shape[:2], -1).transpose(1, 2, 0, 3)


def near(got, want):
    """But for codes at the edge between two, which float32 may round to the other."""
    wrong = np.abs(got - want).max((0, 1, 3)) > 1e-4 * np.abs(want).max()
    assert wrong.mean() < 0.05 and np.square(got - want).sum() < 1e-3 * np.square(want).sum()


@pytest.mark.rotating
def test_kvtc_is_its_equations_before_rotation_and_leaves_first_and_newest_tokens(tmp_path):
    kvjax.save_cache(tmp_path / "c", filled(), coder=fitted("kvtc"))
    back = kvjax.load_cache(tmp_path / "c", model("4/2"), coder=fitted("kvtc"))
    turns = fitted("kvtc").arrays["turns"]
    for row, tokens in enumerate(ROWS):
        (k, v), (got_k, got_v) = held(filled(), row), held(back, row)
        middle = slice(4, len(tokens) - 8)
        raw = turned(k, turns, 0, -1)
        near(turned(got_k, turns, 0, -1)[:, :, middle], transformed(raw[:, :, middle], "key"))
        near(got_v[:, :, middle], transformed(v[:, :, middle], "value"))
        for x, y in ((k, got_k), (v, got_v)):
            np.testing.assert_array_equal(np.delete(x, np.r_[middle], 2), np.delete(y, np.r_[middle], 2))
        assert 0 < np.square(got_v - v).sum() < 0.2 * np.square(v).sum()
    assert jax.tree.structure(back) == jax.tree.structure(filled())


@pytest.mark.rotating
def test_components_are_those_of_unrotated_keys_of_all_layers():
    a = fitted("kvtc").arrays
    raw = read_keys_values(model("4/2"), [TEXTS], raw=True)
    for of, x in (("key", raw.k), ("value", raw.v)):
        rows = x.astype(np.float64).transpose(2, 0, 1, 3).reshape(x.shape[2], -1)
        np.testing.assert_allclose(a[f"{of} mean"][0], rows.mean(0), atol=1e-4)
        moments = np.cov(rows.T, bias=True)
        basis = a[f"{of} basis"][0].astype(float)
        found = basis.T @ moments @ basis
        np.testing.assert_allclose(np.diag(found), np.linalg.eigvalsh(moments)[::-1], rtol=1e-3, atol=1e-5)
        assert np.abs(found - np.diag(np.diag(found))).max() < 1e-4 * found.max()
        groups = a[f"{of} groups"][0]
        assert groups[:, 0].sum() == basis.shape[1]
        assert sum(n * b + 32 for n, b in groups if b) <= 16 * rows.shape[1] / 8


def test_bits_are_the_best_of_all_ways_to_give_them_out(rng):
    energy = np.sort(rng.exponential(size=5))[::-1] * 50
    errors = {(n, b): np.array([energy[i : i + n].sum() * (0.1 + 0.2 * rng.random()) ** b
                                for i in range(6 - n)]) for n in (1, 2, 4) for b in (1, 2, 4)}  # fmt: skip
    options = [(1, 0), *errors]

    def ways(i):
        if i == 5:
            return [[]]
        return [[(n, b), *rest] for n, b in options if i + n <= 5 for rest in ways(i + n)]

    def error(way):
        at = itertools.accumulate([0, *(n for n, _ in way)])
        return sum(errors[n, b][i] if b else energy[i] for (n, b), i in zip(way, at, strict=False))

    def cost(way):
        return sum(n * b + 2 for n, b in way if b)

    for budget in (0, 2, 3, 7, 12, 30):
        found = allotted(errors, energy, budget)
        best = min(error(way) for way in ways(0) if cost(way) <= budget)
        assert cost(found) <= budget and error(found) == pytest.approx(best)


def whole_numbers(x, most):
    """CacheGen in float64: [L, K, T, H] by the largest number of a token in all heads of its layer."""
    scale = np.abs(x).max((1, 3), keepdims=True).astype(np.float16).astype(float)
    c = np.array(most)[:, None, None, None]
    return np.clip(np.rint(x / scale * c), -c, c), scale / c


def test_cachegen_takes_the_entropy_by_frequencies_of_other_texts():
    coder, a = coder_of(fitted("cachegen")), fitted("cachegen").arrays
    # Of 2 layers, the lower one has more whole numbers.
    assert a["key most"].tolist() == a["value most"].tolist() == [[15, 7, 3], [7, 3, 1]]
    read = read_keys_values(model("4/2"), [TEXTS])
    k, v = held(filled(), 0)
    for quality in range(3):
        data, bits = coder.encode(k, v, 0, quality), 0.0
        for of, x, y, got in zip(
            ("key", "value"), (k, v), (read.k, read.v), coder.decode(data, 50, 0, quality), strict=True
        ):
            whole, step = whole_numbers(x.astype(float), a[f"{of} most"][:, quality])
            np.testing.assert_allclose(got, whole * step, rtol=1e-5, atol=1e-6)
            known, _ = whole_numbers(y.astype(float), a[f"{of} most"][:, quality])
            for i, head, c in np.ndindex(2, 2, 16):
                most = int(a[f"{of} most"][i, quality])
                symbols = np.arange(-most, most + 1)
                chance = (known[i, head, :, c, None] == symbols).sum(0) + 0.5
                seen = (whole[i, head, :, c, None] == symbols).sum(0)
                bits -= (seen * np.log2(chance / chance.sum())).sum()
        scales = 2 * 2 * 2 * 50
        assert bits / 8 <= len(data) - scales <= 1.01 * bits / 8 + 16


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["kvtc", "cachegen"])
def test_a_stream_gives_what_a_file_does_and_decodes_each_chunk_before_the_next_is_asked_for(kind, tmp_path):
    coder, log = fitted(kind), []
    kvjax.save_cache(tmp_path / "c", filled(), coder=coder)
    kvjax.save_cache(tmp_path / "plain", filled())
    assert os.path.getsize(tmp_path / "c") < 0.75 * os.path.getsize(tmp_path / "plain")

    def network():
        for i, message in enumerate(kvjax.send_cache(filled(), coder, tokens=256)):
            log.append(f"asked {i}")
            yield message

    got = kvjax.receive_cache(
        model("4/2"), network(), coder, arrived=lambda chunk: log.append((chunk.row, chunk.start))
    )
    # KVTC: 4 first tokens, the middle and 8 newest of each row.
    starts = {"kvtc": [(0, 0), (0, 4), (0, 42), (1, 0), (1, 4), (1, 23)], "cachegen": [(0, 0), (1, 0)]}[kind]
    want = ["asked 0", *(x for i, at in enumerate(starts, 1) for x in (f"asked {i}", at))]
    assert log == want
    file = kvjax.load_cache(tmp_path / "c", coder=coder)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(file), strict=True):
        np.testing.assert_array_equal(a, b)
    head, *rest = kvjax.send_cache(filled(), coder, tokens=7)
    turned_round = kvjax.receive_cache(model("4/2"), [head, *rest[::-1]], coder)
    assert kvjax.step(model("4/2"), turned_round, [1, 2])[0].shape == (2, 64)


def test_lower_qualities_are_smaller_and_a_choice_meets_its_time():
    coder = fitted("cachegen")
    each = [sum(map(len, kvjax.send_cache(filled(), coder, tokens=10, quality=q))) for q in range(3)]
    assert each[0] > each[1] > each[2]
    _, *rest = kvjax.send_cache(filled(), coder, tokens=10, quality=1)
    for size, want in ((1e6, {0}), (10, {2}), (sum(map(len, rest)), {0, 1, 2})):
        choose = kvjax.quality_in_time(size / 100, 100.0)
        _, *sent = kvjax.send_cache(filled(), coder, tokens=10, quality=choose)
        assert {message[5] for message in sent} <= want
        assert want == {2} or sum(len(message) - 22 for message in sent) <= size
    with pytest.raises(InputError, match="quality is 3"):
        list(kvjax.send_cache(filled(), coder, quality=3))
    with pytest.raises(InputError, match="tokens is 0"):
        list(kvjax.send_cache(filled(), coder, tokens=0))


def test_damaged_missing_and_foreign_chunks_are_refused(rng):
    coder, m = fitted("kvtc"), model("4/2")
    head, *rest = kvjax.send_cache(filled(), coder)
    for i, message in enumerate((head, *rest)):
        at = int(rng.integers(len(message)))
        flipped = message[:at] + bytes([message[at] ^ 4]) + message[at + 1 :]
        for wrong in (flipped, message[:-3], b""):
            sent = [head, *rest]
            sent[i] = wrong
            with pytest.raises(InputError, match=r"^(a chunk|the first message)[^\n]*(again|sent with)$"):
                kvjax.receive_cache(m, sent, coder)
    with pytest.raises(InputError, match="chunks with 8 of 81 tokens are missing, expected all.*ask for the"):
        kvjax.receive_cache(m, [head, *rest[:-1]], coder)
    with pytest.raises(InputError, match="was sent with the coder .*: give that one"):
        kvjax.receive_cache(m, [head, *rest], fitted("cachegen"))
    with pytest.raises(InputError, match="fitted to another model .*kvjax.fit_coder"):
        kvjax.receive_cache(model("6/3"), [head, *rest], coder)
    _, other = kvjax.prefill(model("6/3"), ROWS)
    with pytest.raises(InputError, match=r"fitted to \(layers, KV heads, channels\) \(2, 2, 16\), this"):
        list(kvjax.send_cache(other, coder))


@pytest.mark.rotating
def test_caches_that_hold_no_plain_numbers_and_wrong_coders_are_refused(tmp_path):
    m = model("4/2")
    for method, why in (("int4:group=16", "has codes"), ("snapkv(budget=0.5, window=4)", "were evicted")):
        _, cache = kvjax.prefill(m, ROWS, method=method)
        with pytest.raises(InputError, match=f"{why}.*prefill with method='full', or give coder='range'"):
            kvjax.save_cache(tmp_path / "c", cache, coder=fitted("kvtc"))
    assert not (tmp_path / "c").exists()
    kvjax.save_cache(tmp_path / "c", filled(), coder=fitted("kvtc"))
    for coder in (None, fitted("cachegen")):
        with pytest.raises(InputError, match="was saved with the coder .*give coder= as it was given"):
            kvjax.load_cache(tmp_path / "c", coder=coder)
    kvjax.save_cache(tmp_path / "plain", filled())
    with pytest.raises(InputError, match="was saved without a fitted coder"):
        kvjax.load_cache(tmp_path / "plain", coder=fitted("kvtc"))
    other = kvjax.fit(m, "commvq:channels=4,bits=3", TEXTS[:2])
    with pytest.raises(InputError, match="expected what kvjax.fit_coder gave"):
        kvjax.save_cache(tmp_path / "c", filled(), coder=other)
    for wrong, why in (
        (dict(kind="zip"), "expected 'kvtc' or 'cachegen'"), (dict(ratio=0.5), "ratio is 0.5"),
        (dict(newest=-1), "newest is -1"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=why):
            kvjax.fit_coder(m, TEXTS, **wrong)
    with pytest.raises(InputError, match="the texts have 3 tokens, expected at least 16"):
        kvjax.fit_coder(m, [[1, 2, 3]])


def test_a_damaged_coded_file_is_refused_in_one_sentence(rng, tmp_path):
    kvjax.save_cache(tmp_path / "c", filled(), coder=fitted("kvtc"))
    data, bad = (tmp_path / "c").read_bytes(), tmp_path / "bad"
    start = 8 + int.from_bytes(data[:8], "little")
    for at in (*rng.integers(start, len(data), 6), start, len(data) - 1):
        bad.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(InputError, match=r"^[^\n]*bad[^\n]*$"):
            kvjax.load_cache(bad, coder=fitted("kvtc"))
