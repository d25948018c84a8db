"""Codes of alike channels in groups of unequal sizes, against the authors' rule in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.fitting.loops.keys_values import read_keys_values
from kvjax.fitting.statistics.channel_groups import clustered
from kvjax.grammar.fitted import Fitted, as_fitted, save_fitted
from kvjax.state.codes import bind
from kvjax.store.clustered import Clustered
from tests.float64.codes import grouped
from tests.methods.battery import MAIN, model

TEXTS = [list(range(1, 40)), list(range(40, 10, -1))]
# Two layers of two heads: a group of one channel, groups of all sizes, equal ones, and of two channels.
SIZES = [[[1, 9, 4, 2], [5, 6, 3, 2]], [[4, 4, 4, 4], [2, 2, 2, 10]]]


def drawn(rng):
    label = [[rng.permutation(np.repeat(np.arange(4), sizes)) for sizes in layer] for layer in SIZES]
    return Fitted({"key group": np.array(label, np.int32)}, "Clustered", "")


def bound(word):
    return bind(word, {word.fitted.digest: {n: jnp.asarray(x) for n, x in word.fitted.arrays.items()}})


def there_and_back(word, x):
    codec = bound(word)
    data = jax.jit(codec.encode)(x.astype(np.float32))
    return data, np.asarray(jax.jit(lambda data: codec.decode(data, 16, jnp.float32))(data))


@pytest.mark.parametrize("bits, clip", [(2, 0.95), (3, 1.0), (8, 1.0)])
def test_rows_become_codes_of_the_range_of_their_heads_groups(rng, bits, clip):
    fitted = drawn(rng)
    x = rng.normal(size=(2, 3, 2, 5, 16)) * np.exp(rng.normal(size=16))
    x[..., 0, :4], x[0, 0, 0, 1] = 0.0, 2.5  # a token of zeros in some channels, and one of equal numbers
    data, got = there_and_back(Clustered(bits, "key", 4, clip, fitted), x)
    x = x.astype(np.float32).astype(float)
    for i, k in np.ndindex(2, 2):
        want = grouped(bits, fitted.arrays["key group"][i, k], clip)(x[i, :, k])
        # In float32, a number between two codes may become the other one.
        assert np.mean(np.abs(got[i, :, k] - want) > 1e-5) < 2e-3
    assert data["scale"].shape == data["zero"].shape == (2, 3, 2, 5, 4)
    stored = 8 * sum(array.nbytes for array in data.values()) / x.size
    assert stored == {2: 2, 3: 4, 8: 8}[bits] + 16 / 4


def test_a_channel_alone_and_equal_numbers_come_back_as_float8_has_them(rng):
    fitted, x = drawn(rng), np.full((2, 1, 2, 3, 16), -1.75)
    _, got = there_and_back(Clustered(2, "key", 4, 1.0, fitted), x)
    np.testing.assert_array_equal(got, x)
    single = np.broadcast_to(fitted.arrays["key group"][0, 0] == 0, x.shape).copy()
    single[1], single[:, :, 1] = False, False
    _, got = there_and_back(
        Clustered(2, "key", 4, 1.0, fitted), np.where(single, 4.5, rng.normal(size=x.shape))
    )
    np.testing.assert_array_equal(got[single], 4.5)


def test_numbers_beyond_float8_become_its_largest_and_no_nan(rng):
    _, got = there_and_back(Clustered(2, "key", 4, 1.0, drawn(rng)), np.full((2, 1, 2, 3, 16), 1e4))
    np.testing.assert_array_equal(got, 448.0)


@pytest.mark.parametrize("count", [2, 3])
def test_no_other_groups_of_points_are_nearer_to_their_means(rng, count):
    points = np.sort(rng.normal(size=(9, 2)) * np.exp(rng.normal(size=(9, 1))), -1)
    # All ways to divide 9 points among the groups: sum |x|^2 - sum_g |sum of g|^2 / size of g.
    mine = np.eye(count)[np.stack(np.unravel_index(np.arange(count**9), (count,) * 9), -1)]
    sizes, sums = mine.sum(1), np.einsum("wpg,pd->wgd", mine, points)
    error = np.square(points).sum() - (np.square(sums).sum(-1) / np.maximum(sizes, 1)).sum(-1)
    label = clustered(points, count)
    means = np.stack([points[label == g].mean(0) for g in range(count)])
    np.testing.assert_allclose(np.square(points - means[label]).sum(), error.min(), rtol=1e-9)


@pytest.mark.parametrize("count", [4, 8])
def test_a_point_is_in_the_group_of_the_nearest_mean(rng, count):
    points = np.sort(rng.normal(size=(64, 2)) * np.exp(rng.normal(size=(64, 1))), -1)
    label = clustered(points, count)
    means = np.stack([points[label == g].mean(0) for g in range(count)])
    np.testing.assert_array_equal(((points[:, None] - means) ** 2).sum(-1).argmin(-1), label)


def test_equal_channels_leave_no_group_empty():
    assert sorted(set(clustered(np.zeros((6, 2)), 3))) == [0, 1, 2]
    assert sorted(set(clustered(np.repeat([[0.0, 1.0], [2.0, 3.0]], 3, 0), 3))) == [0, 1, 2]
    # As many channels as groups: each is one of its own.
    assert sorted(clustered(np.arange(8.0).reshape(4, 2), 4)) == [0, 1, 2, 3]


def test_a_fit_groups_channels_by_their_ranges_before_rope():
    m = model("4/2")
    fitted = kvjax.fit(m, "skvq:group=4", TEXTS)
    read = read_keys_values(m, [TEXTS], raw=True)
    for of, x in (("key", read.k), ("value", read.v)):
        points = np.stack([x.min(2), x.max(2)], -1).astype(float)
        for at in np.ndindex(2, 2):
            label = fitted.arrays[f"{of} group"][at]
            means = np.stack([points[at][label == g].mean(0) for g in range(4)])
            nearest = ((points[at][:, None] - means) ** 2).sum(-1).argmin(-1)
            np.testing.assert_array_equal(nearest, label)
    method = kvjax.method("skvq", group=4, residual=0, sinks=0, fitted=fitted)
    _, cache = kvjax.prefill(m, MAIN.first, method=method)
    data = cache.groups[0].tail.k.data
    assert (data["words"].shape[-1], data["zero"].shape[-1], data["zero"].dtype) == (1, 4, "float8_e4m3fn")


def test_groups_of_another_size_more_than_channels_and_older_files_are_refused(tmp_path, rng):
    m = model("4/2")
    fitted = kvjax.fit(m, "skvq:group=4", TEXTS)
    prompt = lambda given, group: kvjax.prefill(  # noqa: E731
        m, MAIN.first, method=kvjax.method("skvq", group=group, fitted=given)
    )
    with pytest.raises(
        InputError, match="fitted with 4 groups of a head, and group=8 asks for 2: run `kvjax"
    ):
        prompt(fitted, 8)
    with pytest.raises(InputError, match="group=32 must divide the 16 channels of a head"):
        kvjax.fit(m, "skvq", TEXTS)
    for change in (0, 9):
        arrays = {n: np.where(x == 3, change, x).astype(np.int32) for n, x in fitted.arrays.items()}
        with pytest.raises(InputError, match="groups of a head, and group=4 asks for 4"):
            prompt(Fitted(arrays, "Clustered", fitted.model), 4)
    permuted = np.broadcast_to(np.eye(16, dtype=np.float32), (2, 2, 16, 16))
    older = Fitted(
        {f"{of} {n}": permuted for of in ("key", "value") for n in ("matrix", "inverse")}, "InBasis", ""
    )
    save_fitted(tmp_path / "skvq.safetensors", older)
    with pytest.raises(InputError, match="Clustered"):
        prompt(as_fitted(str(tmp_path / "skvq.safetensors")), 4)
    with pytest.raises(ValueError, match="bits are 1 to 8, got 9"):
        Clustered(9, "key")
    with pytest.raises(ValueError, match="groups are of a 'key' or a 'value', got 'keys'"):
        Clustered(2, "keys")
    with pytest.raises(ValueError, match="at least 1, on average, got 0"):
        Clustered(2, "key", 0)
    with pytest.raises(ValueError, match="in \\(0, 1\\], got 1.5"):
        Clustered(2, "key", 4, 1.5)
