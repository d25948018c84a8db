"""What the public calls refuse, each in one sentence, and what they take in several spellings."""

from inspect import unwrap
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.api.generate
import kvjax.api.prefill
import kvjax.api.step
from kvjax.api.sampling import Sampler
from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init


@pytest.fixture(scope="module")
def model():
    config = Config(
        vocab=32, d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=24
    )
    return Model(config, init(config, jax.random.key(5)))


def filled(model, rows=1, room=4):
    return kvjax.prefill(model, [[3, 1, 4]] * rows, room=room)[1]


@pytest.fixture(scope="module")
def cache(model):
    """Fill a cache that no test may step over."""
    return filled(model)


prefill, step, generate, fork, chain = (
    unwrap(f) for f in (kvjax.prefill, kvjax.step, kvjax.generate, kvjax.fork, kvjax.chain)
)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Let a call meet what a user's call meets: the suite checks annotations at every call."""
    for module in (kvjax.api.prefill, kvjax.api.step, kvjax.api.generate):
        for name, function in vars(module).items():
            if isinstance(function, FunctionType):
                monkeypatch.setattr(module, name, unwrap(function))


# --- rows and positions -------------------------------------------------------------------------------


def test_a_cache_takes_one_row_of_tokens_for_each_of_its_rows(model, cache):
    with pytest.raises(InputError, match="the tokens have 2 rows, the cache 1, .*kvjax.fork"):
        kvjax.prefill(model, [[1, 2], [3]], cache=cache)


def test_steps_end_at_the_last_position(model):
    _, cache = kvjax.prefill(model, [[1] * 22, [1]], room=4)
    for _ in range(2):
        _, cache = kvjax.step(model, cache, [1, 2])
    with pytest.raises(InputError, match="stands at this model's last position, 24"):
        kvjax.step(model, cache, [1, 2])


def test_steps_read_nothing_from_the_device(model, monkeypatch):
    cache, token = filled(model), jnp.array([1], jnp.int32)
    _, cache = kvjax.step(model, cache, token)

    def read(*args):
        raise AssertionError("a step waited for the device")

    monkeypatch.setattr("kvjax.api.step.tokens_that_fit", read)
    monkeypatch.setattr("kvjax.api.step.positions_left", read)
    monkeypatch.setattr("kvjax.base.checks.check_in_vocabulary", read)
    assert kvjax.step(model, cache, token)[0].shape == (1, 32)


def test_a_text_ends_at_the_last_position(model):
    with pytest.raises(InputError, match="the text has 25 tokens, this model's last position is 24"):
        model(np.ones((1, 25), int))


# --- token ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token, message",
    [
        ([32], "token id 32 is outside the vocabulary"),
        (np.array([-1]), "token id -1 is outside"),
        ([5.7], r"token must be integers .*got \[5.7\]"),
        (["5"], "token must be integers"),
        ("5", "token must be integers"),
        ([2**70], r"token must be integers \(token ids\) of 64 bits, got 1180591620717411303424: encode"),
        (jnp.array([5.0]), "token must be integers .* of float32"),
        ([[1]], r"token must be \[B\] = \[1\], one id per row, got \[1, 1\]"),
        ([[1], [2, 3]], "token is .*expected whole numbers"),
        (5, r"token must be \[B\] = \[1\]"),
    ],
    ids=str,
)
def test_a_step_takes_one_known_id_for_each_row(model, cache, token, message):
    with pytest.raises(InputError, match=message):
        step(model, cache, token)


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([[1, 32]], "token id 32 is outside"),
        (jnp.array([[-1]]), "token id -1 is outside"),
        ([[5.7]], "tokens must be integers"),
        ([["5"]], "tokens must be integers"),
        ([[1], [2, 3]], r"expected whole numbers in rows of one length: pad rows"),
        ([1, 2], r"expected \[B, T\]: wrap a single text"),
    ],
    ids=str,
)
def test_a_whole_text_has_known_ids(model, tokens, message):
    with pytest.raises(InputError, match=message):
        unwrap(type(model).__call__)(model, tokens)


@pytest.mark.parametrize(
    "tokens, lengths, message",
    [
        ([[1.9, 2.9]], None, r"row 0 of the tokens must be integers .*got \[1.9, 2.9\]"),
        ([[1], ["2"]], None, "row 1 of the tokens must be integers"),
        ([[1, 2], 3], None, "row 1 of the tokens is 3, expected a list of token ids"),
        ([[1, [2, 3]]], None, "row 0 of the tokens is"),
        ("text", None, "tokens must be integers .*encode text"),
        (np.ones((1, 6), int), [4.5], r"lengths must be integers .tokens per row., got \[4.5\]"),
        (np.ones((1, 6), int), [float("nan")], "lengths must be integers"),
        (np.ones((1, 6), int), [-1], "at least one token"),
        (np.ones((1, 6), int), 4, r"lengths must be \[B\]"),
    ],
    ids=str,
)
def test_prompts_hold_whole_ids_and_lengths(model, tokens, lengths, message):
    with pytest.raises(InputError, match=message):
        prefill(model, tokens, lengths=lengths)


