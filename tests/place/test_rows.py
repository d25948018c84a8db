"""Forked rows go their own ways as if each had been read alone; emptied rows start again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.fork import fork
from kvjax.api.prefill import read_prompt
from kvjax.api.rows import reset_rows, take_rows
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.keys import key_of
from kvjax.keep.observations.observe import Queries
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import Cache

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=32)
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2]]
STEPS = 5
METHODS = {
    "full": lambda: kvjax.method("full"),
    "h2o": lambda: kvjax.method("h2o", budget=0.5),
    "int8": lambda: kvjax.method("int8"),
    "kivi": lambda: kvjax.method("kivi", bits=2, group=4, residual=4),
    "adakv, a pool per layer": lambda: kvjax.method("adakv", budget=0.5, window=1, page=4),
    "kvzip, one pool": lambda: kvjax.method("kvzip", budget=0.5, sinks=1, page=4),
}


def in_turn(plain):
    """Every method by name; those whose segments `plain` has too run in turn."""
    return [pytest.param(n, marks=[] if n in plain else [pytest.mark.rotating]) for n in METHODS]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(CONFIG, init(CONFIG, jax.random.key(0)))


def filled(model: Model, prompt: list[list[int]], method: Method) -> Cache:
    return kvjax.prefill(model, prompt, method=method, room=STEPS)[1]


def continued(model: Model, cache: Cache, tokens: np.ndarray) -> tuple[np.ndarray, Cache]:
    """Logits of each of the given steps [B, steps], and the cache behind them."""
    out = []
    for column in tokens.T:
        logits, cache = kvjax.step(model, cache, column)
        out.append(np.asarray(logits))
    return np.stack(out), cache


def kept(cache: Cache) -> list[np.ndarray]:
    """Sort the kept positions of every layer [B, K, .], empty slots left out."""
    out = []
    for pos in kvjax.kept_positions(cache):
        ordered = np.sort(np.asarray(pos), -1)
        out.append(ordered[..., (ordered >= 0).any((0, 1))])
    return out


@pytest.mark.parametrize("name", in_turn(("kvzip, one pool",)))
@pytest.mark.rotating
def test_copies_continue_as_if_each_had_been_prefilled(name, model, rng):
    build = METHODS[name]
    tokens = rng.integers(0, CONFIG.vocab, (4, STEPS), dtype=np.int32)
    assert not np.array_equal(tokens[0], tokens[1])
    whole, separate = (
        filled(model, PROMPT, build()),
        filled(model, [PROMPT[0]] * 2 + [PROMPT[1]] * 2, build()),
    )
    forked = fork(whole, 2)
    assert forked.next.tolist() == [12, 12, 5, 5]
    expected, separate = continued(model, separate, tokens)
    actual, forked = continued(model, forked, tokens)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    for a, b in zip(kept(forked), kept(separate), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
def test_rows_are_taken_inside_jit_too(model):
    cache = filled(model, PROMPT, METHODS["kvzip, one pool"]())
    traced = jax.jit(lambda cache, index: take_rows(cache, index + 1))(cache, jnp.array([0, -1, 0]))
    for a, b in zip(
        kvjax.kept_positions(traced), kvjax.kept_positions(take_rows(cache, [1, 0, 1])), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
def test_a_fork_leaves_its_source_usable_and_one_copy_changes_nothing(model):
    cache = filled(model, PROMPT, METHODS["adakv, a pool per layer"]())
    same = fork(cache, 1)
    assert jax.tree.structure(same) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.rotating
@pytest.mark.parametrize("name", in_turn(("kivi", "kvzip, one pool")))
def test_all_rows_of_a_fork_cost_the_same(name, model):
    cache = filled(model, PROMPT, METHODS[name]())
    assert kvjax.nbytes(fork(cache, 3)) == 3 * kvjax.nbytes(cache)


@pytest.mark.rotating
@pytest.mark.parametrize("name", in_turn(("kivi",)))
def test_an_emptied_row_starts_again_and_the_others_go_on(name, model):
    more = [[9, 9, 8, 7, 9, 3, 2], [4, 6, 2, 6, 4, 3, 3]]
    cache = filled(model, PROMPT, METHODS[name]())
    emptied = reset_rows(cache, [False, True])
    assert emptied.next.tolist() == [12, 0]
    assert all((np.asarray(pos)[1] == -1).all() for pos in kvjax.kept_positions(emptied))
    for a, b in zip(kvjax.kept_positions(emptied), kvjax.kept_positions(cache), strict=True):
        np.testing.assert_array_equal(a[0], b[0])

    untouched, _ = kvjax.prefill(model, more, cache=cache, room=STEPS)
    actual, after = kvjax.prefill(model, more, cache=emptied, room=STEPS)
    np.testing.assert_array_equal(actual[0], untouched[0])
    # What a prompt's last token sees is compressed only afterwards.
    np.testing.assert_allclose(actual[1], model(jnp.array(more, jnp.int32))[1, -1], rtol=1e-5, atol=1e-5)
    assert after.next.tolist() == [19, 7]


@pytest.mark.rotating
def test_an_emptied_row_remembers_no_queries(model, rng):
    """A window longer than the prompt: only the prompt's own queries vote on what stays, at 20 positions."""
    method, prompts = (
        kvjax.method("alisa", budget=6, window=32),
        rng.integers(0, CONFIG.vocab, (8, 20)).tolist(),
    )
    fresh = filled(model, prompts, method)
    emptied = reset_rows(filled(model, prompts[::-1], method), [True] * 8)
    _, again = kvjax.prefill(model, prompts, cache=emptied, room=STEPS)
    _, turned = read_prompt(model, prompts, method=method, cache=None, room=STEPS, turn=True)
    for cache in (fresh, again, turned):
        for group in cache.groups:
            _, positions = group.rows[key_of(Queries(32))]
            np.testing.assert_array_equal(positions[0, 0], [-1] * 12 + [*range(20)])
    for a, b, c in zip(kept(fresh), kept(again), kept(turned), strict=True):
        np.testing.assert_array_equal(a[..., -6:], b[..., -6:])
        np.testing.assert_array_equal(a[..., -6:], c[..., -6:])


