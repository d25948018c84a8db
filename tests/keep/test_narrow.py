"""Prompts that get narrower: counts, what is refused, what upper layers run for, a second turn in float64."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.runner import Runner
from kvjax.eval.tasks.rows import QuestionRows
from kvjax.grammar import Budget, Keep, Method, Store, chain
from kvjax.grammar.phase import ByRank
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.probe import ProbeAttention, RepeatContext
from kvjax.keep.prompts.narrow import SelectivePropagation
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm, OutputNorm, Position
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.recurrent import Retention
from kvjax.models.params import init, plan
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.steps import Run
from tests.float64.reference import Prompt, best, pool, rope, softmax
from tests.float64.reference import Row as Slotwise
from tests.keep.test_refused import OfNow
from tests.methods.battery import MAIN, PACKED, ROOM, B, T, decoder, model, off, packed, positions, talk
from tests.methods.expected import LAST_WHOLE, PASSED, fastkv_goes_on
from tests.methods.rows import KERNEL, WINDOW
from tests.methods.table import BY_LABEL

FASTKV = BY_LABEL["fastkv"].method()
HALF, PROBE = Budget(0.5), RepeatContext((1, 2))


# --- the word --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.2, 0.75, 1.0])
def test_counts_are_the_share_rounded_down_but_never_less_than_the_window(share):
    word = SelectivePropagation(1, KeyNorm(), share, window=4)
    tokens = np.arange(60)
    want = [min(n, max(4, round(share * 100) * n // 100)) for n in tokens]
    assert word.count(jnp.asarray(tokens)).tolist() == want == [word.most(int(n)) for n in tokens]


def test_a_share_of_the_layers_is_rounded_down_and_at_least_one():
    after = [SelectivePropagation(0.5, KeyNorm(), 0.2).after(layers) for layers in (1, 2, 3, 4, 32)]
    assert after == [0, 0, 0, 1, 15] and SelectivePropagation(7, KeyNorm(), 0.2).after(9) == 7


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1.0, KeyNorm(), 0.2), "layer must be a layer's number >= 0, or a share between 0 and 1, got 1.0"),
        ((-1, KeyNorm(), 0.2), "layer must be .*, got -1"),
        ((0, KeyNorm(), 1.5), "share of the tokens must be from 0 to 1, got 1.5"),
        ((0, KeyNorm(), 0.2, 0), "window must be a whole number >= 1, because the last token answers, got 0"),
        ((0, KeyNorm, 0.2), "the score is the class KeyNorm"),
        ((0, AccumulatedAttention(), 0.2), r"asks for AccumulatedMass\(.*, which is known later"),
        ((0, OfNow(), 0.2), r"asks for Mass\(.*, which is known later"),
        ((0, ProbeAttention(PROBE), 0.2), "asks for RepeatContext.*, which is known later"),
        ((0, OutputNorm(), 0.2), r"sees no matrices of its layer, and OutputNorm\(\) asks for them"),
    ],
)
def test_a_word_that_could_not_choose_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SelectivePropagation(*given)


NARROW = SelectivePropagation(0, KeyNorm(), 0.5)


def test_ranks_of_tokens_that_keep_their_positions_are_refused():
    with pytest.raises(ValueError, match=r"ByRank.* rotates them by others"):
        chain(Keep(Position(), HALF, Uniform(), phase=ByRank(), narrow=NARROW))


def test_what_narrows_no_prompt_is_refused():
    with pytest.raises(ValueError, match="KeyNorm is no narrowing: .* subclasses kvjax.words.Narrow"):
        Keep(KeyNorm(), HALF, Uniform(), narrow=KeyNorm())


MIXERS = {
    "layer 2 keeps no slots, and would miss the tokens left out": (
        Attention(), Attention(), Retention(2, 8, 8),
    ),
    "layer 2 takes the slots of layer 1, which has other tokens": (
        Attention(), Attention(), Attention(source=1),
    ),
    "layer 2 takes the input of layer 0, which has other tokens": (
        Attention(), Attention(), Attention(kv_input=0),
    ),
    "layer 0 takes the slots of layer 2, which has other tokens": (
        Attention(source=2), Attention(), Attention(),
    ),
    "layer 1, which chooses the tokens, has no keys of its own": (
        Attention(), Attention(source=0), Attention(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("message", "mixers"), MIXERS.items(), ids=MIXERS)
def test_models_whose_upper_layers_need_all_tokens_are_refused(message, mixers):
    config = dataclasses.replace(model("deep").config, mixers=mixers)
    with pytest.raises(InputError, match=message):
        kvjax.compat.model_fit.check_fit(FASTKV, config)


def test_a_layer_without_any_above_it_is_refused():
    with pytest.raises(InputError, match="chosen at layer 1, expected one of 0 to 0"):
        kvjax.prefill(model("4/2"), MAIN.first, method=FASTKV)


def test_a_layer_inside_stacked_ones_is_refused_before_it_runs():
    config = dataclasses.replace(model("deep").config, layers=4)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0), groups=plan(config, stacked=True)))
    method = kvjax.method("fastkv", budget=0.5, tsp_layer=2, window=WINDOW)
    ids, length = jax.ShapeDtypeStruct((1, 32), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    call = partial(steps.prefill, Run(config, method), tokens_bound=32, room=0, compress=True, cache=None)
    with pytest.raises(ValueError, match="narrower after layer 2, inside stacked layers that end at 3"):
        jax.eval_shape(call, params, ids, length)


# --- what it does ----------------------------------------------------------------------------------------


def test_upper_layers_run_for_the_tokens_that_go_on_alone():
    run, m = Run(model("deep").config, FASTKV), model("deep")
    ids, length = jax.ShapeDtypeStruct((1, 40), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    needs = steps.needs_of(run, m.params)
    fresh = jax.eval_shape(partial(steps.observe, run, cache=None, needs=needs), m.params, ids, length).fresh
    assert [f.k.shape[3] for f in fresh] == [40, 40, 30]


@pytest.mark.rotating
def test_logits_are_those_of_the_narrowed_prompt():
    rows = [Prompt(decoder("deep"), tokens, fastkv_goes_on) for tokens in PACKED]
    assert off(packed("fastkv").logits, np.stack([row.all_logits[-1] for row in rows])) < 1e-5
    # Which are others than those of the whole prompt, or nothing of this would be tested.
    plain = Prompt(decoder("deep"), PACKED[0]).all_logits[-1]
    assert off(packed("fastkv").logits[0], plain) > 1e-3


@pytest.mark.rotating
def test_tokens_are_chosen_by_keys_as_they_meet_queries_where_they_lie_unrotated():
    unrotated = dataclasses.replace(FASTKV, store=Store(unrotated=True), spec=())
    logits, cache = kvjax.prefill(model("deep"), MAIN.first, method=unrotated, room=ROOM)
    want, plain = kvjax.prefill(model("deep"), MAIN.first, method=FASTKV, room=ROOM)
    assert off(logits, want) < 1e-5 and positions(cache) == positions(plain)


@pytest.mark.rotating
def test_nothing_gets_narrower_where_nothing_is_compressed():
    logits, cache = kvjax.prefill(model("deep"), MAIN.first, method=FASTKV, room=ROOM, compress=False)
    want, full = kvjax.prefill(model("deep"), MAIN.first, room=ROOM)
    assert off(logits, want) < 1e-6 and positions(cache) == positions(full)


def second_turn(slots, tokens):
    """Logits of the last token, and per layer the new positions that it saw."""
    config = slots.decoder.config
    x, pos = slots.decoder.rest["embed"][np.asarray(tokens)], slots.next + np.arange(len(tokens))
    seen = []
    for number, (layer, lists) in enumerate(zip(slots.decoder.layers, slots.slots, strict=True)):
        seen.append(pos)
        raw_q, raw_k, v = slots.decoder.project(layer, x)
        group, q = config.heads // len(lists), rope(raw_q, pos, config.rope.theta)
        outs, received = [], np.zeros(len(pos))
        for head in range(config.heads):
            old = lists[head // group]
            at = np.array([*(s["pos"] for s in old), *pos])
            raw = np.stack([*(s["k"] for s in old), *raw_k[head // group]])
            k = rope(raw, at, config.rope.theta)
            s = q[head] @ k.T / np.sqrt(config.head_dim)
            s = np.where(at[None] > pos[:, None], -np.inf, s)
            outs.append(softmax(s) @ np.stack([*(s["v"] for s in old), *v[head // group]]))
            # Chosen by what the new tokens give each other.
            p = softmax(s[-WINDOW:, len(old) :]).mean(0)
            p[-WINDOW:] = 0
            received += pool(p[None], KERNEL, "mean")[0]
        x = slots.decoder.finish(layer, x, np.stack(outs))
        if number == LAST_WHOLE:
            received[-WINDOW:] = np.inf
            on = np.flatnonzero(best(received, max(WINDOW, int(len(tokens) * PASSED))))
            x, pos = x[on], pos[on]
    return slots.decoder.logits(x)[-1], seen


@pytest.mark.rotating
def test_a_second_turn_is_narrowed_by_itself():
    logits, cache = talk("fastkv").second
    for b in range(B):
        prompt = Prompt(decoder("deep"), MAIN.first[b], fastkv_goes_on)
        want, seen = second_turn(Slotwise(prompt, BY_LABEL["fastkv"].kept(prompt)), MAIN.second[b])
        assert off(logits[b], want) < 3e-5
        for held, new in zip(positions(cache), seen, strict=True):
            for one in held[b]:
                assert {p for p in one if p >= len(MAIN.first[b])} <= set(new.tolist())


@pytest.mark.rotating
def test_scores_stand_at_the_places_of_their_tokens():
    found = kvjax.scores(model("deep"), [MAIN.first[0]], FASTKV, continuation=[[1]])
    on = fastkv_goes_on(Prompt(decoder("deep"), MAIN.first[0]), LAST_WHOLE)
    assert all((s > -np.inf).all() for s in found.scores[: LAST_WHOLE + 1])
    above = found.scores[LAST_WHOLE + 1]
    assert (np.flatnonzero(above[0, 0] > -np.inf) == on).all()
    assert (found.kept[LAST_WHOLE + 1] <= (above > -np.inf)).all()


@pytest.mark.rotating
def test_a_size_that_is_planned_is_that_of_the_cache():
    m = model("deep")
    planned = CacheSizes(m.config, "float32", T, [Method(), FASTKV]).nbytes(FASTKV, room=ROOM)
    cache = kvjax.prefill(m, [MAIN.first[0]], method=FASTKV, room=ROOM)[1]
    assert planned == kvjax.state.cache.nbytes(cache)


# --- in a comparison -------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_a_comparison_reads_a_narrowed_prompt_by_itself():
    m = model("deep")
    entries = [PlannedCell("full", None, Method()), PlannedCell("fastkv", 0.5, FASTKV)]
    runner = Runner(m, None, entries, T, ROOM)
    tokens = np.zeros((B, T), np.int32)
    for b, row in enumerate(MAIN.first):
        tokens[b, : len(row)] = row
    nothing = np.zeros((B, 0), np.int32), np.zeros(B, np.int32), np.zeros(B, bool)
    rows = QuestionRows(tokens, np.array([len(row) for row in MAIN.first], np.int32), *nothing, [])
    shared, _ = runner.prompt(rows)
    same, none = runner.own(entries[0], shared, rows)
    assert same is shared and none is None
    mine, seconds = runner.own(entries[1], shared, rows)
    assert seconds > 0 and off(mine.logits, talk("fastkv").prompt[0]) < 1e-6
    cache = dataclasses.replace(runner.compressed(entries[1], mine), method=FASTKV)
    assert positions(cache) == positions(talk("fastkv").prompt[1])
