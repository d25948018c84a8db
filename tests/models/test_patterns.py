"""Layers that take turns and are stacked as a pattern, as in hybrids, answer as single ones."""

import json
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.cache_tree import describe_cache, restore_tree
from kvjax.io.checkpoint import MARKER, load_checkpoint, save_checkpoint
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP, GatedMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.recurrent import GatedDelta
from kvjax.models.model import Model
from kvjax.models.params import check_groups, init, plan, regroup
from kvjax.models.stacking import Group, groups_in, places
from kvjax.state.layer_order import layers_of
from kvjax.steps import Run
from kvjax.steps.shared.run import stacks

LENGTHS = (24, 17)
TOKENS = np.random.default_rng(5).integers(0, 32, (2, max(LENGTHS)))
# Layers by letter: g gated delta net, a attention, b attention with another feed-forward, w in a window of 8.
MIXERS = {"g": GatedDelta(2, 8, 8), "a": Attention(), "b": Attention(), "w": Attention()}
HYBRID, WINDOWS, TWO_ATTENTIONS = "ga" + "ggga" * 3, "ww" + "wwwwwa" * 2, "ab" + "aab" * 2
PERIODS = {HYBRID: 4, WINDOWS: 6, TWO_ATTENTIONS: 3, "ga" * 3: 2}


def config_of(letters):
    return Config(
        vocab=32, d_model=16, layers=len(letters), heads=2, kv_heads=1, head_dim=8, d_ff=24,
        mixers=tuple(MIXERS[x] for x in letters), windows=tuple(8 if x == "w" else None for x in letters),
        mlps=tuple(MLP() if x == "b" else GatedMLP() for x in letters),
    )  # fmt: skip


@cache
def single(letters):
    config = config_of(letters)
    return Model(config, init(config, jax.random.key(4), groups=plan(config, stacked=False)))


@cache
def stacked(letters):
    period = PERIODS[letters]
    groups = (Group(2 + i, (len(letters) - 2) // period, period) for i in range(period))
    return single(letters).regrouped((Group(0, 1), Group(1, 1), *groups))


def sizes(groups):
    return [tuple(group) for group in groups]


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        (HYBRID, [(0, 1, 1), (1, 1, 1), *((2 + i, 3, 4) for i in range(4))]),
        ("ww" + "wwwwwa" * 4, [(0, 2, 1), *((2 + i, 4, 6) for i in range(6))]),
        # What is left after whole repetitions runs on its own.
        ("gg" + "gga" * 2 + "gg", [(0, 2, 1), *((2 + i, 2, 3) for i in range(3)), (8, 2, 1)]),
        # A kind of layers of its own comes first.
        ("aab" + "ga" * 3, [(0, 2, 1), (2, 1, 1), (3, 3, 2), (4, 3, 2)]),
        # A pattern of as many layers as there are runs compiles no faster, and equal layers are one run.
        (WINDOWS, [(0, 2, 1), (2, 5, 1), (7, 1, 1), (8, 5, 1), (13, 1, 1)]),
        ("aa" + "aabb" * 2, [(0, 2, 1), (2, 2, 1), (4, 2, 1), (6, 2, 1), (8, 2, 1)]),
        ("aa" + "a" * 6, [(0, 2, 1), (2, 6, 1)]),
        ("aa" + "ga" + "gg", [(0, 2, 1), (2, 1, 1), (3, 1, 1), (4, 2, 1)]),
        ("gaga", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]),
    ],
)
def test_kinds_of_layers_that_take_turns_are_planned_as_a_pattern(letters, expected):
    config = config_of(letters)
    groups = plan(config, stacked=True)
    assert sizes(groups) == expected and check_groups(config, groups) == groups
    assert all(group.stride == 1 for group in plan(config, stacked=True, patterns=False))


def test_layers_that_others_read_are_in_no_pattern():
    letters = "ga" * 5
    mixers = [MIXERS[x] for x in letters[:-1]] + [Attention(source=1)]
    config = Config(
        vocab=32, d_model=16, layers=10, heads=2, kv_heads=1, head_dim=8, d_ff=24, mixers=tuple(mixers)
    )
    assert {group.stride for group in plan(config, stacked=True)} == {1}


