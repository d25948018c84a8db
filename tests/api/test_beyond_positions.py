"""A text under StreamingLLM grows beyond the model's positions: what turns slots is their rank."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.base.rope import Rope

CONFIG = Config(vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=24)
LONGER = dataclasses.replace(CONFIG, max_positions=4096)
PARAMS = init(CONFIG, jax.random.key(0))
TEXT = np.random.default_rng(0).integers(0, 32, 80).tolist()


def model(config=CONFIG):
    return Model(config, PARAMS)


def conversation(m):
    """Logits of a prompt, of steps beyond position 24, of a turn in two pieces, and of a last step."""
    method = kvjax.method("streamingllm", budget=8, sinks=2)
    logits, cache = kvjax.prefill(m, [TEXT[:20]], method=method, room=16)
    found = [logits]
    for at in range(20, 36):
        logits, cache = kvjax.step(m, cache, [TEXT[at]])
        found.append(logits)
    logits, cache = kvjax.prefill(m, [TEXT[36:48]], cache=cache, chunk=6, room=6)
    found += [logits, kvjax.step(m, cache, [TEXT[48]])[0]]
    return np.array(found)


@pytest.mark.rotating
def test_a_conversation_equals_that_of_a_model_of_more_positions():
    np.testing.assert_array_equal(conversation(model()), conversation(model(LONGER)))


CLAMPED = kvjax.method("lm-infinite", budget=8, sinks=2, distance=16)
FINCH = kvjax.method("finch", budget=8, question=4)
CITRUS = kvjax.method("citrus", budget=12, question=4)  # a chunk of 8, and 4 others


@pytest.mark.rotating
@pytest.mark.parametrize("method", [CLAMPED, FINCH, CITRUS], ids=["distances", "ranks of a prompt", "chunks"])
def test_texts_beyond_the_positions_are_read_in_pieces_and_gone_on_with(method):
    found = []
    for m in (model(), model(LONGER)):
        logits, cache = kvjax.prefill(m, [TEXT[:48]], method=method, chunk=8, room=8)
        found.append([logits, kvjax.step(m, cache, [TEXT[48]])[0]])
    np.testing.assert_array_equal(*np.array(found))


@pytest.mark.rotating
def test_ranks_that_grow_with_what_is_written_end_at_the_last_position():
    m = model()
    with pytest.raises(InputError, match="17 new tokens would reach position 65, this model's last is 64"):
        kvjax.generate(m, [TEXT[:48]], method=FINCH, chunk=8, max_new_tokens=17, stop=[])
    out = kvjax.generate(m, [TEXT[:48]], method=FINCH, chunk=8, max_new_tokens=16, stop=[])
    with pytest.raises(InputError, match="after up to 24 slots reach beyond the model's last position, 24"):
        kvjax.prefill(m, [[1]], cache=out.cache, compress=False)


def prompt(method, *, config=CONFIG, tokens=40, **options):
    return kvjax.prefill(model(config), [TEXT[:tokens]], method=method, **options)


STREAM = kvjax.method("streamingllm", budget=8, sinks=2)
HALF = kvjax.method("streamingllm", budget=0.5, sinks=2)
DYNAMIC = dataclasses.replace(CONFIG, rope=Rope(kind="dynamic", original_max=24))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (STREAM, {}, r"40 tokens at once after up to 8 slots .* 24: read at most 16 at a time with chunk="),
        (STREAM, {"chunk": 17}, r"17 tokens at once .*: read at most 16 at a time with chunk="),
        (STREAM, {"chunk": 8, "compress": False}, r"40 tokens at once .* chunk="),
        (STREAM, {"chunk": 8, "config": DYNAMIC}, r"reaches position 40, this model's last is 24"),
        (HALF, {"chunk": 8, "tokens": 80}, r"reaches position 80, this model's last is 47"),
        (kvjax.method("h2o", budget=8), {"chunk": 8}, r"reaches position 40, this model's last is 24"),
    ],
)
def test_what_would_turn_beyond_the_positions_is_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        prompt(method, **options)


@pytest.mark.rotating
def test_chunks_that_a_dynamic_rotation_would_turn_otherwise_are_refused():
    config = dataclasses.replace(DYNAMIC, max_positions=64)
    # Up to original_max tokens the rotation is that of any length.
    whole, parts = (prompt(None, config=config, tokens=24, chunk=n)[0] for n in (None, 8))
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    for method in (None, STREAM):
        with pytest.raises(InputError, match=r"chunk= cannot read 40 tokens: beyond 24 tokens"):
            prompt(method, config=config, chunk=8)
    prompt(None, config=config, chunk=40)


def test_slots_beyond_the_budget_end_at_the_models_last_position():
    _, cache = prompt(STREAM, tokens=24, compress=False, room=4)
    with pytest.raises(InputError, match="stands at this model's last position, 24"):
        kvjax.step(model(), cache, [1])


@pytest.mark.rotating
def test_generate_writes_beyond_the_last_position():
    out = kvjax.generate(model(), [TEXT[:20]], method=STREAM, max_new_tokens=140, stop=[])
    assert out.tokens.shape == (1, 140) and out.cache.next.tolist() == [160]
    with pytest.raises(InputError, match="140 new tokens would reach position 140, this model's last is 24"):
        kvjax.generate(model(), [TEXT[:20]], max_new_tokens=140)
