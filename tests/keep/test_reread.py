"""Prompts of which some tokens are chosen and read again: against float64, and what is said of the cache."""

import copy
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.runner import Runner, _given
from kvjax.eval.tasks.rows import QuestionRows
from kvjax.grammar import Budget, Method
from kvjax.keep.algebra import Pool
from kvjax.keep.prompts.reread import Reread
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm, LastLogits
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.recurrent import Retention
from kvjax.models.params import init, plan
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.cache import kept_positions, nbytes
from kvjax.steps import Run
from tests.float64.reference import Prompt, best, pool, rope
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import MAIN, ROOM, B, T, decoder, model, off, positions
from tests.methods.rows import KERNEL, count

LAYER = 1
GEMS = kvjax.method("gemfilter", budget=0.5, filter_layer=LAYER, kernel=KERNEL)
WHOLE = kvjax.method("gemfilter", budget=1.0, filter_layer=LAYER, kernel=KERNEL)


def chosen(q, k, length):
    """Which of `length` new tokens are read: q [N, H] of the last one, k [N, length, H], both rotated."""
    logits = np.stack([keys @ query for query, keys in zip(q, k, strict=True)])
    score = pool(logits, KERNEL, "mean").sum(0)
    score[-1] = np.inf
    return np.flatnonzero(best(score, count(length)))


def gems(tokens):
    prompt = Prompt(decoder("deep"), tokens)
    keys = np.repeat(prompt.k[LAYER], prompt.group, 0)
    return chosen(prompt.q[LAYER][:, -1], keys, len(tokens))


@pytest.fixture(scope="module")
def first():
    return kvjax.prefill(model("deep"), MAIN.first, method=GEMS, room=ROOM)


def read(tokens):
    return Prompt(decoder("deep"), [tokens[j] for j in gems(tokens)])


def slots_of(prompt):
    return Slotwise(prompt, [np.ones((len(k), prompt.length), bool) for k in prompt.k])


@pytest.mark.rotating
def test_the_cache_holds_the_chosen_tokens_at_new_positions(first):
    logits, cache = first
    assert cache.next.tolist() == [count(len(row)) for row in MAIN.first]
    assert cache.groups[0].tail.capacity == T // 2 + ROOM
    for b, tokens in enumerate(MAIN.first):
        prompt = read(tokens)
        assert off(logits[b], prompt.all_logits[-1]) < 1e-5
        for layer in positions(cache):
            assert layer[b] == [set(range(prompt.length))] * len(layer[b])
    # Other tokens than the newest, or the choice would not be tested.
    assert any((gems(row) != np.arange(len(row))[-count(len(row)) :]).any() for row in MAIN.first)


@pytest.mark.rotating
def test_a_step_goes_on_behind_them(first):
    logits, _ = kvjax.step(model("deep"), kvjax.fork(first[1], 1), MAIN.steps[0])
    want = [slots_of(read(row)).step(MAIN.steps[0][b]) for b, row in enumerate(MAIN.first)]
    assert off(logits, np.stack(want)) < 3e-5


@pytest.mark.rotating
def test_a_second_turn_chooses_by_what_it_sees_of_the_first_and_is_read_after_it(first):
    logits, cache = kvjax.prefill(model("deep"), MAIN.second, cache=first[1], room=8)
    for b, tokens in enumerate(MAIN.second):
        slots = slots_of(read(MAIN.first[b]))
        whole, start = copy.deepcopy(slots), slots.next
        for token in tokens:
            whole.step(token)
        group = whole.decoder.config.heads // len(whole.slots[LAYER])
        raw = np.stack([[s["k"] for s in lists if s["pos"] >= start] for lists in whole.slots[LAYER]])
        keys = rope(raw, start + np.arange(len(tokens)), whole.decoder.config.rope.theta)
        on = chosen(whole.queries[LAYER][:, -1], np.repeat(keys, group, 0), len(tokens))
        want = [slots.step(tokens[j]) for j in on][-1]
        assert off(logits[b], want) < 3e-5
        assert all(held == set(range(slots.next)) for layer in positions(cache) for held in layer[b])


@pytest.mark.rotating
@pytest.mark.parametrize("how", [dict(method=WHOLE), dict(method=GEMS, compress=False)], ids=["all", "none"])
def test_all_tokens_are_read_where_nothing_is_left_out(how):
    logits, cache = kvjax.prefill(model("deep"), MAIN.first, room=ROOM, **how)
    want, full = kvjax.prefill(model("deep"), MAIN.first, room=ROOM)
    assert off(logits, want) < 1e-6 and positions(cache) == positions(full)