def test_rows_of_several_lengths_may_be_arrays(model):
    rows = [[3, 1, 4], [1, 5]]
    want, _ = kvjax.prefill(model, rows, room=4)
    for kind in (np.array, jnp.array):
        np.testing.assert_array_equal(prefill(model, [kind(row) for row in rows], room=4)[0], want)


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "room, message",
    [
        (-5, "room is -5, expected at least 0"),
        (1e12, "room is 1000000000000.0, expected a whole number"),
        (10**12, "room is 1000000000000, expected at most 128"),
        ("8", "room is '8', expected a whole number"),
        (True, "room is True, expected a whole number"),
    ],
    ids=str,
)
def test_room_is_a_number_of_tokens_within_the_positions(model, room, message):
    with pytest.raises(InputError, match=message):
        prefill(model, [[1, 2]], room=room)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=1.5), "max_new_tokens is 1.5, expected a whole number"),
        (dict(max_new_tokens=0), "max_new_tokens is 0, expected at least 1"),
        (dict(max_new_tokens=10**12), "max_new_tokens is 1000000000000, expected at most"),
        (dict(key=0), r"key is 0, expected one PRNG key: write key=jax.random.key\(0\)"),
        (dict(key=jax.random.split(jax.random.key(0))), "key is 2 keys, expected one"),
        (dict(stop=1), r"stop is 1, expected a list of token ids: write stop=\[1\]"),
        (dict(stop="</s>"), "stop is '</s>', expected a list of token ids"),
        (dict(stop=[1.5]), r"stop is \[1.5\], expected a list of token ids"),
        (
            dict(cache="path"),
            r"cache is 'path', expected a Cache: .*kvjax.load_cache\(path\)",
        ),
        (dict(chunk=0.5), "chunk is 0.5, expected a whole number"),
        (dict(stop=[10**12]), r"stop is \[1000000000000\], expected ids of the vocabulary"),
        (dict(processors=3), "processors is 3, expected a list of functions"),
        (dict(processors=kvjax.RepetitionPenalty(1.2)), r"processors is Rep.*, expected a list of functions"),
        (dict(processors=[3]), r"processors is \[3\], expected a list of functions"),
        (dict(sampler=1.0), "sampler is 1.0, expected a kvjax.Sampler"),
        (dict(method=3), r"method is 3, expected a Method or a text such as 'snapkv\(budget=0.25\)': give"),
    ],
    ids=str,
)
def test_options_of_generate_are_checked_before_anything_runs(model, options, message):
    with pytest.raises(InputError, match=message):
        generate(model, [[1, 2]], **{"max_new_tokens": 1, **options})


def test_a_name_is_no_model():
    for verb in (generate, prefill):
        with pytest.raises(InputError, match="model is 'recall-tiny', expected what kvjax.load returns"):
            verb("recall-tiny", [[1, 2]])


def test_a_token_and_a_cache_in_each_others_place_are_refused_with_the_call(model):
    _, cache = prefill(model, [[1, 2]])
    with pytest.raises(InputError, match=r"expected kvjax.step\(model, cache, token\)"):
        kvjax.step(model, [1], cache)


@pytest.mark.parametrize("part", [0.5, None, kvjax.method])
def test_what_is_no_method_is_no_part_of_a_chain(part):
    with pytest.raises(
        ValueError, match="is no method, keep, store, read or place: build it with kvjax.method"
    ):
        chain(kvjax.method("knorm", budget=0.5), part)


@pytest.mark.rotating
def test_what_generate_returned_is_no_cache(model):
    out = kvjax.generate(model, [[1, 2]], max_new_tokens=1)
    with pytest.raises(
        InputError, match="cache is a Generated, expected .*: give the `.cache` of what generate"
    ):
        generate(model, [[1, 2]], cache=out, max_new_tokens=1)


@pytest.mark.rotating
def test_keys_of_the_old_style_and_numbers_of_numpy_work(model):
    run = lambda **options: generate(model, [[1, 2]], sampler=Sampler(1.0), **options).tokens  # noqa: E731
    want = run(max_new_tokens=2, key=jax.random.key(3))
    np.testing.assert_array_equal(run(max_new_tokens=np.int64(2), key=jax.random.PRNGKey(3)), want)


@pytest.mark.parametrize("copies", [[0, 1], 1.5, "2", True], ids=str)
def test_copies_of_rows_are_counted_in_whole_numbers(cache, copies):
    with pytest.raises(InputError, match="copies is .*expected a whole number"):
        fork(cache, copies)


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=float("nan")), dict(temperature=float("inf")), dict(temperature="1"), dict(top_k=1.5)]
    + [dict(top_p=float("nan")), dict(top_p="0.5")],
    ids=str,
)
def test_samplers_of_no_number_are_refused(wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} is .*expected a"):
        Sampler(**wrong)


# --- what is no cache and no model --------------------------------------------------------------------


@pytest.mark.parametrize("given", [3, "x", [1, 2], {"k": 2.5}, kvjax.method("int8")])
def test_bytes_are_those_of_arrays(given):
    with pytest.raises(InputError, match="nbytes is given .*, expected a cache or a pytree of arrays"):
        kvjax.nbytes(given)


def test_what_is_no_model_is_named(model):
    with pytest.raises(InputError, match="expected a cache or a pytree of arrays: give its .params"):
        kvjax.nbytes(model)
    for verb in (
        lambda: unwrap(kvjax.scores)(3, [[1]], "int8"),
        lambda: unwrap(kvjax.fit)(3, "kvzap", [[1]]),
    ):
        with pytest.raises(InputError, match="model is 3, expected what kvjax.load returns: load it first"):
            verb()
