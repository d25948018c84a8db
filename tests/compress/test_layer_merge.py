"""Layers in pairs: what a prefill merges and what it leaves, turn by turn, and what is refused.

That steps and turns attend to what is stored, in float64, is in `tests/methods`, in the rows of `minicache`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.grammar import Budget, Method, Store
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.latent import Latent
from kvjax.models.model import Model
from kvjax.models.params import init, plan, regroup
from kvjax.place.layer_pairs import pairs_of
from kvjax.state.cache import kept_positions, nbytes
from kvjax.state.code_forms import completed
from kvjax.state.codes import dense
from kvjax.steps import Run
from kvjax.store.affine import Affine
from kvjax.store.merged import LengthAndDirection, MergedLayers
from tests.float64 import stacks
from tests.methods.battery import MAIN, ROOM, B, T, model, off, prompt_of, step, talk
from tests.methods.rows import MINI, MINI_MOST
from tests.methods.table import BY_LABEL

NAME, LABEL = "deep", "minicache"
METHOD = BY_LABEL[LABEL].method()


def parts(cache, b):
    """Of the layers 1 and 2 the merged slots and those of the tail: position -> (k, v) of every head."""
    found = []
    for layer in (1, 2):
        (body,), tail = completed(cache.groups, layer, cache.groups[layer]).bodies, cache.groups[layer].tail
        each = []
        for slots in (body, tail):
            k, v, pos = (np.asarray(x)[0, b] for x in (dense(slots.k), dense(slots.v), slots.pos))
            each.append(
                [
                    {p: (k[h, j], v[h, j]) for j, p in enumerate(lists) if p >= 0}
                    for h, lists in enumerate(pos)
                ]
            )
        found.append(each)
    return found


@pytest.mark.rotating
def test_a_prompt_leaves_one_direction_per_pair_and_the_tokens_that_stay_as_computed():
    cache = talk(LABEL).prompt[1]
    for b in range(B):
        prompt = prompt_of(NAME, "main", b)
        k, v = prompt.k[1:3], prompt.v[1:3]
        most = max(1, int(MINI_MOST * prompt.length))
        stay = stacks.apart(k, v, MINI["gamma"], most)
        assert stay.any()
        for layer, (body, tail) in enumerate(parts(cache, b)):
            for h in range(2):
                assert set(tail[h]) == set(np.flatnonzero(stay[h]))
                assert set(body[h]) == set(np.flatnonzero(~stay[h]))
                for which, rows in enumerate((k, v)):
                    e, *sizes = stacks.slerp(rows[0][h], rows[1][h], MINI["t"])
                    got = np.stack([body[h][p][which] for p in sorted(body[h])])
                    assert off(got, (e * sizes[layer][:, None])[sorted(body[h])]) < 2e-5
                for p, got in tail[h].items():
                    assert off(got[0], k[layer][h, p]) < 2e-5 and off(got[1], v[layer][h, p]) < 2e-5


@pytest.mark.rotating
def test_a_second_turn_merges_what_lay_apart_and_what_is_new_and_leaves_what_was_merged():
    """The tail and the new tokens are chosen among again; a row alone does as in a batch."""
    done, m = talk(LABEL), model(NAME)
    b, tokens = 1, MAIN.second
    before = parts(done.prompt[1], b)
    _, plain = kvjax.prefill(m, tokens, cache=done.prompt[1], room=8, compress=False)
    candidates = [tail for _, tail in parts(plain, b)]
    after = parts(done.second[1], b)
    length = len(MAIN.first[b]) + len(tokens[b])
    for h in range(2):
        among = sorted(candidates[0][h])
        assert set(among) == set(before[0][1][h]) | set(range(len(MAIN.first[b]), length))
        k, v = ([np.stack([c[h][p][i] for p in among])[None] for c in candidates] for i in (0, 1))
        stay = stacks.apart(*(np.float64(x) for x in (k, v)), MINI["gamma"], int(MINI_MOST * length))[0]
        for layer, (body, tail) in enumerate(after):
            assert set(tail[h]) == {p for p, stays in zip(among, stay, strict=True) if stays}
            assert set(body[h]) == set(range(length)) - set(tail[h])
            for p, (key, value) in before[layer][0][h].items():
                np.testing.assert_array_equal(body[h][p][0], key)
                np.testing.assert_array_equal(body[h][p][1], value)


@pytest.mark.rotating
def test_steps_in_one_pass_rows_files_and_tokens_taken_back(tmp_path):
    m, done = model(NAME), talk(LABEL)
    cache, first = done.prompt[1], MAIN.steps.T
    logits, after = kvjax.verify(m, kvjax.fork(cache, 1), first.tolist())
    for i, (want, _) in enumerate(done.steps):
        assert off(logits[:, i], want) < 1e-5
    back = kvjax.rollback(after, 2)
    for got, want in zip(kept_positions(back), kept_positions(done.steps[0][1]), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(InputError, match="a selection cannot be undone"):
        kvjax.rollback(kvjax.fork(back, 1), 2)
    got, _ = step(m, kvjax.take_rows(cache, [2, 2, 0, 3]), first[[2, 2, 0, 3], 0], append=True)
    assert off(got, done.steps[0][0][np.array([2, 2, 0, 3])]) < 1e-5
    kvjax.save_cache(tmp_path / "pairs.cache", cache)
    again = kvjax.load_cache(tmp_path / "pairs.cache")
    assert jax.tree.structure(again) == jax.tree.structure(cache) and again.method == METHOD
    np.testing.assert_array_equal(step(m, again, first[:, 0], append=True)[0], done.steps[0][0])


@pytest.mark.rotating
def test_generate_writes_what_steps_choose():
    m = model(NAME)
    made = kvjax.generate(m, MAIN.first, method=METHOD, max_new_tokens=3)
    logits, cache = kvjax.prefill(m, MAIN.first, method=METHOD, room=ROOM)
    for i in range(3):
        token = jnp.argmax(logits, -1)
        assert made.tokens[:, i].tolist() == token.tolist()
        logits, cache = step(m, cache, token, append=True)


SIZES = dict(vocab=32, d_model=32, heads=4, kv_heads=2, head_dim=32, d_ff=32)


def shapes(layers, method, dtype=jnp.bfloat16):
    """Return a model's config and parameters, and its cache of 1024 tokens."""
    config, rows = Config(layers=layers, **SIZES), jnp.asarray([T * 32], jnp.int32)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))
    sizes = dict(tokens_bound=T * 32, room=8, compress=True)
    tokens = jax.ShapeDtypeStruct((1, T * 32), jnp.int32)
    read = lambda p, t: steps.prefill(Run(config, method), p, t, rows, None, **sizes)[1]  # noqa: E731
    return config, params, jax.eval_shape(read, params, tokens)


