"""Blocks that are found by representative keys: what these are, which blocks are read, what a step gives."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.layout_class import layout_class
from kvjax.grammar import Budget, Method
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import SlotObservation
from kvjax.grammar.read_kinds import Read, Remembering
from kvjax.place.host import Host
from kvjax.read.blocks import LocalLogits, LocalScore, RepresentativeKeys
from kvjax.state.cache import Slots
from kvjax.state.picked_pages import visited
from tests.float64.reference import Decoder, Prompt, best, rope, softmax
from tests.methods.battery import MAIN, ROOM, model
from tests.models import conversation

ROWS, HEADS, GROUP, S, H, PAGE, WITHIN = 2, 2, 3, 20, 8, 4, 5
WORD = RepresentativeKeys(Budget(2 * PAGE), page=PAGE, newest=WITHIN, sinks=3, keys=2)
SCORE = key_of(LocalScore(WITHIN))


def asked(q, q_pos, k, pos, group=GROUP, within=WITHIN):
    """sum_j <q_(m + j), k_m> for j = 1 .. within, over the heads of a group, query by query."""
    found = np.zeros(k.shape[:3])
    for b, i, s, t in np.ndindex(*k.shape[:3], q.shape[2]):
        if pos[b, i, s] >= 0 and q_pos[b, t] >= 0 and 0 < q_pos[b, t] - pos[b, i, s] <= within:
            found[b, i, s] += (q[b, i * group : (i + 1) * group, t] @ k[b, i, s]).sum()
    return found


@pytest.mark.rotating
@pytest.mark.parametrize("tokens", [1, 7])
def test_what_slots_are_asked_is_the_sum_of_the_logits_of_the_tokens_behind_them(rng, tokens):
    q, k = rng.normal(size=(ROWS, HEADS * GROUP, tokens, H)), rng.normal(size=(ROWS, HEADS, S, H))
    pos = np.stack([rng.permutation(S) for _ in range(ROWS * HEADS)]).reshape(ROWS, HEADS, S) - 3
    pos = np.where(pos < 0, -1, pos)
    q_pos = np.arange(tokens) + np.array([[9], [4]])
    q_pos[1, 5:] = -1
    given = (jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in (q, q_pos, k, pos))
    got = LocalLogits(WITHIN).of(*given)
    np.testing.assert_allclose(got, asked(q, q_pos, k, pos), atol=2e-5)


@pytest.fixture
def drawn(rng):
    """Draw queries, and a body of two layers of which row 1 fills three blocks."""
    k, score = rng.normal(size=(2, ROWS, HEADS, S, H)), rng.normal(size=(2, ROWS, HEADS, S))
    pos = np.broadcast_to(np.arange(S), score.shape).copy()
    pos[:, 1, :, 3 * PAGE :] = -1
    k, score = jnp.asarray(k, jnp.float32), jnp.asarray(score, jnp.float32)
    body = Slots(k, 2 * k, jnp.asarray(pos, jnp.int32), summary=WORD.summarise(k, {SCORE: score}))
    return jnp.asarray(rng.normal(size=(ROWS, HEADS * GROUP, 1, H)), jnp.float32), body, score


def representatives(k, score):
    """Find the keys [keys, H] of a block that were asked for most."""
    return k[np.argsort(-score, kind="stable")[: WORD.keys]]


def chosen(q, k, pos, score):
    """Find the blocks of a row: that of the sinks, and the best two by what heads and representatives meet.

    q [N, H], k [K, S, H], pos and score [K, S].
    """
    full = (pos[0] >= 0).sum() // PAGE
    total, group = np.zeros(full), len(q) // len(k)
    for block, i, g in np.ndindex(full, len(k), group):
        here = slice(block * PAGE, (block + 1) * PAGE)
        total[block] += sum(q[i * group + g] @ r for r in representatives(k[i, here], score[i, here]))
    return {0} | {1 + x for x in np.flatnonzero(best(total[1:], 2))}


def test_a_block_is_ranked_by_its_keys_that_were_asked_for_most(drawn):
    _, body, score = drawn
    for index in np.ndindex(2, ROWS, HEADS, S // PAGE):
        here = (*index[:3], slice(index[3] * PAGE, (index[3] + 1) * PAGE))
        want = representatives(np.asarray(body.k, np.float64)[here], np.asarray(score)[here]).mean(0)
        np.testing.assert_allclose(body.summary["keys"][index], want, atol=1e-6)


@pytest.mark.rotating
def test_a_step_reads_the_sinks_and_the_best_blocks_in_all_heads_of_a_layer(drawn):
    q, body, score = drawn
    pages, counts = WORD.select(q, body, 1, jnp.asarray([20, 12]))
    assert pages.shape == (ROWS, HEADS, WORD.pages_visited(S)) == (ROWS, HEADS, 3)
    read = visited(body, 1, PAGE, pages, counts)
    for b in range(ROWS):
        arrays = (np.asarray(x, np.float64) for x in (q[b, :, 0], body.k[1, b], body.pos[1, b], score[1, b]))
        want = {block * PAGE + j for block in chosen(*arrays) for j in range(PAGE)}
        for i in range(HEADS):
            assert {int(p) for p in read.pos[b, i] if p >= 0} == want


def read_by_layer(prompt, queries, layer, word):
    """Which of a prompt's tokens a token with the queries [N, H] reads in a layer: [T], in all heads."""
    body = max(prompt.length - word.newest, 0) // word.page * word.page
    q, k = np.asarray(prompt.q[layer])[None], np.asarray(prompt.k[layer])[None]
    pos = np.broadcast_to(np.arange(prompt.length), (1, len(k[0]), prompt.length))
    score = asked(q, pos[:, 0], k, pos, len(q[0]) // len(k[0]), word.newest)[0]
    blocks = chosen(queries, k[0, :, :body], pos[0, :, :body], score[:, :body])
    return np.array([t >= body or t // word.page in blocks for t in range(prompt.length)])


@pytest.mark.rotating
def test_a_step_attends_to_sinks_window_and_best_blocks_of_the_text_in_float64():
    m = model("4/2")
    decoder, config = Decoder(m), m.config
    _, cache = kvjax.prefill(m, MAIN.first, method=Method(read=WORD, host=Host(0.5)), room=ROOM)
    got, _ = kvjax.step(m, cache, MAIN.steps[0])
    some = 0
    for row, token, logits in zip(MAIN.first, MAIN.steps[0], got, strict=True):
        prompt, at = Prompt(decoder, row), [len(row)]
        x = decoder.rest["embed"][[int(token)]]
        for i, layer in enumerate(decoder.layers):
            raw_q, raw_k, v = decoder.project(layer, x)
            q, k = (rope(y, at, config.rope.theta) for y in (raw_q, raw_k))
            read = read_by_layer(prompt, q[:, 0], i, WORD)
            some += (~read).sum()
            k, v = (np.repeat(np.concatenate([old[:, read], new], 1), prompt.group, 0)
                    for old, new in ((prompt.k[i], k), (prompt.v[i], v)))  # fmt: skip
            p = softmax(q @ k.swapaxes(1, 2) / np.sqrt(config.head_dim))
            x = decoder.finish(layer, x, p @ v)
        want = decoder.logits(x)[0]
        assert np.abs(np.asarray(logits) - want).max() < 3e-5 * np.abs(want).max()
    assert some > 0


@pytest.mark.rotating
def test_scores_follow_the_text_through_prompts_chunks_turns_and_steps():
    m = model("4/2")
    # All blocks are read: what a step reads less of, the layers above would see.
    method = Method(read=dataclasses.replace(WORD, budget=Budget(1.0)))
    found = []
    for chunk in (None, 8):
        _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM, chunk=chunk)
        for token in MAIN.steps:
            cache = kvjax.step(m, cache, token)[1]
        found.append(cache)
    texts = [[*row, *(int(t[i]) for t in MAIN.steps)] for i, row in enumerate(MAIN.first)]
    _, whole = kvjax.prefill(m, texts, method=method, room=ROOM)
    for cache in found:
        for group, want in zip(cache.groups, whole.groups, strict=True):
            pages = min(g.bodies[0].capacity for g in (group, want)) // PAGE
            blocks = (np.asarray(want.bodies[0].pos)[..., : pages * PAGE : PAGE] >= 0)[..., None]
            assert (np.asarray(want.bodies[0].pos)[..., pages * PAGE :] < 0).all()
            both = (np.asarray(g.bodies[0].summary["keys"][:, :, :, :pages]) for g in (group, want))
            got, same = (np.where(blocks, x, 0) for x in both)
            np.testing.assert_allclose(got, same, atol=1e-5)
            live = np.asarray(want.tail.pos) >= 0
            np.testing.assert_array_equal(group.tail.pos, want.tail.pos)
            got, same = (np.where(live, g.tail.traces[SCORE], 0) for g in (group, want))
            np.testing.assert_allclose(got, same, atol=1e-4)


@pytest.mark.rotating
@pytest.mark.parametrize("chunk", [None, pytest.param(8, marks=pytest.mark.rotating)])
def test_every_query_head_has_representatives_of_its_own_where_a_keep_selects_for_each(chunk):
    """Float64: those of a block that the queries of this head alone, of the tokens after them, meet most."""
    keep = kvjax.method("snapkv", budget=0.75 if chunk is None else 1.0, window=4).keep
    method = Method(dataclasses.replace(keep, per_query_head=True), read=WORD)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=ROOM, chunk=chunk)
    layers = [(g, i) for g in cache.groups for i in range(len(g.bodies[0].pos))]
    blocks = 0
    for layer, (group, i) in enumerate(layers):
        held, keys = (np.asarray(x[i]) for x in (group.bodies[0].pos, group.bodies[0].summary["keys"]))
        for b, tokens in enumerate(MAIN.first):
            prompt = Prompt(Decoder(model("4/2")), tokens)
            for head in range(4):
                q, k = prompt.q[layer][head], prompt.k[layer][head // 2]
                for page, at in enumerate(held[b, head].reshape(-1, PAGE)):
                    if (at < 0).any():
                        continue
                    met = [(q[j + 1 : j + 1 + WITHIN] @ k[j]).sum() for j in at]
                    want = k[at[np.argsort(met)[-WORD.keys :]]].mean(0)
                    np.testing.assert_allclose(keys[b, head, page], want, atol=2e-5)
                    blocks += 1
    assert blocks > 4 * 4 * 2


@pytest.mark.rotating
def test_what_the_method_cannot_do_is_refused_with_the_reason():
    method = kvjax.method("infllm", budget=0.5, page=4, newest=8, sinks=4, keys=2)
    for name, why in (("mla", "the model stores latents"), ("yoco", "several layers read the slots")):
        with pytest.raises(InputError, match=why):
            kvjax.prefill(conversation.model(name), conversation.TEXTS[:2, :13], method=method, room=8)
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=ROOM)
    with pytest.raises(InputError, match="includes their queries"):
        kvjax.rollback(cache, 1)
    with pytest.raises(InputError, match="what slots receive is recorded after every token"):
        kvjax.verify(model("4/2"), cache, [[1]] * len(MAIN.first))


def test_words_and_layouts_say_what_is_remembered():
    assert (
        isinstance(WORD, Read)
        and isinstance(WORD, Remembering)
        and isinstance(LocalLogits(3), SlotObservation)
    )
    said = str(layout_class(kvjax.method("infllm", budget=0.5)))
    assert said == "dense, kv heads, evicts never, reads pages, remembers, in host memory"