@pytest.mark.rotating
def test_an_emptied_row_can_be_stepped_from_its_first_token(model):
    cache = reset_rows(filled(model, PROMPT, METHODS["adakv, a pool per layer"]()), np.array([True, False]))
    actual, _ = kvjax.step(model, cache, [7, 1])
    np.testing.assert_allclose(actual[0], model(jnp.array([[7]], jnp.int32))[0, 0], rtol=1e-5, atol=1e-5)


def test_wrong_arguments_say_what_is_expected(model):
    cache = filled(model, PROMPT, METHODS["full"]())
    with pytest.raises(InputError, match="copies is 0, expected at least 1"):
        fork(cache, 0)
    for index in (np.array([[0]]), np.array([], int), np.array([0.5]), [0, 2], [-1]):
        with pytest.raises(InputError, match=r"index is .*, expected"):
            take_rows(cache, index)
    with pytest.raises(InputError, match=r"rows is bool\[3\], expected one boolean per row, bool\[2\]"):
        reset_rows(cache, [True, False, True])
    with pytest.raises(InputError, match=r"rows is int32\[2\], expected one boolean per row"):
        reset_rows(cache, np.array([0, 1], np.int32))


@pytest.mark.rotating
def test_a_row_that_needs_more_pages_than_others_is_taken_whole(model):
    """Where how many slots stay follows from the data, pools are cut to what all rows need together."""
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 32, n).tolist() for n in (32, 6, 5)]
    method = kvjax.method("simlayerkv", threshold=1.0, sinks=1, window=2, page=4)
    cache = kvjax.prefill(model, rows, method=method, room=4)[1]
    for index in ([0], [0, 0, 1], [2, 1]):
        taken = kvjax.take_rows(cache, index)
        for layer in kvjax.kept_positions(taken):
            for held, row in zip(layer, index, strict=True):
                assert all(sorted(p[p >= 0].tolist()) == list(range(len(rows[row]))) for p in held)
    with pytest.raises(InputError, match="index is traced, expected numbers"):
        jax.jit(lambda i: kvjax.take_rows(cache, i))(jnp.asarray([0]))