@pytest.mark.parametrize(
    "groups",
    [
        (Group(0, 1), Group(1, 1), Group(2, 3, 4), Group(3, 3, 4), Group(4, 3, 4)),
        (Group(0, 1), Group(1, 1), *(Group(2 + i, 2, 4) for i in range(4))),
        (Group(0, 1), Group(1, 1), *(Group(2 + i, 3, 4) for i in (1, 0, 2, 3))),
        (Group(0, 1), Group(1, 1), *(Group(2 + i, 1, 12) for i in range(12))),
        # Layers 2, 4, 6 are a gated delta net, one of the same, and attention.
        (Group(0, 1), Group(1, 1), *(Group(2 + i, 6, 2) for i in range(2))),
    ],
)
def test_patterns_that_miss_layers_or_mix_kinds_are_refused(groups):
    with pytest.raises(ValueError, match="pattern|groups must name|stacks layers of different"):
        check_groups(config_of(HYBRID), groups)


def test_regrouping_moves_every_layer_and_loses_none():
    one, many = single(HYBRID), stacked(HYBRID)
    # Member 1 of the pattern are layers 3, 7 and 11.
    member = many.params["layers"][2][1]
    for name, w in member.items():
        expected = [one.params["layers"][i][name][0] for i in (3, 7, 11)]
        np.testing.assert_array_equal(w, np.stack(expected))
    for groups in (plan(one.config, stacked=False), plan(one.config, stacked=True, patterns=False)):
        there = regroup(many.params, groups)
        assert groups_in(there) == groups
        jax.tree.map(np.testing.assert_array_equal, there, regroup(one.params, groups))


# --- what a pattern computes -------------------------------------------------------------------------


def talk(model, text):
    """Logits of a prompt and of 8 steps, and the cache after them."""
    logits, state = kvjax.prefill(model, TOKENS, lengths=LENGTHS, method=kvjax.method(text), room=8)
    said = [np.asarray(logits)]
    for i in range(8):
        logits, state = kvjax.step(model, state, np.array([i, i + 3]))
        said.append(np.asarray(logits))
    return np.stack(said), state


def states_of(state):
    """Collect the recurrent states of all layers, in order."""
    found = {}
    for group, layers in zip(state.groups, layers_of(state), strict=True):
        for i, number in enumerate(layers):
            found[number] = [np.asarray(x[i]) for x in jax.tree.leaves(group.state)]
    return [x for number in sorted(found) for x in found[number]]


def check_alike(letters, text):
    one, many = single(letters), stacked(letters)
    (expected, held), (got, state) = talk(one, text), talk(many, text)
    assert 1 in state.strides and max(state.strides) > 1 and held.strides == ()
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
    for a, b in zip(kvjax.kept_positions(state), kvjax.kept_positions(held), strict=True):
        np.testing.assert_array_equal(np.sort(a), np.sort(b))
    for a, b in zip(states_of(state), states_of(held), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)
    return state, held


METHODS = (
    "full", "snapkv(budget=0.5, window=4)", "h2o(budget=12)", "adakv(budget=0.5, window=4)",
    "pyramidkv(budget=0.5, window=4)", "kivi(group=8, residual=8)", "quest(budget=8, page=4)",
    "kvzip(budget=0.5)",
)  # fmt: skip
CASES = [(letters, text) for letters in (HYBRID, WINDOWS, TWO_ATTENTIONS) for text in METHODS]


def test_a_pattern_answers_as_single_layers():
    check_alike("ga" * 3, "h2o(budget=12)")


@pytest.mark.rotating
@pytest.mark.parametrize(("letters", "text"), CASES)
def test_methods_on_a_pattern_answer_as_on_single_layers(letters, text):
    check_alike(letters, text)


@pytest.mark.rotating
def test_a_batch_of_tokens_without_a_cache_and_its_gradient_are_those_of_single_layers():
    one, many = single(HYBRID), stacked(HYBRID)

    def loss(params, remat):
        from kvjax.models.transformer import forward

        return jnp.square(forward(params, jnp.asarray(TOKENS), one.config, remat=remat)).mean()

    expected = jax.jit(jax.grad(loss), static_argnums=1)(one.params, False)
    for remat in (False, True):
        got = jax.jit(jax.grad(loss), static_argnums=1)(many.params, remat)
        got = regroup(got, plan(one.config, stacked=False))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max() + 1e-9, rtol=0)


