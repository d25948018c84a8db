"""Slots that are read one by one, chosen by a few channels of every key, and the mean of the rest."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import layout_class
from kvjax.compress.unread import unread_bytes
from kvjax.grammar import Budget, Method
from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.read_kinds import Counted, EstimatingRest, Read
from kvjax.models.mixers.attention import Attention
from kvjax.ops.base.rope import Rope
from kvjax.read.channels import LargestChannels, visited_slots
from kvjax.read.pages import PageBounds
from kvjax.state.cache import Slots, nbytes
from kvjax.steps import Run
from tests.float64.reads import sparq_chosen, sparq_guesses
from tests.float64.reference import softmax
from tests.methods.battery import MAIN, ROOM, B, model, off
from tests.models import conversation
from tests.models.architectures import TABLE
from tests.sweep import sweep

LAYERS, ROWS, HEADS, GROUP, S, TAIL, H, V = 2, 2, 2, 3, 12, 3, 8, 6
WORD = LargestChannels(Budget(0.5), channels=3, newest=2)
SPEC = AttentionSpec(0.3, None, Rope())


@pytest.fixture
def drawn(rng):
    """Draw queries, a body of which row 1 fills a part, and a tail, each of two layers."""

    def values(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    pos = np.broadcast_to(np.arange(S), (LAYERS, ROWS, HEADS, S)).copy()
    pos[:, 1, :, 7:] = -1
    later = np.where(np.arange(TAIL) < 2, np.arange(TAIL) + S, -1)
    later = jnp.asarray(np.broadcast_to(later, (LAYERS, ROWS, HEADS, TAIL)), jnp.int32)
    k, v = values(LAYERS, ROWS, HEADS, S, H), values(LAYERS, ROWS, HEADS, S, V)
    pos = jnp.asarray(pos, jnp.int32)
    sums = WORD.total(Counted(k, jnp.where(pos[..., None] >= 0, v, 0.0), pos, {}))
    body = Slots(k, v, pos, sums=sums)
    tail = Slots(values(LAYERS, ROWS, HEADS, TAIL, H), values(LAYERS, ROWS, HEADS, TAIL, V), later)
    return values(ROWS, HEADS * GROUP, 1, H), body, tail


def groups(q, body, tail, layer):
    """(row, head, queries [G, H], keys, values, positions) of every list, of its live slots alone."""
    q = np.asarray(q, np.float64).reshape(ROWS, HEADS, GROUP, H)
    for b, i in np.ndindex(ROWS, HEADS):
        k, v, pos = (
            np.concatenate([np.asarray(getattr(x, name)[layer, b, i]) for x in (body, tail)])
            for name in ("k", "v", "pos")
        )
        live = pos >= 0
        yield b, i, q[b, i], k[live].astype(float), v[live].astype(float), pos[live]


@pytest.mark.parametrize("platform", sweep(["cpu", "tpu"], "cpu"))
def test_a_query_guesses_by_its_largest_channels_in_sum_over_the_group(drawn, monkeypatch, platform):
    """A TPU multiplies the other channels by zero."""
    monkeypatch.setattr("kvjax.read.channels.platform", lambda: platform)
    q, body, _ = drawn
    got = WORD.guess(q, body.k[1]) * H**-0.5
    for b, i in np.ndindex(ROWS, HEADS):
        queries = np.asarray(q, np.float64).reshape(ROWS, HEADS, GROUP, H)[b, i]
        want, _ = sparq_guesses(queries, np.asarray(body.k[1, b, i], np.float64), 3)
        np.testing.assert_allclose(got[b, i, :, 0], want, atol=1e-5)


def test_all_channels_give_the_logits_themselves(drawn):
    q, body, _ = drawn
    got = dataclasses.replace(WORD, channels=100).guess(q, body.k[0])
    want = jnp.einsum("bkgh,bksh->bkgs", q.reshape(ROWS, HEADS, GROUP, H), body.k[0])
    np.testing.assert_allclose(got[:, :, :, 0], want, atol=1e-5)


@pytest.mark.rotating
def test_the_slots_of_the_largest_guesses_are_chosen_and_no_empty_one(drawn):
    q, body, tail = drawn
    slots, counts = WORD.select(q, body, 1, jnp.asarray([14, 9]))
    assert slots.shape == (ROWS, HEADS, 6) and counts.tolist() == [[6, 6], [3, 3]]
    found = visited_slots((slots, counts), S)
    for b, i, queries, k, _, pos in groups(q, body, tail, 1):
        guesses, _ = sparq_guesses(queries, k, 3)
        want = sparq_chosen(guesses, pos, S, count=lambda n: n // 2, newest=0)
        assert set(np.flatnonzero(found[b, i])) == set(pos[want & (pos < S)])


@pytest.mark.parametrize("softcap", sweep([None, 0.7], 0.7))
def test_the_rest_weighs_what_the_guess_leaves_and_is_the_mean_of_all_values(drawn, softcap):
    q, body, tail = drawn
    lse = np.random.default_rng(1).normal(size=(ROWS, HEADS * GROUP, 1)).astype(np.float32)

    @jax.jit
    def rest(q, body, tail, lse):
        chosen = WORD.select(q, body, 1, jnp.asarray([14, 9]))
        return WORD.rest(q, body, tail, 1, chosen, lse, SPEC._replace(softcap=softcap))

    out, left = map(np.asarray, rest(q, body, tail, lse))
    assert out.shape == (ROWS, HEADS * GROUP, 1, V)
    for b, i, queries, k, v, pos in groups(q, body, tail, 1):
        guesses, _ = sparq_guesses(queries, k, 3)
        read = sparq_chosen(guesses, pos, S, count=lambda n: n // 2, newest=0)
        guesses = guesses * np.sqrt(H) * SPEC.scale
        guesses = guesses if softcap is None else softcap * np.tanh(guesses / softcap)
        alpha = softmax(guesses)[:, read].sum(-1)
        mine = slice(i * GROUP, (i + 1) * GROUP)
        np.testing.assert_allclose(left[b, mine, 0] - lse[b, mine, 0], np.log((1 - alpha) / alpha), atol=1e-5)
        np.testing.assert_allclose(out[b, mine, 0], np.broadcast_to(v.mean(0), (GROUP, V)), atol=1e-5)


@pytest.mark.rotating
def test_where_nothing_is_left_out_the_rest_weighs_nothing_and_has_gradients(drawn):
    q, body, tail = drawn
    word = dataclasses.replace(WORD, budget=Budget(1.0))

    def total(q, layer):
        out, left = word.rest(
            q, body, tail, layer, word.select(q, body, layer, jnp.asarray([14, 9])), q[..., 0], SPEC
        )
        return jnp.where(jnp.isneginf(left), 0.0, left).sum() + out.sum(), left

    (_, left), slope = jax.value_and_grad(total, has_aux=True)(q, 0)
    assert np.isneginf(left).all() and np.isfinite(slope).all()


def held_values(cache):
    """Yield the sums over the body of every list, and its values, of the only group of one layer each."""
    for group in cache.groups:
        (body,) = group.bodies
        live = np.asarray(body.pos) >= 0
        v = np.asarray(body.keys().v, np.float64)
        yield np.asarray(body.sums["values"]), np.where(live[..., None], v, 0.0).sum(3), live.sum(-1)


@pytest.mark.parametrize("store", sweep([None, "int8"]))
def test_sums_follow_the_values_through_prompts_steps_turns_and_chunks(store):
    m, method = model("4/2"), kvjax.method("sparq", budget=0.5, channels=5, newest=4)
    method = method if store is None else kvjax.chain(method, kvjax.method(store))
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    caches = [cache]
    for token in MAIN.steps:
        cache = kvjax.step(m, kvjax.fork(cache, 1), token)[1]
        caches.append(cache)
    caches.append(kvjax.prefill(m, MAIN.second, cache=cache, room=8)[1])
    caches.append(kvjax.prefill(m, MAIN.first, method=method, room=ROOM, chunk=8)[1])
    for one in caches:
        for got, want, count in held_values(one):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)
            assert (count == np.maximum(np.asarray(one.next) - 4, 0)[None, :, None]).all()


@pytest.mark.rotating
def test_a_row_that_is_emptied_forgets_its_sums():
    m, method = model("4/2"), kvjax.method("sparq", budget=0.5, channels=5, newest=4)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    emptied = kvjax.reset_rows(cache, [True, *[False] * (B - 1)])
    for (got, *_), (before, *_) in zip(held_values(emptied), held_values(cache), strict=True):
        assert (got[:, 0] == 0).all() and (got[:, 1:] == before[:, 1:]).all()


@pytest.mark.rotating
def test_a_saved_cache_answers_as_before(tmp_path):
    m, method = model("4/2"), kvjax.method("sparq", budget=0.5, channels=5, newest=4)
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    want, _ = kvjax.step(m, cache, MAIN.steps[0])
    got, _ = kvjax.step(m, kvjax.load_cache(tmp_path / "a.cache"), MAIN.steps[0])
    np.testing.assert_array_equal(got, want)


@pytest.mark.rotating
@pytest.mark.parametrize("store", [None, "int8"])
def test_what_a_step_leaves_unread_is_counted_in_channels_and_slots(store):
    m, method = model("4/2"), kvjax.method("sparq", budget=0.25, channels=5, newest=4)
    method = method if store is None else kvjax.chain(method, kvjax.method(store))
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    slots = len(MAIN.first[0]) + ROOM - 4
    visits, lists = slots // 4, B * 2
    gms = Run(m.config, method).groups(m.params)
    for gm, group in zip(gms, cache.groups, strict=True):
        (body,) = group.bodies
        assert body.capacity == slots
        # 5 of 16 channels of every key, and whole keys and values of a quarter; codes are decoded whole.
        keys = lists * slots * 16 * 4 - lists * (slots * 5 + visits * 16) * 4
        values = lists * (slots - visits) * 16 * 4
        if store is not None:
            keys, values = 0, nbytes(body.v) * (slots - visits) // slots
        assert unread_bytes(gm, group) == keys + values


@pytest.mark.rotating
def test_a_read_of_all_tokens_beside_learned_sinks_is_what_the_full_cache_reads():
    name, method = "sinks", kvjax.method("sparq", budget=1.0, channels=3, newest=2)
    texts, config = conversation.TEXTS, TABLE["sinks"].config
    assert isinstance(config.mixers[0], Attention) and config.window(0) is None
    _, cache = kvjax.prefill(conversation.model(name), texts[:2, :13], method=method, room=8)
    logits, _ = kvjax.step(conversation.model(name), cache, texts[:2, 13])
    conversation.close(logits, conversation.whole(name).logits[:2, 13])


@pytest.mark.rotating
def test_sinks_outside_the_text_take_no_part_in_what_the_rest_weighs():
    """The rest has odds against what is read of the text; a sink only divides both."""
    name, word = "sinks", LargestChannels(Budget(3), channels=3, newest=2)
    texts, seen = conversation.TEXTS, []

    @dataclasses.dataclass(frozen=True)
    class Watched(LargestChannels):
        def rest(self, q, body, tail, layer, chosen, lse, attention):
            k = jnp.concatenate([body.k[layer], tail.k[layer]], 2)
            there = visited_slots(chosen, body.capacity) & (body.pos[layer] >= 0)
            there = jnp.concatenate([there, tail.pos[layer] >= 0], 2)
            b, heads, _, h = k.shape
            s = jnp.einsum("bkgh,bksh->bkgs", q.reshape(b, heads, -1, h), k) * attention.scale
            want = jax.nn.logsumexp(jnp.where(there[:, :, None], s, -jnp.inf), -1).reshape(lse.shape)
            jax.debug.callback(lambda a, b: seen.append((a, b)), lse, want)
            return super().rest(q, body, tail, layer, chosen, lse, attention)

    method = Method(read=Watched(**{f.name: getattr(word, f.name) for f in dataclasses.fields(word)}))
    m = conversation.model(name)
    _, cache = kvjax.prefill(m, texts[:2, :13], method=method, room=8)
    kvjax.step(m, cache, texts[:2, 13])[0].block_until_ready()
    jax.effects_barrier()
    assert seen
    for got, want in seen:
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.rotating
def test_latents_are_read_by_their_channels():
    name, method = "mla", kvjax.method("sparq", budget=1.0, channels=3, newest=2)
    texts = conversation.TEXTS
    _, cache = kvjax.prefill(conversation.model(name), texts[:2, :13], method=method, room=8)
    logits, _ = kvjax.step(conversation.model(name), cache, texts[:2, 13])
    conversation.close(logits, conversation.whole(name).logits[:2, 13])


@pytest.mark.rotating
def test_half_precision_stays_near_the_full_one():
    m, found = model("4/2"), []
    half = dataclasses.replace(m, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params))
    method = kvjax.method("sparq", budget=0.5, channels=5, newest=4)
    for one in (m, half):
        _, cache = kvjax.prefill(one, MAIN.first, method=method, room=ROOM)
        (body,) = cache.groups[0].bodies
        assert body.sums["values"].dtype == jnp.float32
        found.append(kvjax.step(one, cache, MAIN.steps[0])[0].astype(jnp.float32))
    assert body.k.dtype == jnp.bfloat16 and off(found[1], found[0]) < 0.1


@pytest.mark.rotating
def test_a_smaller_budget_reads_other_numbers():
    """What the identities above cannot tell: with little to read, the answer is another one."""
    m, found = model("4/2"), []
    for budget in (1.0, 0.25):
        method = kvjax.method("sparq", budget=budget, channels=5, newest=4)
        _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
        found.append(kvjax.step(m, cache, MAIN.steps[0])[0])
    assert off(found[1], found[0]) > 1e-3


def test_what_the_method_cannot_do_is_refused_with_the_reason():
    method = kvjax.method("sparq", budget=0.5, channels=5, newest=4)
    with pytest.raises(ValueError, match="a key is rotated by its position for all queries"):
        kvjax.chain(kvjax.method("streamingllm", budget=0.5), method)
    with pytest.raises(InputError, match="what is not read counts apart, and layers clip"):
        kvjax.prefill(conversation.model("lckv"), conversation.TEXTS[:2, :13], method=method, room=8)


@pytest.mark.rotating
def test_a_rest_of_another_shape_names_the_word():
    @dataclasses.dataclass(frozen=True)
    class OneHead(LargestChannels):
        def rest(self, *args):
            out, lse = super().rest(*args)
            return out[:, :1], lse

    with pytest.raises(ValueError, match=r"OneHead\(.*\) gave the rest: float32 of shape \[2, 1, 1, 16\]"):
        method = Method(read=OneHead(Budget(0.5), 4, 4))
        kvjax.generate(model("4/2"), MAIN.first[:2], method=method, max_new_tokens=2)


def test_words_and_layouts_say_what_is_answered_for():
    pages, slots = PageBounds(Budget(0.5)), WORD
    assert (
        isinstance(pages, Read)
        and not isinstance(pages, EstimatingRest)
        and isinstance(slots, EstimatingRest)
    )
    said = [str(layout_class(Method(read=read))) for read in (pages, slots)]
    assert said == [
        "dense, kv heads, evicts never, reads pages, skips layers",
        "dense, kv heads, evicts never, reads pages and the rest",
    ]
