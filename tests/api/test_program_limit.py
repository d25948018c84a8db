"""Compiled programs are dropped before there are too many, and only then."""

import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax.api import program_limit

here = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system lists no mapped regions")


@here
@pytest.mark.parametrize(("share", "left"), [(0.0, 0), pytest.param(1.0, 1, marks=pytest.mark.rotating)])
def test_programs_are_dropped_beyond_the_share_of_regions(share, left, monkeypatch):
    monkeypatch.setattr(program_limit, "_MOST", share)
    call = jax.jit(lambda x: x + 1)
    call(jnp.ones(3))
    assert program_limit.forget_if_crowded() == (left == 0)
    assert call._cache_size() == left
    assert call(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_system_that_does_not_say_what_is_mapped_keeps_its_programs(monkeypatch, tmp_path):
    monkeypatch.setattr(program_limit, "_MAPS", tmp_path / "none")
    assert not program_limit.forget_if_crowded()


@pytest.mark.rotating
@here
@pytest.mark.parametrize(("compiled", "left"), [(program_limit._EVERY, 0), (0, 1)])
def test_prefill_counts_regions_after_enough_compilations(compiled, left, monkeypatch):
    monkeypatch.setattr(program_limit, "_MOST", 0.0)
    monkeypatch.setattr(program_limit, "_compiled", compiled)
    model = kvjax.load("recall-tiny")
    other = jax.jit(lambda x: x + 1)
    expected = other(jnp.ones(3))
    logits, cache = kvjax.prefill(model, [[1, 2, 3]], method=kvjax.method("tova", budget=0.5), room=2)
    assert other._cache_size() == left
    assert other(jnp.ones(3)).tolist() == expected.tolist()
    stepped, _ = kvjax.step(model, cache, [4])
    assert bool(jnp.isfinite(logits).all() and jnp.isfinite(stepped).all())


def test_every_compilation_is_counted(monkeypatch):
    monkeypatch.setattr(program_limit, "_compiled", 0)
    # Smaller programs run in numpy here.
    jax.jit(lambda x: (jnp.sin(x) @ x) * 3)(jnp.arange(5.0))
    assert program_limit._compiled >= 1


@here
@pytest.mark.rotating
def test_regions_stay_bounded_over_methods_and_lengths(monkeypatch):
    """Programs that are dropped give their regions back: without it, this process would map ever more."""
    jax.clear_caches()  # What earlier tests compiled would be dropped first.
    gc.collect()
    before = mapped()
    monkeypatch.setattr(program_limit, "_EVERY", 1)
    monkeypatch.setattr(program_limit, "_MOST", (before + 50) / int(program_limit._LIMIT.read_text()))
    model, found, dropped = kvjax.load("recall-tiny"), [], []
    forget = program_limit.forget_if_crowded
    monkeypatch.setattr(program_limit, "forget_if_crowded", lambda: dropped.append(forget()) or dropped[-1])
    for method in ("h2o(budget=0.5)", "int8", "quest(budget=0.5, page=4)", "kivi(group=4, residual=4)"):
        for length in (16, 40, 80):
            kvjax.prefill(model, [[3] * length], method=method)
            found.append(mapped())
    assert sum(dropped) >= 3
    # What one method compiles comes on top; later ones begin where the first did.
    assert max(found[6:]) <= max(found[:6]) + 200


def mapped():
    return program_limit._MAPS.read_bytes().count(b"\n")