@pytest.mark.rotating
def test_half_of_the_layers_hold_half_of_the_numbers():
    mini, int4 = kvjax.method("minicache"), kvjax.method("int4")
    full, plain, coded = (nbytes(shapes(4, x)[2]) for x in (Method(), mini, kvjax.chain(mini, int4)))
    # Per token and head, of 4 layers with keys and values of 32 channels in two bytes, and positions in four:
    # two layers as they are; a direction, lengths and positions of two; and 0.05 of the tokens twice more.
    slot, shared = 2 * 2 * 32 + 4, 2 * 2 * 32 + 2 * (2 * 2 + 4)
    assert plain / full == pytest.approx((2 * slot + shared + 0.05 * 2 * slot) / (4 * slot), rel=0.01)
    # Codes of 4 bits in groups of 32 channels have scales of 32 bits: 20 bytes in place of 64.
    slot, shared = 2 * 20 + 4, 2 * 20 + 2 * (2 * 2 + 4)
    assert coded / full == pytest.approx((2.1 * slot + shared) / (4 * (2 * 2 * 32 + 4)), rel=0.01)


def test_a_step_copies_no_slots():
    method = kvjax.method("minicache", start=0)
    config, params, cache = shapes(2, method, jnp.float32)
    one = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.bool_)
    compiled = steps.step.lower(Run(config, method.decode_part()), params, cache, *one).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(cache)
    assert memory.temp_size_in_bytes < nbytes(cache.groups[0].bodies) / 4


