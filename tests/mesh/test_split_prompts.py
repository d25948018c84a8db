"""Prompts whose tokens lie on several devices: the answers, the memory, what is sent, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import mesh_for
from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import Rules
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.ops.attention import ways
from kvjax.plan.collectives import collectives
from kvjax.plan.prompts import traffic
from kvjax.pure import bind
from kvjax.steps import Run
from tests.compilation import optimised
from tests.mesh.test_split_slots import APART
from tests.methods.battery import MAIN, T, model, off, positions
from tests.methods.table import BY_LABEL
from tests.methods.test_battery import same
from tests.models import conversation
from tests.models.architectures import TABLE
from tests.sweep import sweep

# Slots of a context are read before any token, by a verb of its own.
ARCHITECTURES = [name for name in TABLE if name not in ("cepe", "xc-cache")]


@pytest.mark.parametrize("label", sweep(APART))
def test_chunks_and_written_text_are_those_of_one_device(label):
    row = BY_LABEL[label]
    here, there = model(row.model), kvjax.spread(model(row.model), "data=2,seq=4", "sequence")
    prompt = [a + b for a, b in zip(MAIN.first, MAIN.second, strict=True)]
    options = dict(method=row.method(), chunk=T, max_new_tokens=4)
    want, got = kvjax.generate(here, prompt, **options), kvjax.generate(there, prompt, **options)
    assert off(got.logprobs, want.logprobs) < same(label)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert positions(got.cache) == positions(want.cache)


@pytest.mark.parametrize("name", sweep(ARCHITECTURES))
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


# One method of every kind of observation whose lists can lie apart.
OBSERVING = (
    "tova", "vatp", "a2sf", "roco", "scope", "expected-attention", "compactor", "q-filters", "compresskv",
    "sepllm", "keyformer", "shotkv", "locret",
)  # fmt: skip


@pytest.mark.parametrize("label", sweep(OBSERVING))
def test_what_methods_observe_of_a_prompt_has_them_keep_the_same(label):
    row = BY_LABEL[label]
    models = model(row.model), kvjax.spread(model(row.model), "data=2,seq=4", "sequence")
    caches = [None, None]
    for tokens in (MAIN.first, MAIN.second):
        given = [dict(method=row.method()) if cache is None else dict(cache=cache) for cache in caches]
        done = [kvjax.prefill(m, tokens, room=T, **g) for m, g in zip(models, given, strict=True)]
        assert off(done[1][0], done[0][0]) < same(label)
        caches = [cache for _, cache in done]
        assert positions(caches[1]) == positions(caches[0])


# --- structure -----------------------------------------------------------------------------------------

LONG, WIDTH, LAYERS, LISTS, HEAD = 2048, 512, 2, 2, 32


def wide():
    """Make a model whose keys and values are much narrower than its hidden states."""
    config = Config(
        vocab=64, d_model=WIDTH, layers=LAYERS, heads=4, kv_heads=LISTS, head_dim=HEAD, d_ff=512,
        max_positions=2 * LONG,
    )  # fmt: skip
    return Model(config, init(config, jax.random.key(0)))


def program(m, devices, label, past=0):
    """Compile a prefill of LONG tokens for devices that share them."""
    method = kvjax.method(label, budget=0.25) if label != "full" else kvjax.method("full")
    m = kvjax.spread(m, f"seq={devices}", "sequence")
    run = Run(m.config, bind(method, m), None, mesh_for(method, m.on_mesh))
    cache = None
    if past:
        given = m.params, jnp.zeros((1, past), jnp.int32), jnp.full(1, past, jnp.int32), None
        cache = jax.eval_shape(
            lambda *x: steps.prefill(run, *x, tokens_bound=past, room=LONG, compress=True)[1], *given
        )

    def read(params, tokens, lengths, cache):
        sizes = dict(tokens_bound=past + LONG, room=0, compress=True)
        return steps.prefill(run, params, tokens, lengths, cache, **sizes)

    shapes = jax.ShapeDtypeStruct((1, LONG), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with optimised(True):
        return jax.jit(read).lower(m.params, *shapes, cache).compile()


def largest(hlo):
    """Find the most numbers that any array of a program has, on one device."""
    shapes = re.findall(r"\b(?:f32|bf16|s32|pred|u32)\[([\d,]+)\]", hlo)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)


# Keys and values of all tokens, in all layers.
EACH = LAYERS * LONG * 2 * LISTS * HEAD * 4
# Queries, outputs and what merges these, of all tokens in all layers.
ASKED = LAYERS * LONG * 4 * (2 * HEAD + 1) * 4


def sent(program):
    return {one.kind: one for one in collectives(program.as_text())}


@pytest.mark.rotating
def test_a_ring_sends_what_the_others_hold_and_no_device_has_a_prompt_whole():
    """Besides keys, values and their positions there is a row's last hidden state."""
    ring = program(wide(), 8, "full")
    found = sent(ring)
    assert found["collective-permute"].count >= LAYERS * 7 * 2
    assert EACH * 7 / 8 <= found.pop("collective-permute").bytes < 1.03 * EACH * 7 / 8
    assert sum(one.bytes for one in found.values()) < 0.01 * EACH
    # No activation of all tokens, no map of them, and no list of their keys.
    assert largest(ring.as_text()) < LONG * WIDTH // 2


