"""The study of bits: schemes against other numpy, what a row measures, and the page shows its data."""

import numpy as np
import pytest

import kvjax
from kvjax.eval.tasks.recall import WORDS
from scripts.studies import bit_schemes, bits, codes
from scripts.studies.bits_picture import lines, picture
from scripts.studies.runner import Data


@pytest.fixture
def texts():
    """Numbers [2, 3, S, 8] of two layers and three heads that a few directions of all layers explain."""
    draw = np.random.default_rng(0)
    mix = draw.normal(size=(6, 48))
    give = lambda n: (draw.normal(size=(n, 6)) @ mix + 0.05 * draw.normal(size=(n, 48))).reshape(n, 2, 3, 8)  # noqa: E731
    return [np.moveaxis(give(n), 0, 2) for n in (400, 96)]


def nearest_of(rows, bits):
    """Find the nearest of 2^bits even steps from the least to the largest number of each row, and a step."""
    low, step = rows.min(-1, keepdims=True), np.ptp(rows, axis=-1, keepdims=True) / (2**bits - 1)
    grid = low[..., None] + step[..., None] * np.arange(2**bits)
    return np.take_along_axis(grid, np.abs(rows[..., None] - grid).argmin(-1)[..., None], -1)[..., 0], step


def check_nearest(got, rows, bits):
    """In steps; ranges are in float16, so a number in the middle of two codes may be the other one's."""
    want, step = nearest_of(rows, bits)
    off = np.abs(got - want) / step
    assert (off > 0.02 * 2**bits).mean() < 2e-3 and (np.abs(got - rows) / step).max() < 0.51 + 2e-3 * 2**bits


def test_ranges_of_tokens_are_of_the_nearest_steps(texts):
    fit, x = texts
    back = bit_schemes.ranges(4, "token")(x, fit)
    check_nearest(back.x, x, 4)
    assert back.bits == 4 + 32 / 8 and back.coded < back.bits
    sinks = bit_schemes.ranges(1, "token", 4)(x, fit)
    np.testing.assert_array_equal(sinks.x[:, :, :4], x[:, :, :4])
    assert sinks.bits == pytest.approx((92 * (1 + 32 / 8) + 4 * 16) / 96)


def test_ranges_of_channels_have_64_tokens_each(texts):
    fit, x = texts
    got = bit_schemes.ranges(2, "channel")(x, fit).x
    for part in (slice(0, 64), slice(64, 96)):
        check_nearest(np.swapaxes(got[:, :, part], -1, -2), np.swapaxes(x[:, :, part], -1, -2), 2)


def test_components_of_all_layers_cost_least_where_layers_are_alike(texts):
    fit, x = texts
    errors = []
    for over in ("head", "layer", "all layers"):
        back = bit_schemes.principal(1.0, bit_schemes.Rows(over))(x, fit)
        assert back.bits == 1.0
        errors.append(np.square(back.x - x).sum() / np.square(x).sum())
        kept = bit_schemes.principal(1.0, bit_schemes.Rows(over, 2))(x, fit)
        np.testing.assert_array_equal(kept.x[:, :, :2], x[:, :, :2])
        assert kept.bits == pytest.approx((94 + 2 * 16) / 96)
    assert errors[2] < errors[1] < errors[0]
    whole = bit_schemes.principal(8.0, bit_schemes.Rows("layer"))(x, fit)
    assert np.square(whole.x - x).sum() / np.square(x).sum() < 3e-4


def test_bits_go_where_they_reduce_the_error_most():
    variances = np.array([9.0, 1.0, 0.3, 0.01])
    errors = np.array(bit_schemes.ERRORS)
    for total in (0, 1, 3, 6, 9):
        got = bit_schemes.allotted(variances, total)
        each = np.stack(np.meshgrid(*[range(9)] * 4, indexing="ij"), -1).reshape(-1, 4)
        each = each[each.sum(1) == total]
        assert (variances * errors[got]).sum() == pytest.approx((variances * errors[each]).sum(1).min())
        assert got.sum() == total


