"""Models that methods make: Palu's weights, what runs on them, and what is refused."""

import dataclasses
import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import Fitted
from kvjax.keep.budgets.budget import Uniform
from kvjax.make.grouped_low_rank import GroupedLowRank, shared_out
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from kvjax.models.params import shapes
from kvjax.ops.base.rope import Rope
from kvjax.steps import Run
from kvjax.store.affine import Affine
from kvjax.store.rotate import Rotate
from tests.float64.reference import Prompt
from tests.methods.battery import MAIN, decoder, model, off, positions

# Everything that decides how keys are rebuilt: groups, biases, norms, a window with a rotation of its own.
CONFIG = Config(
    vocab=64, d_model=32, layers=2, heads=8, kv_heads=4, head_dim=8, d_ff=24, qkv_bias=True, qk_norm="head",
    windows=(None, 9), rope_local=Rope(theta=50.0),
)  # fmt: skip
HEADS, RANK, WIDTH = 2, 6, 16


def is_shape(x):
    return isinstance(x, tuple) and isinstance(x[0], int)


@cache
def plain() -> Model:
    draw = np.random.default_rng(5)
    sized = lambda shape: jnp.asarray(0.4 * draw.normal(size=shape), jnp.float32)  # noqa: E731
    return Model(CONFIG, jax.tree.map(sized, shapes(CONFIG), is_leaf=is_shape))


def palu(**hyper):
    return kvjax.method("palu", **{"rank": RANK, "heads": HEADS} | hyper)


def moments(draw):
    """Second moments of inputs, and what `kvjax.fit` would give: those of keys and values, and slopes."""
    root = draw.normal(size=(2, 32, 32))
    c = root @ root.swapaxes(1, 2)
    weights = {n: np.stack([np.asarray(p[n][0], np.float64) for p in plain().params["layers"]]) for n in "kv"}
    found = {name: weights[name[0]].swapaxes(1, 2) @ c @ weights[name[0]] for name in ("keys", "values")}
    return c, Fitted(found | {"fisher": np.array([[1.0, 2.0], [3.0, 6.0]])}, "GroupedLowRank", "")


def closest(w, rank, c=None):
    """Find A B of rank `rank` that minimises the mean |x (W - A B)|^2 for inputs of second moments C."""
    root = np.eye(len(w)) if c is None else np.linalg.cholesky(c).T
    u, s, v = np.linalg.svd(root @ w, full_matrices=False)
    return np.linalg.solve(root, (u[:, :rank] * s[:rank]) @ v[:rank])


