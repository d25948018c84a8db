"""What cannot fit in memory is refused by its shape, before any of it is taken, and nothing else is."""

import time

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import kvjax
import kvjax.api.memory
from kvjax.api.memory import least_bytes
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.models.model import Model
from kvjax.state.cache import nbytes
from tests.models import architectures
from tests.models.conversation import parameters
from tests.sweep import sweep

# A view: the ids themselves take four bytes.
HUGE = np.broadcast_to(np.int32(3), (10**9, 512))


@pytest.fixture(scope="module")
def model():
    return kvjax.load("recall-tiny")


@pytest.mark.parametrize("verb", [kvjax.prefill, kvjax.generate])
@pytest.mark.parametrize("method", [None, "snapkv(budget=0.25)"])
def test_a_batch_that_cannot_fit_is_refused_before_memory_is_taken(verb, method, model):
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(InputError, match=r"rows of 512 tokens need at least .* GiB are free: read"):
        verb(model, HUGE, method=method)
    assert time.monotonic() - began < 1
    assert psutil.Process().memory_info().rss - before < 10**8


def test_rows_in_a_list_are_counted(model, monkeypatch):
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: 10**6)
    with pytest.raises(InputError, match="2 rows of 1200 tokens need at least"):
        kvjax.prefill(model, [[3] * 1200, [3]])


def test_a_prompt_that_fits_is_read(model, monkeypatch):
    needed = 2 * least_bytes(model, Method(), 4, 4, None)
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: needed)
    assert jnp.isfinite(kvjax.prefill(model, [[1, 2, 3, 4], [5]], room=4)[0]).all()
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(InputError, match="read fewer rows at a time"):
        kvjax.prefill(model, [[1, 2, 3, 4], [5]], room=4)


@pytest.mark.parametrize("name", sweep(sorted(architectures.TABLE), "mla", "mlkv"))
def test_no_more_is_counted_than_a_cache_takes(name):
    config = architectures.TABLE[name].config
    model = Model(config, parameters(config))
    _, cache = kvjax.prefill(model, [[1, 2, 3]], room=5)
    read = 2 * 3 * config.d_model * 4
    assert 0 <= least_bytes(model, Method(), 3, 5, None) - read <= nbytes(cache)
