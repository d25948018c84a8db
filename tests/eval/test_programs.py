"""Compiled programs are dropped before there are too many, and only then."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvjax.eval.run import programs

here = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system lists no mapped regions")


@here
@pytest.mark.parametrize(("share", "left"), [(0.0, 0), pytest.param(1.0, 1, marks=pytest.mark.rotating)])
def test_programs_are_dropped_beyond_the_share_of_regions(share, left, monkeypatch):
    monkeypatch.setattr(programs, "_MOST", share)
    call = jax.jit(lambda x: x + 1)
    call(jnp.ones(3))
    assert programs.forget_if_crowded() == (left == 0)
    assert call._cache_size() == left
    assert call(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_system_that_does_not_say_what_is_mapped_keeps_its_programs(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "_MAPS", tmp_path / "none")
    assert not programs.forget_if_crowded()