@pytest.mark.rotating
def test_codes_hold_directions_and_what_lies_apart():
    m, method = model(NAME), kvjax.chain(METHOD, kvjax.method("int4", group=8))
    _, cache = kvjax.prefill(m, MAIN.first, method=method, room=ROOM)
    codec = Affine(4, group=8)
    plain = talk(LABEL).prompt[1]
    for b in (0, 3):
        for (body, tail), (of_plain, apart) in zip(parts(cache, b), parts(plain, b), strict=True):
            for h in range(2):
                assert set(tail[h]) == set(apart[h])
                for p, got in body[h].items():
                    for mine, theirs in zip(got, of_plain[h][p], strict=True):
                        size = np.linalg.norm(theirs)
                        row = jnp.asarray(theirs / size)[None]
                        want = codec.decode(codec.encode(row), 16, row.dtype)[0] * size
                        assert off(mine, want) < 0.02
    got, _ = step(m, cache, MAIN.steps[0], append=True)
    assert 0 < off(got, talk(LABEL).steps[0][0]) < 0.3


@pytest.mark.rotating
def test_half_precision_stays_near_the_full_one():
    m = model(NAME)
    half = dataclasses.replace(m, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params))
    # Everything that could tip over is merged: which angle is the largest is a matter of rounding.
    method = kvjax.method("minicache", gamma=0.0)
    found = []
    for one in (m, half):
        _, cache = kvjax.prefill(one, MAIN.first, method=method, room=ROOM)
        assert cache.groups[2].bodies[0].k.data["size"].dtype == one.params["embed"].dtype
        found.append(step(one, cache, MAIN.steps[0], append=True)[0].astype(jnp.float32))
    assert off(found[1], found[0]) < 0.1


def test_layers_without_a_partner_are_left_alone():
    def found(start=0, **more):
        return pairs_of(MergedLayers(start=start), Config(**(SIZES | more)))

    assert found(layers=5) == (0, 2) and found(0.5, layers=5) == (2,) and found(1, layers=5) == (1, 3)
    assert found(layers=6, windows=(8, None, None, 8, None, None)) == (1, 4)
    narrow = Attention(kv_heads=1)
    assert found(layers=4, mixers=(Attention(), narrow, narrow, Attention())) == (1,)
    # Layer 1 reads layer 0.
    assert found(layers=4, mixers=(Attention(), Attention(source=0), Attention(), Attention())) == (2,)


def test_what_cannot_be_merged_is_refused_with_the_reason():
    for other in (
        kvjax.method("snapkv", budget=0.5),
        kvjax.method("quest", budget=0.5),
    ):
        with pytest.raises(ValueError, match="merges the tokens of two layers one by one, which needs that"):
            kvjax.chain(METHOD, other)
    with pytest.raises(
        ValueError, match="encodes 32 tokens together after a residual of 128: use int8 for this store"
    ):
        kvjax.chain(METHOD, kvjax.method("kivi"))
    with pytest.raises(ValueError, match="at most one stack"):
        kvjax.chain(METHOD, kvjax.method("minicache"))
    with pytest.raises(InputError, match="and merges of layers concern all layers together"):
        kvjax.by_layer([METHOD, None])
    with pytest.raises(ValueError, match="the stack word is the class MergedLayers, not one of its words"):
        Method(stack=MergedLayers)  # type: ignore[arg-type]
    with pytest.raises(
        InputError, match="from layer 1 of 2 up there are no two of them. Use a lower start or int4 here"
    ):
        kvjax.prefill(model("4/2"), [[1, 2]], method="minicache")
    with pytest.raises(InputError, match="minicache does not fit this model: it merges neighbouring layers"):
        latent = Latent(rank=16, rope_dim=8, nope_dim=8, value_dim=16)
        check_fit(METHOD, Config(layers=4, **(SIZES | dict(mixers=(latent,) * 4, kv_heads=4))))


@pytest.mark.rotating
def test_only_programs_of_ones_own_are_refused_layers_that_are_stacked():
    config = Config(layers=6, **SIZES)
    params = init(config, jax.random.key(0), groups=plan(config, stacked=True))
    whole, method = Model(config, params), kvjax.method("minicache", start=2, **MINI, most=MINI_MOST)
    with pytest.raises(ValueError, match="layers 2 to 5 are stacked: give the params of kvjax.prepare"):
        Run(config, method).groups(params)
    made = kvjax.prepare(whole, method)
    assert [len(g["q"]) for g in made.params["layers"]] == [2, 1, 1, 1, 1]
    assert made is kvjax.prepare(whole, method) and kvjax.prepare(made, method) is made
    assert kvjax.prepare(whole, "int8") is whole
    # Only what is merged leaves its stack.
    late = kvjax.method("minicache", start=4)
    assert [len(g["q"]) for g in kvjax.prepare(whole, late).params["layers"]] == [2, 2, 1, 1]
    gms = Run(config, late).groups(kvjax.prepare(whole, late).params)
    assert [gm.upper for gm in gms] == [False, False, False, True]
    assert Method(stack=MergedLayers(most=Budget(3))) != Method()


