"""What cannot fit in memory is refused by its shape, before any of it is taken, and nothing else is."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import kvjax
import kvjax.api.memory
from kvjax.api.block_transformer import BlockConfig, BlockTransformer, init
from kvjax.api.memory import least_bytes
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.models.config import Config
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


@pytest.mark.parametrize("method", ["offloaded", "quest(budget=0.25, resident=0.1)"])
def test_what_host_memory_cannot_hold_is_refused_with_the_bytes(method, model, monkeypatch):
    c, newest = model.config, 16 if "quest" in method else 0
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: 10**15)
    monkeypatch.setattr(kvjax.api.memory, "offers_host", lambda: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**27))
    needed = 3 * (2**16 + 100 - newest) * 2 * c.layers * c.kv_heads * c.head_dim * 4 / 2**30
    said = f"slots each need at least {needed:.1f} GiB of host memory, and 0.1 GiB are free: read fewer"
    with pytest.raises(InputError, match=said):
        kvjax.prefill(model, np.zeros((3, 2**16), np.int32), method=method, room=100)


@pytest.mark.parametrize(
    ("method", "slot"),
    [
        # A quarter of the tokens, and the room.
        ("snapkv(budget=0.25) + offloaded", lambda h: (2**14 + 100) / 2**16 * 2 * h * 4),
        # 4 bits, of keys with two float16 per channel and 32 tokens, of values with two per 32 channels.
        pytest.param(
            "kivi(bits=4, residual=32) + offloaded", lambda h: 2 * (h / 2 + 4 * h / 32),
            marks=pytest.mark.rotating,
        ),
    ],
)  # fmt: skip
def test_what_is_kept_or_encoded_counts_as_it_lies_in_host_memory(method, slot, model, monkeypatch):
    c, rows = model.config, 20_000
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: 10**18)
    tokens = np.broadcast_to(np.int32(3), (rows, 2**16))
    needed = rows * 2**16 * c.layers * c.kv_heads * slot(c.head_dim)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(needed / 1.1)))
    with pytest.raises(InputError, match="of host memory") as raised:
        kvjax.prefill(model, tokens, method=method, room=100)
    said = float(str(raised.value).partition("need at least ")[2].partition(" GiB")[0])
    np.testing.assert_allclose(said, needed / 2**30, rtol=0.01)


@pytest.fixture(scope="module")
def in_blocks():
    sizes = dict(layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    blocks, tokens = Config(vocab=32, d_model=16, **sizes), Config(vocab=20, d_model=16, **sizes)
    config = BlockConfig(blocks, tokens, length=4)
    return BlockTransformer(config, init(config, jax.random.key(0)))


@pytest.mark.parametrize("verb", [kvjax.prefill, kvjax.generate, BlockTransformer.prefill])
def test_blocks_that_cannot_fit_are_refused_before_memory_is_taken(verb, in_blocks):
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(InputError, match=r"rows of 512 tokens need .* read fewer rows at a time, or shorter"):
        verb(in_blocks, HUGE)
    assert time.monotonic() - began < 1
    assert psutil.Process().memory_info().rss - before < 10**8


@pytest.mark.rotating
def test_no_more_is_counted_of_blocks_than_they_take(in_blocks, monkeypatch):
    prompt = [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    needed = least_bytes(in_blocks, Method(), 9, 6, None)
    # Two blocks and one more of room: inputs and outputs of 16, keys and values of 8 in both layers.
    assert needed == 2 * 2 * 16 * 4 + 2 * (2 + 1) * 2 * 8 * 4
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: needed)
    _, cache = in_blocks.prefill(prompt, room=6)
    assert needed - 2 * 2 * 16 * 4 <= nbytes(cache)
    monkeypatch.setattr(kvjax.api.memory, "free_bytes", lambda: needed - 1)
    with pytest.raises(InputError, match="1 rows of 9 tokens need at least"):
        in_blocks.prefill(prompt, room=6)


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


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(sorted(architectures.TABLE), "mla", "mlkv"))
def test_no_more_is_counted_than_a_cache_takes(name):
    config = architectures.TABLE[name].config
    model = Model(config, parameters(config))
    _, cache = kvjax.prefill(model, [[1, 2, 3]], room=5)
    read = 2 * 3 * config.d_model * 4
    assert 0 <= least_bytes(model, Method(), 3, 5, None) - read <= nbytes(cache)