@pytest.mark.rotating
def test_what_is_read_is_stored_as_a_chain_says():
    kivi = kvjax.method("kivi", bits=4, group=8, residual=8)
    method = kvjax.chain(GEMS, kivi)
    _, cache = kvjax.prefill(model("deep"), [MAIN.first[0]], method=method, room=16)
    alone = [MAIN.first[0][j] for j in gems(MAIN.first[0])]
    _, want = kvjax.prefill(model("deep"), [alone], method=kivi, room=16)
    assert positions(cache) == positions(want) and nbytes(cache) == nbytes(want)
    assert method.id == "gemfilter + kivi" and method.decode_part() == kivi.decode_part()


def test_a_size_that_is_planned_is_that_of_the_cache(first):
    planned = CacheSizes(model("deep").config, "float32", T, [GEMS]).nbytes(GEMS, room=ROOM)
    assert planned * B == nbytes(first[1])


@pytest.mark.rotating
def test_a_comparison_says_which_of_the_given_tokens_are_held():
    entries = [PlannedCell("full", None, Method()), PlannedCell("gemfilter", 0.5, GEMS)]
    runner = Runner(model("deep"), None, entries, T, ROOM)
    tokens = np.zeros((B, T), np.int32)
    for b, row in enumerate(MAIN.first):
        tokens[b, : len(row)] = row
    nothing = np.zeros((B, 0), np.int32), np.zeros(B, np.int32), np.zeros(B, bool)
    rows = QuestionRows(tokens, np.array([len(row) for row in MAIN.first], np.int32), *nothing, [])
    mine, seconds = runner.own(entries[1], runner.prompt(rows)[0], rows)
    found = _given(kept_positions(runner.compressed(entries[1], mine)), mine.source)
    assert seconds > 0
    for b, row in enumerate(MAIN.first):
        for layer in found:
            assert all((np.sort(pos[pos >= 0]) == gems(row)).all() for pos in layer[b])


# --- what is refused -------------------------------------------------------------------------------------


def test_a_score_of_what_is_known_later_is_refused():
    with pytest.raises(ValueError, match=r"Reread chooses while the prompt is read, and its score asks for"):
        Reread(0, AccumulatedAttention(), Budget(0.5))


def test_a_keep_beside_words_that_choose_all_slots_is_refused():
    """GemFilter's tokens are read as others are; while memory tokens are read, nothing is recorded."""
    assert kvjax.chain(GEMS, kvjax.method("snapkv", budget=0.5)).keep is not None
    with pytest.raises(ValueError, match="needs that the layers record statistics while they read a prompt"):
        kvjax.chain(kvjax.method("gisting"), kvjax.method("snapkv", budget=0.5))


MIXERS = {
    "layer 1 keeps no slots": (Attention(), Retention(2, 8, 8), Attention()),
    "layer 1, which chooses the tokens, has no keys": (Attention(), Attention(source=0), Attention()),
    "layer 0 takes the slots of layer 2, which does not run": (
        Attention(source=2), Attention(), Attention(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "mixers"), MIXERS.items(), ids=MIXERS)
def test_models_in_which_the_layer_cannot_choose_are_refused(message, mixers):
    config = dataclasses.replace(model("deep").config, mixers=mixers)
    with pytest.raises(InputError, match=message):
        check_fit(GEMS, config)


def test_layers_above_may_be_of_any_kind():
    config = dataclasses.replace(model("deep").config, mixers=(Attention(), Attention(), Retention(2, 8, 8)))
    check_fit(GEMS, config)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="tokens are chosen at layer 3, expected one of 0 to 2"):
        kvjax.prefill(model("deep"), MAIN.first, method=kvjax.method("gemfilter", budget=0.5, filter_layer=3))


@pytest.mark.parametrize(
    "method", [kvjax.method("fastkv", budget=0.5), kvjax.method("lazyllm"), kvjax.method("homer")]
)
def test_one_layer_leaves_nothing_to_choose_tokens_for(method):
    config = dataclasses.replace(model("deep").config, layers=1)
    with pytest.raises(InputError, match="chooses tokens for the layers above, and the model has one layer"):
        check_fit(method, config)


def test_a_layer_inside_stacked_ones_is_refused_before_it_runs():
    config = dataclasses.replace(model("deep").config, layers=4)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0), groups=plan(config, stacked=True)))
    run = Run(config, Method(reread=Reread(2, LastLogits() >> Pool(3, "mean"), Budget(0.5))))
    ids, length = jax.ShapeDtypeStruct((1, 32), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    call = partial(steps.prefill, run, tokens_bound=32, room=0, compress=True, cache=None)
    with pytest.raises(ValueError, match="chosen at layer 2, inside stacked layers that end at 3"):
        jax.eval_shape(call, params, ids, length)


def test_a_score_without_observations_chooses_too():
    method = Method(reread=Reread(0, KeyNorm(), Budget(4)))
    _, cache = kvjax.prefill(model("deep"), MAIN.first, method=method, room=4)
    assert cache.next.tolist() == [4] * B


def test_scores_of_slots_are_refused_where_they_are_of_another_text():
    with pytest.raises(InputError, match="reads prompts in a way of its own"):
        kvjax.scores(model("deep"), [MAIN.first[0]], GEMS)