@pytest.mark.rotating
def test_a_gather_sends_as_much():
    found = sent(program(wide(), 2, "full"))
    assert EACH <= found.pop("all-gather").bytes < 1.03 * EACH
    assert sum(one.bytes for one in found.values()) < 0.01 * EACH


@pytest.fixture
def helping(monkeypatch):
    """Devices help each other in short prompts, too; what was traced before and after is traced anew."""
    monkeypatch.setattr(ways, "HELP_FROM", 1)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.rotating
@pytest.mark.usefixtures("helping")
def test_answers_are_those_of_one_device_where_devices_help_each_other():
    m, method = model("4/2"), kvjax.method("h2o", budget=0.5)
    there = kvjax.spread(m, "seq=8", "sequence")
    (want, held), (got, there_held) = (
        kvjax.prefill(x, MAIN.first, method=method, room=8) for x in (m, there)
    )
    assert off(got, want) < 1e-5 and positions(there_held) == positions(held)


@pytest.mark.rotating
@pytest.mark.usefixtures("helping")
def test_devices_that_help_each_other_send_half_of_keys_queries_and_outputs():
    moved = sent(program(wide(), 8, "full"))["collective-permute"].bytes
    assert (EACH + ASKED) / 2 <= moved < 1.03 * (EACH + ASKED) / 2
    [said] = traffic(wide().config, OnMesh(as_mesh("seq=8"), Rules(tokens="seq", slots="seq")), 1, LONG)
    assert said.nbytes * LAYERS == pytest.approx(moved, rel=0.05)


@pytest.mark.rotating
@pytest.mark.parametrize("label", ("full", "h2o", "snapkv"))
def test_temporaries_fall_with_the_devices_that_share_a_prompt(label):
    few, many = (program(wide(), n, label).memory_analysis().temp_size_in_bytes for n in (2, 8))
    assert many < few / 2.5


@pytest.mark.rotating
def test_queries_go_to_a_long_past_which_stays_where_it_lies():
    past = 16 * LONG
    moved = sum(one.bytes for one in sent(program(wide(), 4, "full", past)).values())
    # What is new is also sent to where its slots lie.
    assert moved < 16 * EACH / 2 and 7 / 4 * EACH + ASKED <= moved < 1.2 * (7 / 4 * EACH + ASKED)


@pytest.mark.slow
def test_kernels_read_a_prompt_on_every_device():
    there, done = kvjax.spread(model("4/2"), "data=2,seq=4", "sequence"), {}
    method = kvjax.method("h2o", budget=0.5)
    for implementation in ("reference", "tpu interpret"):
        options = dict(method=method, room=8, implementation=implementation)
        logits, cache = kvjax.prefill(there, MAIN.first, **options)
        logits, cache = kvjax.prefill(there, MAIN.second, cache=cache, room=8, implementation=implementation)
        done[implementation] = logits, positions(cache)
    assert off(done["tpu interpret"][0], done["reference"][0]) < 1e-5
    assert done["tpu interpret"][1] == done["reference"][1]


# --- what divides --------------------------------------------------------------------------------------


def test_lengths_that_do_not_divide_are_padded_and_chunks_are_refused():
    here, there = model("4/2"), kvjax.spread(model("4/2"), "seq=6", "sequence")
    prompt = [MAIN.first[0][:23]]
    got, held = kvjax.prefill(there, prompt)
    assert off(got, kvjax.prefill(here, prompt)[0]) < 1e-5
    assert held.next.tolist() == [23] and not held.groups[0].tail.capacity % 6
    with pytest.raises(InputError) as error:
        kvjax.prefill(there, MAIN.first[:1], chunk=8)
    assert str(error.value) == (
        "8 tokens of a chunk do not divide over mesh axis seq=6: read chunk=12 at a time, or leave them "
        "whole with rules such as kvjax.Rules.named('sequence').but(tokens=None)"
    )


@pytest.mark.rotating
def test_prompts_are_read_whole_where_rules_leave_them_so():
    rules = Rules.named("sequence").but(batch=None, tokens=None)
    whole = kvjax.spread(model("4/2"), "seq=4", rules)
    want, _ = kvjax.prefill(model("4/2"), MAIN.first[:1], chunk=5)
    got, _ = kvjax.prefill(whole, MAIN.first[:1], chunk=5)
    assert off(got, want) < 1e-5