@pytest.mark.rotating
def test_joined_texts_are_read_again_as_on_single_layers():
    texts = [TOKENS[:, :9].tolist(), TOKENS[:, 9:20].tolist()]
    found = []
    for model in (single(TWO_ATTENTIONS), stacked(TWO_ATTENTIONS)):
        caches = [kvjax.prefill(model, rows, room=0)[1] for rows in texts]
        state = kvjax.join(model, caches, room=1, texts=texts, recompute=0.5)
        found.append(np.asarray(kvjax.step(model, state, np.array([3, 4]))[0]))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5 * np.abs(found[0]).max(), rtol=0)


# --- methods that treat the layers of a pattern differently ------------------------------------------

RUNS = [(0, 1, 1), (1, 1, 1), (2, 3, 1), (5, 1, 1), (6, 3, 1), (9, 1, 1), (10, 3, 1), (13, 1, 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("snapkv(budget=0.5, window=4)", None),
        ("kvzip(budget=0.5)", None),
        ("l2compress(budget=4, skip_layers=6)", RUNS),
        ("offloaded", RUNS),
    ],
)
def test_a_pattern_is_taken_apart_into_runs_where_a_method_needs_it(text, expected):
    config = config_of(HYBRID)
    run, groups = Run(config, kvjax.method(text)), plan(config, stacked=True)
    found = stacks(run, groups)
    assert sizes(found) == (sizes(groups) if expected is None else expected)
    if expected is not None:
        params = jax.eval_shape(lambda: init(config, jax.random.key(0), groups=groups))
        with pytest.raises(ValueError, match=r"stacked.*give the params of kvjax.prepare"):
            run.groups(params)


def test_allocations_see_layers_in_their_order_and_not_group_by_group():
    groups = [Group(1, 1), Group(2, 2, 3), Group(3, 2, 3), Group(4, 2, 3)]
    numbers = [number for group in groups for number in group.layers]
    assert [sorted(numbers)[place] for place in places(groups)] == numbers


# --- summaries and files -----------------------------------------------------------------------------


def test_a_cache_of_a_pattern_says_which_layers_it_holds_and_is_saved_with_them(tmp_path):
    model = stacked("ga" * 3)
    logits, state = kvjax.prefill(model, TOKENS, lengths=LENGTHS, room=2)
    assert [[*layers] for layers in layers_of(state)] == [[0], [1], [2, 4], [3, 5]]
    assert [pos.shape[-1] > 0 for pos in kvjax.kept_positions(state)] == [False, True] * 3
    assert re.search(r"layers 2, 4: states.*\n  layers 3, 5: 20.5 slots", str(kvjax.summary(state)))
    assert "1, 3, 5" in {part.where for part in kvjax.shardings(state).parts}
    kvjax.save_cache(tmp_path / "cache", state)
    again = kvjax.load_cache(tmp_path / "cache", model)
    assert again.strides == state.strides == (1, 1, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, again.groups, state.groups)
    with pytest.raises(InputError, match="model"):
        kvjax.step(single("ga" * 3), again, np.array([1, 2]))
    with pytest.raises(ValueError, match="no strides"):
        restore_tree(describe_cache(state, {}) | {"strides": [1, 1, 2, 3]}, state.method, state.model)


def test_checkpoints_hold_patterns_and_those_without_one_read_as_before(tmp_path):
    letters = "ga" * 3
    one, many = single(letters), stacked(letters)
    save_checkpoint(many, tmp_path / "pattern")
    save_checkpoint(one, tmp_path / "single")
    heads = {n: json.loads((tmp_path / n / MARKER).read_text())["groups"] for n in ("pattern", "single")}
    assert heads == {"pattern": [1, 1, [2, 2]], "single": [1] * 6}
    for folder in heads:
        for model in (one, many):
            read = load_checkpoint(tmp_path / folder, groups=groups_in(model.params))
            jax.tree.map(np.testing.assert_array_equal, read.params, model.params)
    text = json.loads((tmp_path / "pattern" / MARKER).read_text())
    (tmp_path / "pattern" / MARKER).write_text(json.dumps(text | {"groups": [1, 1, [2, 1]]}))
    with pytest.raises(InputError, match="does not describe a model"):
        load_checkpoint(tmp_path / "pattern")
