"""Prompts whose tokens lie on several devices: the answers, the memory, what is sent, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.errors import InputError
from kvjax.layout import mesh_for
from kvjax.mesh.rules import Rules
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.plan.collectives import collectives
from kvjax.pure import bind
from kvjax.steps import Run
from tests.compilation import optimised
from tests.methods.battery import MAIN, T, model, off, positions
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same
from tests.models import conversation
from tests.models.architectures import TABLE
from tests.sweep import sweep
from tests.test_split_slots import APART

# Slots of a context are read before any token, by a verb of its own.
ARCHITECTURES = [name for name in TABLE if name not in ("cepe", "xc-cache")]


@pytest.mark.parametrize("label", sweep(APART, "snapkv"))
def test_chunks_and_written_text_are_those_of_one_device(label):
    row = BY_LABEL[label]
    here, there = model(row.model), kvjax.spread(model(row.model), "data=2,seq=4", "sequence")
    prompt = [a + b for a, b in zip(MAIN.first, MAIN.second, strict=True)]
    options = dict(method=row.method(), chunk=T, max_new_tokens=4)
    want, got = kvjax.generate(here, prompt, **options), kvjax.generate(there, prompt, **options)
    assert off(got.logprobs, want.logprobs) < same(label)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert positions(got.cache) == positions(want.cache)


@pytest.mark.parametrize("name", sweep(ARCHITECTURES, "kimi linear"))
def test_every_architecture_reads_prompts_and_chunks_as_on_one_device(name):
    m, batch = conversation.model(name), conversation.BATCHES["main"]
    there = kvjax.spread(m, "seq=4", "sequence")
    texts, read = conversation.TEXTS[list(batch.texts)], np.array(batch.lengths)
    for chunk in (None, 8):
        given = dict(lengths=read, room=conversation.ROOM, chunk=chunk)
        want, held = kvjax.prefill(m, texts[:, : max(read)], **given)
        got, there_held = kvjax.prefill(there, texts[:, : max(read)], **given)
        conversation.close(got, np.asarray(want))
        assert positions(there_held) == positions(held)