@pytest.mark.rotating
def test_stacked_layers_are_merged_as_those_that_are_not():
    """Prompts, steps, a second turn and a saved cache, on the model as it was given."""
    config, rng = Config(layers=6, **SIZES), np.random.default_rng(0)
    params = init(config, jax.random.key(0), groups=plan(config, stacked=False))
    whole = Model(config, regroup(params, plan(config, stacked=True)))
    method = kvjax.method("minicache", start=3, **MINI, most=MINI_MOST)
    first, second = (rng.integers(0, 32, (2, n)) for n in (20, 7))
    found = []
    for given in (Model(config, params), whole):
        logits, cache = kvjax.prefill(given, first, method=method, room=8)
        stepped, cache = kvjax.step(given, cache, [3, 5])
        again, cache = kvjax.prefill(given, second, cache=cache, room=8)
        out = kvjax.generate(given, first, method=method, max_new_tokens=3)
        found.append(((logits, stepped, again), kept_positions(cache), nbytes(cache), out.tokens))
    assert len(whole.params["layers"]) == 2 and [*whole.models_made]
    (logits, kept, size, tokens), (mine, held, own, written) = found
    assert max(off(a, b) for a, b in zip(mine, logits, strict=True)) < 1e-5
    assert size == own and np.array_equal(tokens, written)
    for a, b in zip(kept, held, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["clip", "sink", "softcap", "windows"])
def test_steps_and_passes_over_directions_and_lengths_are_those_over_whole_rows(name):
    """Also where layers attend in ways of their own; the twin's slots hold what the codes say."""
    more = {
        "clip": dict(layers=2, mixers=(Attention(clip=(-0.03, 1.03)),) * 2),
        "sink": dict(layers=2, mixers=(Attention(sink=True),) * 2),
        "softcap": dict(layers=2, attention_softcap=2.0),
        "windows": dict(layers=4, windows=(8, None, None, 8)),
    }
    config = Config(**(SIZES | dict(vocab=64) | more[name]))
    m = Model(config, init(config, jax.random.key(3)))
    _, cache = kvjax.prefill(
        m, MAIN.first, method=kvjax.method("minicache", start=int(name == "windows")), room=8
    )
    whole = [completed(cache.groups, i, group) for i, group in enumerate(cache.groups)]
    groups = tuple(
        dataclasses.replace(
            group, bodies=tuple(dataclasses.replace(s, k=dense(s.k), v=dense(s.v)) for s in group.bodies)
        )
        for group in whole
    )
    logits, _ = kvjax.verify(m, kvjax.fork(cache, 1), MAIN.steps.T.tolist())
    twin = dataclasses.replace(cache, groups=groups, method=Method())
    for i, token in enumerate(MAIN.steps):
        (got, cache), (want, twin) = step(m, cache, token, append=True), step(m, twin, token, append=True)
        assert off(got, want) < 1e-5 and off(logits[:, i], want) < 1e-5


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["latents", "pages that are read"])
def test_lengths_and_directions_are_a_store_of_their_own(name):
    """Where values lie in the keys, and where slots are picked, rows are made whole."""
    store, more = Store(LengthAndDirection(), LengthAndDirection()), dict(layers=2)
    if name == "latents":
        more |= dict(mixers=(Latent(rank=16, rope_dim=8, nope_dim=8, value_dim=16),) * 2, kv_heads=4)
    config = Config(**(SIZES | dict(vocab=64) | more))
    m = Model(config, init(config, jax.random.key(3)))
    quest = () if name == "latents" else (kvjax.method("quest", budget=1.0, page=8, skip_layers=0),)
    found = []
    for method in (kvjax.chain(store, *quest), Method()):
        _, cache = kvjax.prefill(m, MAIN.first, method=method, room=8)
        found.append(step(m, cache, MAIN.steps[0], append=True)[0])
    assert off(*found) < 1e-5