def test_steps_of_normal_numbers_lose_what_the_table_says():
    z = np.random.default_rng(1).normal(size=(200_000, 1))
    for n in range(9):
        back, _ = bit_schemes.gaussian(z, np.ones(1), np.array([n]))
        assert np.square(back - z).mean() == pytest.approx(bit_schemes.ERRORS[n], rel=0.05), n


def test_few_tokens_have_the_same_components_as_by_a_singular_value_decomposition():
    rows = np.random.default_rng(2).normal(size=(10, 30))
    rows -= rows.mean(0)
    vectors, sizes = bit_schemes.components(rows)
    _, s, v = np.linalg.svd(rows, full_matrices=False)
    np.testing.assert_allclose(sizes, s[:9] ** 2 / 10)
    np.testing.assert_allclose(np.abs((vectors * v[:9].T).sum(0)), 1)


def test_the_entropy_is_that_of_each_lines_frequencies():
    assert bit_schemes.entropy(np.array([[0, 0, 1, 1], [-3, -3, -3, -3]])) == 0.5
    assert bit_schemes.entropy(np.array([[5, 6, 7, 8]])) == 2.0


@pytest.mark.rotating
def test_a_row_measures_what_its_codes_change(tmp_path, monkeypatch):
    words = np.random.default_rng(0).choice(WORDS[4:], 400)
    (tmp_path / "words.txt").write_text(" ".join(words))
    monkeypatch.setattr(codes, "TEXT", tmp_path / "words.txt")
    monkeypatch.setattr(bits, "DATA", Data(tmp_path / "bits.json", {"about": {}, "rows": {}}))
    for name, value in (("START", 0), ("LENGTH", 32), ("AFTER", 8), ("WINDOWS", 2), ("FITTED", 2)):
        monkeypatch.setattr(bits, name, value)
    kept = ("keys, per token, 8", "unrotated keys, rows of layer, 4", "values, per channel, 1")
    few = {name: bits.schemes()[name] for name in kept}
    monkeypatch.setattr(bits, "schemes", lambda: few)
    model = kvjax.load("recall-tiny")
    bits.run(model)
    rows = bits.DATA.read()["rows"]
    assert [*rows] == [*kept] and all(len(row["kl"]) == 2 for row in rows.values())
    assert max(rows[kept[0]]["kl"]) < 1e-3 < min(rows[kept[2]]["kl"])
    # Keys turned back and turned again are the keys.
    window = bits.read(model, 0)
    back = bits.turned(model, window.parts["unrotated keys"])
    np.testing.assert_allclose(back, window.parts["keys"], atol=1e-5)
    same = bits.measured(
        model, window, "unrotated keys", lambda x, fit: bit_schemes.Back(x, 16, 16), window.parts["keys"]
    )
    assert same["kl"] < 1e-6 and same["error"] == 0
    before = rows
    bits.run(model)
    assert bits.DATA.read()["rows"] == before


def test_the_page_shows_the_data():
    assert bits.PAGE.agrees()


def test_the_picture_has_a_line_for_each_scheme():
    row = {"bits": 2.5, "kl": 0.1}
    rows = {"keys, per token, 2": row, "keys, per token, 4": row, "keys, rotated by seed 1, 2": row}
    rows |= {"unrotated keys, rows of head, 2": row, "values, per token, 2": row}
    assert [*lines(rows, ("keys", "unrotated keys"))] == ["per token", "rows of head (before RoPE)"]
    assert picture(rows).startswith(b"\x89PNG")


def test_rows_are_compared_on_the_windows_that_all_of_them_have():
    rows = {"a": {"kl": [1.0, 3.0], "bits": [4.0, 4.0]}, "b": {"kl": [2.0], "bits": [3.0]}}
    assert bits.shared(rows) == {"a": {"kl": 1.0, "bits": 4.0}, "b": {"kl": 2.0, "bits": 3.0}}
    rows["b"]["kl"].append(4.0)
    assert bits.shared(rows)["a"]["kl"] == 2.0 and bits.shared({}) == {}