def products(made, layer):
    """Compute A B of keys side by side, and per query head the map from inputs to outputs of A_v and W_o."""
    p, mixer = made.params["layers"][layer], made.config.mixers[layer]
    p = {n: np.asarray(x[0], np.float64) for n, x in p.items()}
    keys = [a @ b for a, b in zip(np.split(p["k_down"], 2, 1), p["k_up"], strict=True)]
    out = p["o"].reshape(8, mixer.value_rank, 32)
    down = np.split(p["v_down"], 2, 1)
    return np.concatenate(keys, 1), np.stack([down[n // 4] @ out[n] for n in range(8)])


@pytest.mark.rotating
@pytest.mark.parametrize("by", ["weights", "texts", "fisher"])
def test_products_are_the_closest_of_their_rank_and_values_are_part_of_the_output(by):
    c, fitted = moments(np.random.default_rng(6))
    more = {"weights": {}, "texts": dict(fitted=fitted), "fisher": dict(fitted=fitted, ranks="fisher")}[by]
    made = kvjax.prepare(plain(), palu(**more))
    # Of 4 x 6 channels in all, in proportion 1 : 2 : 3 : 6.
    ranks = [(2, 4), (6, 12)] if by == "fisher" else [(RANK, RANK)] * 2
    assert [(m.key_rank, m.value_rank) for m in made.config.mixers] == ranks
    for layer, p in enumerate(plain().params["layers"]):
        k, v, o = (np.asarray(p[n][0], np.float64) for n in "kvo")
        seen = None if by == "weights" else c[layer]
        key, value = (
            np.concatenate([closest(x, rank, seen) for x in np.split(w, 2, 1)], 1)
            for w, rank in zip((k, v), ranks[layer], strict=True)
        )
        keys, outputs = products(made, layer)
        assert off(keys, key) < 2e-6
        value, o = value.reshape(32, 4, 8), o.reshape(8, 8, 32)
        assert off(outputs, [value[:, n // 2] @ o[n] for n in range(8)]) < 2e-6


def multiplied_out(rank=RANK, heads=HEADS):
    """Put A B in place of W in the model that was given: attention as it always was."""
    layers = []
    for p in plain().params["layers"]:
        groups = {n: np.split(np.asarray(p[n][0], np.float64), 4 // heads, 1) for n in "kv"}
        new = {n: np.concatenate([closest(w, rank) for w in each], 1) for n, each in groups.items()}
        layers.append({**p, **{n: jnp.asarray(x[None], jnp.float32) for n, x in new.items()}})
    return dataclasses.replace(plain(), params={**plain().params, "layers": tuple(layers)})


TEXT = np.random.default_rng(8).integers(0, 64, (2, 40))


@cache
def wanted():
    return np.asarray(multiplied_out()(TEXT))


@pytest.mark.rotating
def test_a_prompt_and_steps_are_those_of_the_weights_multiplied_out():
    read = np.array([27, 16])
    logits, cache = kvjax.prefill(plain(), [TEXT[0, :27], TEXT[1, :16]], method=palu(), room=8)
    assert off(logits, wanted()[[0, 1], read - 1]) < 1e-5
    full, _ = (cache.groups[i].tail for i in range(2))
    # 32 tokens and 8 of room, for two lists of two latents and a position each; the window has its own.
    assert full.k.shape == full.v.shape == (1, 2, 2, 40, RANK)
    assert kvjax.nbytes(full) == 2 * 2 * 40 * (2 * RANK * 4 + 4)
    for i in range(3):
        logits, cache = kvjax.step(plain(), cache, TEXT[[0, 1], read + i])
        assert off(logits, wanted()[[0, 1], read + i]) < 1e-5


@pytest.mark.rotating
def test_chunks_and_later_turns_are_those_of_the_weights_multiplied_out(tmp_path):
    logits, cache = kvjax.prefill(plain(), TEXT[:, :24], method=palu(), room=20, chunk=8)
    assert off(logits, wanted()[:, 23]) < 1e-5
    kvjax.save_cache(tmp_path / "cache", cache)
    kept = kvjax.load_cache(tmp_path / "cache")
    logits, cache = kvjax.prefill(plain(), TEXT[:, 24:33], cache=kept)
    assert off(logits, wanted()[:, 32]) < 1e-5
    logits, cache = kvjax.verify(plain(), cache, TEXT[:, 33:37])
    assert off(logits, wanted()[:, 33:37]) < 1e-5
    out = kvjax.generate(plain(), TEXT[:, 37:], cache=cache, max_new_tokens=3)
    assert out.tokens[:, 0].tolist() == wanted()[:, -1].argmax(-1).tolist()


@pytest.mark.rotating
def test_a_rotation_in_the_weights_is_the_one_that_a_codec_makes():
    folded, bare = (kvjax.prepare(plain(), palu(rotate=x)).params["layers"][1] for x in (True, False))
    turn, x = Rotate().matrix(RANK), jnp.asarray(np.random.default_rng(7).normal(size=(50, 32)), jnp.float32)
    assert off(folded["k_up"][0], turn @ np.asarray(bare["k_up"][0], np.float64)) < 1e-6
    for name in ("k_down", "v_down"):
        mine, theirs = (np.asarray(x @ p[name][0]).reshape(50, 2, RANK) for p in (folded, bare))
        assert off(mine, theirs @ turn.T) < 1e-6
        one, other = (
            c.encode(jnp.asarray(y)) for c, y in ((Affine(4), mine), (Rotate() >> Affine(4), theirs))
        )
        back = [np.asarray(Affine(4).decode(data, RANK, jnp.float32)) for data in (one, other)]
        # Rounding in the rotation moves a code to its neighbour now and then.
        assert (np.abs(back[0] - back[1]) > 1e-2).mean() < 0.01


@pytest.mark.rotating
def test_a_method_behind_it_acts_on_the_model_that_was_made():
    made = kvjax.prepare(plain(), palu(rank=8))
    chained = kvjax.chain(palu(rank=8), kvjax.method("kivi", bits=2, group=8, residual=8))
    assert chained.id == "palu + kivi" and kvjax.prepare(plain(), chained) is made
    behind = dataclasses.replace(chained, make=None, spec=())
    (mine, cache), (theirs, other) = (
        kvjax.prefill(m, TEXT[:, :32], method=x, room=8) for m, x in ((plain(), chained), (made, behind))
    )
    assert off(mine, theirs) == 0
    for a, b in zip(jax.tree.leaves(cache.groups), jax.tree.leaves(other.groups), strict=True):
        np.testing.assert_array_equal(a, b)


@partial(jax.jit, static_argnames="run")
def scored(run, params):
    tokens, lengths, needs = jnp.asarray(TEXT[:, :32]), jnp.full(2, 32), steps.needs_of(run, params)
    return steps.scored(run, params, steps.observe(run, params, tokens, lengths, None, needs))


def test_scores_look_at_the_heads_that_are_computed_from_latents():
    snap, made = kvjax.method("snapkv", budget=0.5, window=4), kvjax.prepare(plain(), palu())
    found, want = (scored(Run(m.config, snap), m.params)[0][0] for m in (made, multiplied_out()))
    assert found.shape == (2, 2, 32) and want.shape == (2, 4, 32)
    # A list has the mean of its two heads; those that are protected stay at infinity.
    mean = np.asarray(want).reshape(2, 2, 2, 32).mean(2)
    np.testing.assert_allclose(found, mean, rtol=1e-4)
    assert kvjax.pure.bind(kvjax.chain(palu(), snap), made).id == "palu + snapkv"


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("id", "hyper"),
    [("snapkv", dict(window=4)), ("adakv", dict(window=4, page=4)), ("h2o", {})],
)
def test_a_keep_behind_latents_of_single_heads_keeps_what_it_keeps_of_their_keys(id, hyper):
    method = kvjax.method(id, budget=0.5, **hyper)
    models = (plain(), kvjax.chain(palu(rank=5, heads=1), method)), (multiplied_out(5, 1), method)
    said = []
    for m, one in models:
        first, cache = kvjax.prefill(m, TEXT[:, :32], method=one, room=12, chunk=16)
        step, cache = kvjax.step(m, cache, TEXT[:, 32])
        turn, cache = kvjax.prefill(m, TEXT[:, 33:40], cache=cache)
        last, cache = kvjax.step(m, cache, TEXT[:, 0])
        said.append((np.stack([first, step, turn, last]), positions(cache)))
    assert off(said[0][0], said[1][0]) < 1e-5 and said[0][1] == said[1][1]


def test_what_is_made_is_remembered_and_has_a_fingerprint_of_its_own():
    made, again = (kvjax.prepare(plain(), palu()) for _ in range(2))
    assert made is again is kvjax.prepare(made, palu()) and kvjax.prepare(plain(), "int8") is plain()
    assert kvjax.prepare(plain(), palu(rank=1.0)) is not kvjax.prepare(plain(), palu(rank=1))
    prints = {m.fingerprint for m in (plain(), made, kvjax.prepare(plain(), palu(rank=7)))}
    assert len(prints) == 3
    # A copy with other weights was made by nobody: it has the fingerprint of its weights.
    copy = dataclasses.replace(made, params=made.params)
    assert copy.made_by is None and copy.fingerprint not in prints
    assert json.loads(json.dumps(palu().spec)) == ["palu", [["heads", 2], ["rank", 6]]]


@pytest.mark.rotating
def test_full_rank_loses_nothing_where_a_bias_or_none_is_given():
    config = dataclasses.replace(CONFIG, qkv_bias=False, o_bias=False, qk_norm="full", windows=())
    some = plain().params
    kept = lambda p: {n: x for n, x in p.items() if n in wants}  # noqa: E731
    wants = shapes(config)["layers"][0]
    layers = tuple(
        kept(p) | {n: jnp.ones((1, *wants[n][1:])) for n in ("q_norm", "k_norm")} for p in some["layers"]
    )
    bare = Model(config, some | {"layers": layers})
    assert off(kvjax.prepare(bare, palu(rank=1.0))(TEXT), bare(TEXT)) < 1e-5


REFUSED = [
    (
        dict(rank=17),
        "palu does not fit this model: rank=17 is more than the 16 channels of a group of 2 heads",
    ),
    (dict(heads=3), "palu does not fit this model: 4 KV heads cannot be cut into groups of 3"),
]


@pytest.mark.parametrize(("hyper", "message"), REFUSED)
def test_ranks_and_groups_that_a_model_has_not_are_refused(hyper, message):
    with pytest.raises(InputError, match=message):
        kvjax.prefill(plain(), TEXT, method=palu(**hyper))


def test_what_it_cannot_be_put_into_is_refused():
    gated = Model(dataclasses.replace(CONFIG, mixers=(Attention(), Attention(gate=True))), plain().params)
    with pytest.raises(InputError, match=r"palu does not fit .* and layer 1 is Attention\(.*gate=True"):
        kvjax.prefill(gated, TEXT, method=palu())
    with pytest.raises(
        ValueError, match=r"palu \+ morphkv cannot work: this keep scores stored keys .* latents"
    ):
        kvjax.chain(palu(), kvjax.method("morphkv", budget=0.5))
    with pytest.raises(InputError, match="palu rewrites a model's weights, and this model has its own: give"):
        kvjax.pure.static(plain(), palu())
    made = kvjax.prepare(plain(), palu())
    assert kvjax.pure.static(made, palu()).reading.config == made.config
    with pytest.raises(InputError, match=r"palu makes its own weights .* model was made by GroupedLowRank\("):
        kvjax.prefill(made, TEXT, method=palu(rank=3))
    with pytest.raises(InputError, match="rewritten weights, .* concern all layers together"):
        kvjax.by_layer([palu(), None])
    with pytest.raises(ValueError, match="one make; this chain has two, of palu and palu: leave one out"):
        kvjax.chain(palu(), palu())
    with pytest.raises(ValueError, match="int is no make: .* subclasses kvjax.words.Make"):
        Method(make=3)
    with pytest.raises(ValueError, match="need arrays: run `kvjax fit palu --model MODEL"):
        palu(ranks="fisher")
    twice = Keep(None, Budget(1.0), Uniform(), per_query_head=True)
    with pytest.raises(ValueError, match="this keep repeats stored keys, which needs .* latents"):
        kvjax.chain(palu(), twice)


def test_ranks_are_shared_out_in_proportion_and_none_beyond_its_channels():
    draw = np.random.default_rng(9)
    for _ in range(200):
        count, most = draw.integers(1, 9), int(draw.integers(1, 20))
        total = int(draw.integers(count, count * most + 1))
        weights = draw.exponential(size=count) ** 4
        found = shared_out(total, weights, most)
        assert found.sum() == total and found.min() >= 1 and found.max() <= most
        # Whoever is between the ends has its proportion of what those share, but for rounding.
        inside = (found > 1) & (found < most)
        share = weights[inside] * found[inside].sum() / (weights[inside].sum() or 1.0)
        assert (np.abs(found[inside] - share) < 2).all()


@pytest.mark.rotating
def test_a_fit_has_the_moments_of_keys_and_values_and_the_slopes_of_the_loss():
    m, rows = model("4/2"), [row[:n] for row, n in zip(MAIN.first[:3], (9, 7, 12), strict=True)]
    found = kvjax.fit(m, "palu", rows, batch=2)
    prompts = [Prompt(decoder("4/2"), row) for row in rows]
    squares = 0.0

    def loss(params, row):
        said = jax.nn.log_softmax(dataclasses.replace(m, params=params)(jnp.asarray([row]))[0])
        return -jnp.mean(said[np.arange(len(row) - 1), np.array(row[1:])])

    for row in rows:
        slopes = jax.grad(loss)(m.params, row)["layers"]
        squares += np.array([[np.square(p[n][0], dtype=np.float64) for n in "kv"] for p in slopes])
    np.testing.assert_allclose(found.arrays["fisher"], np.sqrt(squares / 3).mean((2, 3)), rtol=1e-4)
    for layer, name in ((i, n) for i in range(2) for n in ("keys", "values")):
        w = np.asarray(m.params["layers"][layer][name[0]][0], np.float64)
        y = np.concatenate([p.hidden[layer] for p in prompts]) @ w
        assert off(found.arrays[name][layer], y.T @ y / len(y)) < 1e-5
    assert kvjax.prepare(m, kvjax.method("palu", fitted=found, ranks="fisher")).config.mixers
    with pytest.raises(InputError, match="palu: it was fitted to another model"):
        kvjax.prepare(model("6/3"), palu(fitted=found))
    assert GroupedLowRank(2, fitted=found) == GroupedLowRank(2, fitted=found)
