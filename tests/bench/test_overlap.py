"""The bench of hidden copies: shares of intervals by hand, and every read runs where there is no GPU."""

import numpy as np
import pytest

from scripts.bench.decode import TINY
from scripts.bench.overlap import READS, Event, hidden_share, measured, random_model, shown


def test_a_copy_is_hidden_as_long_as_a_kernel_runs():
    rng = np.random.default_rng(0)
    starts, lasts = rng.integers(0, 200, 30), rng.integers(1, 20, 30)
    names = rng.choice(["MemcpyH2D", "gemm", "MemcpyD2H"], 30)
    copied, busy = np.zeros(300, bool), np.zeros(300, bool)
    for name, start, last in zip(names, starts, lasts, strict=True):
        copied[start : start + last] |= name == "MemcpyH2D"
        busy[start : start + last] |= name == "gemm"
    found = [Event(n, s, s + t) for n, s, t in zip(names, starts, lasts, strict=True)]
    total, share = hidden_share(found)
    assert total == copied.sum() and share == pytest.approx((copied & busy).sum() / copied.sum())
    assert hidden_share([Event("gemm", 0, 4)]) == (0.0, None)


@pytest.mark.rotating
@pytest.mark.parametrize("name", READS)
def test_every_read_steps_on_the_device_and_in_host_memory(name):
    row = measured(random_model(TINY), name, 128, steps=2, rounds=1)
    assert row["device"] > 0 and row["host"] > 0
    assert shown(row)[3] == "nothing was copied" and row["copies"] == 0.0
