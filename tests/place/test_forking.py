"""Copies that have a past in common write what copies of their own would, and the past is there once."""

import dataclasses
from functools import partial
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.aot.reading import large_copies
from kvjax.api import generate as generation
from kvjax.api.decode_loop import Draws, write_slice
from kvjax.api.fork import _forked, fork
from kvjax.api.sampling import Sampler
from kvjax.api.step import OneStep
from kvjax.base.errors import InputError
from kvjax.grammar import chain
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.recurrent import GatedDelta
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.place.common import is_shared
from kvjax.state.cache import nbytes
from kvjax.steps import Run
from tests.compilation import optimised
from tests.models.architectures import TABLE
from tests.models.conversation import TEXTS
from tests.models.conversation import model as small
from tests.sweep import sweep

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=32)
HYBRID = dataclasses.replace(
    CONFIG, layers=3, mixers=(Attention(), GatedDelta(2, 6, 5), Attention()), windows=(None, None, 6)
)
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [2, 7, 1, 8, 2]]
COPIES, STEPS, ROOM = 3, 4, 8
METHODS = {
    "full": lambda: kvjax.method("full"),
    "int8": lambda: kvjax.method("int8"),
    "rotated codes": lambda: kvjax.method("turboquant"),
    "snapkv": lambda: kvjax.method("snapkv", budget=0.5, window=1),
    "biases": lambda: kvjax.method("full"),
    "adakv, a pool per layer": lambda: kvjax.method("adakv", budget=0.5, window=1, page=4),
    "kvzip, one pool": lambda: kvjax.method("kvzip", budget=0.5, sinks=1, page=4),
    "pages of codes": lambda: chain(METHODS["kvzip, one pool"](), kvjax.method("int8")),
    "h2o": lambda: kvjax.method("h2o", budget=0.5),
    "kivi": lambda: kvjax.method("kivi", bits=2, group=4, residual=4),
    "quest": lambda: kvjax.method("quest", budget=0.5, page=4, skip_layers=1),
    "hybrid": lambda: kvjax.method("full"),
}
COPIED = ("h2o", "kivi")


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    made = {name: Model(c, init(c, jax.random.key(0))) for name, c in (("", CONFIG), ("hybrid", HYBRID))}
    return {name: made.get(name, made[""]) for name in METHODS}


@pytest.fixture(scope="module")
def model(models) -> Model:
    return models["full"]


def read(model, method, room=ROOM):
    return kvjax.prefill(model, PROMPT, method=method, room=room)[1]


def biased(cache, rng):
    """Bias the logits of the cache's slots, as merges leave them."""

    def with_bias(group):
        bias = jnp.asarray(rng.normal(size=group.tail.pos.shape), jnp.float32)
        return group.with_tail(dataclasses.replace(group.tail, bias=bias))

    return dataclasses.replace(cache, groups=tuple(map(with_bias, cache.groups)))


def close(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def stepped(model, caches, tokens):
    """Every cache behind the tokens [R, steps], whose logits must agree in all of them."""
    for column in tokens.T:
        logits, caches = zip(*(kvjax.step(model, cache, column) for cache in caches), strict=True)
        for other in logits[1:]:
            close(other, logits[0])
    return caches


def same_positions(a, b):
    """Slots hold the same tokens, in whichever order and among however many empty ones."""
    for x, y in zip(kvjax.kept_positions(a), kvjax.kept_positions(b), strict=True):
        for at in np.ndindex(x.shape[:2]):
            assert sorted(x[at][x[at] >= 0]) == sorted(y[at][y[at] >= 0])


# --- the same text, wherever the past lies ------------------------------------------------------------


@pytest.mark.rotating
@pytest.mark.parametrize("name", METHODS)
def test_copies_with_a_past_in_common_go_on_as_copies_of_their_own_do(name, models, rng):
    """Steps, and a second turn, which a method compresses for every row."""
    m = models[name]
    cache = biased(read(m, METHODS[name]()), rng) if name == "biases" else read(m, METHODS[name]())
    plain, shared = fork(cache, COPIES), fork(cache, COPIES, room=ROOM)
    assert is_shared(shared) == (name not in COPIED) and not is_shared(plain)
    tokens = rng.integers(0, CONFIG.vocab, (6, STEPS + 3), dtype=np.int32)
    plain, shared = stepped(m, (plain, shared), tokens[:, :STEPS])
    same_positions(plain, shared)
    want, plain = kvjax.prefill(m, tokens[:, STEPS:], cache=plain, room=2)
    got, shared = kvjax.prefill(m, tokens[:, STEPS:], cache=shared, room=2)
    close(got, want)
    same_positions(plain, shared)


@pytest.mark.parametrize("name", sweep(METHODS))
def test_copies_of_copies_share_what_each_of_them_had(name, models, rng):
    """The turn between is stored as it is, so what was in common stays so."""
    m = models[name]
    cache, turn = read(m, METHODS[name]()), rng.integers(0, CONFIG.vocab, (4, 3))
    plain, shared = (
        kvjax.prefill(m, turn, cache=c, room=4, compress=False)[1]
        for c in (fork(cache, 2), fork(cache, 2, room=ROOM))
    )
    twice, again = fork(plain, 2), fork(shared, 2, room=ROOM)
    assert nbytes(again) < nbytes(fork(shared, 2)) or name in COPIED
    same_positions(*stepped(m, (twice, again), rng.integers(0, CONFIG.vocab, (8, 2), dtype=np.int32)))


@pytest.mark.parametrize("name", sweep(TABLE))
def test_layers_of_every_architecture_read_what_is_in_common(name):
    m, tokens = small(name), np.repeat(TEXTS[:2], 2, 0)
    _, cache = kvjax.prefill(m, TEXTS[:2, :9], room=8)
    plain, shared = stepped(m, (fork(cache, 2), fork(cache, 2, room=8)), tokens[:, 9:11])
    want, a = kvjax.prefill(m, tokens[:, 11:14], cache=plain, room=4)
    got, b = kvjax.prefill(m, tokens[:, 11:14], cache=shared, room=4)
    close(got, want)
    stepped(m, (a, b), tokens[:, 14:16])


@pytest.mark.parametrize("name", sweep(["full", "int8", "kvzip, one pool"]))
def test_turns_behind_one_prefix_are_what_whole_prompts_are(name, models, rng):
    """The prefix is read once and lies there once; nothing of it is compressed again."""
    m, prefix = models[name], PROMPT[:1]
    turns = [rng.integers(0, CONFIG.vocab, n).tolist() for n in (5, 1, 9, 3)]
    _, cache = kvjax.prefill(m, prefix, method=METHODS[name](), room=0)
    shared = fork(cache, len(turns), room=16)
    got, shared = kvjax.prefill(m, turns, cache=shared, room=4, compress=False)
    assert is_shared(shared) and shared.next.tolist() == [len(prefix[0]) + len(t) for t in turns]
    if name == "full":
        want, apart_from = kvjax.prefill(m, [prefix[0] + t for t in turns], room=4)
    else:
        want, apart_from = kvjax.prefill(m, turns, cache=fork(cache, len(turns)), room=4, compress=False)
    close(got, want)
    stepped(m, (apart_from, shared), rng.integers(0, CONFIG.vocab, (4, 3), dtype=np.int32))


@pytest.mark.rotating
def test_turns_in_chunks_over_a_common_past_are_turns_at_once(model, rng):
    shared, turns = fork(read(model, METHODS["full"]()), 2, room=4), rng.integers(0, CONFIG.vocab, (4, 11))
    want, plain = kvjax.prefill(model, turns, cache=shared, room=4)
    got, pieces = kvjax.prefill(model, turns, cache=shared, room=4, chunk=4)
    close(got, want)
    assert is_shared(pieces) and nbytes(pieces) == nbytes(plain)


@pytest.mark.rotating
def test_beams_and_samples_over_a_common_past_write_what_copies_write(model, monkeypatch):
    def written():
        beams = kvjax.generate(model, PROMPT, method=METHODS["full"](), max_new_tokens=5, beams=3, stop=[1])
        drawn = kvjax.generate(model, PROMPT, max_new_tokens=5, samples=3, sampler=Sampler(1.0), stop=[])
        return beams, drawn

    shared = written()
    monkeypatch.setattr(generation, "fork", lambda cache, copies, room: fork(cache, copies))
    for got, want in zip(shared, written(), strict=True):
        assert is_shared(got.cache) and not is_shared(want.cache)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        close(got.scores, want.scores)
        same_positions(got.cache, want.cache)


@pytest.mark.rotating
def test_neither_a_fork_nor_its_source_is_lost_with_the_other(model):
    cache = read(model, METHODS["full"]())
    first, second = fork(cache, 2, room=ROOM), fork(cache, 2, room=ROOM)
    want = kvjax.step(model, fork(cache, 2), [1, 2, 3, 4])[0]
    close(kvjax.step(model, first, [1, 2, 3, 4])[0], want)
    kvjax.step(model, cache, [1, 2])
    close(kvjax.step(model, second, [1, 2, 3, 4])[0], want)


# --- what it costs ------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_a_prompt_counts_once_and_every_copy_for_its_room(model):
    cache = read(model, METHODS["full"]())
    per_slot = CONFIG.layers * CONFIG.kv_heads * (2 * CONFIG.head_dim * 4 + 4)
    # Room that was not used is not kept: of 18 tokens and room for 8, the slots of 18 are in a bucket of 32.
    prompt = min(32, cache.groups[0].tail.capacity)
    for copies, room in ((2, 4), (5, 64)):
        rows = len(PROMPT) * copies
        assert nbytes(fork(cache, copies, room=room)) == 4 * rows + per_slot * (2 * prompt + rows * room)


def test_pages_count_once(models):
    name = "kvzip, one pool"
    cache = read(models[name], METHODS[name]())
    shared = fork(cache, 5, room=4)
    tables = [group.bodies[0] for group in cache.groups]
    tails = CONFIG.layers * CONFIG.kv_heads * 10 * 4 * (2 * CONFIG.head_dim * 4 + 4)
    assert nbytes(shared) == nbytes((cache.pools, tables)) + tails + 10 * 4


@pytest.mark.rotating
@pytest.mark.parametrize(("pages", "slices"), sweep([(0, 0), (0, 1), (1, 0), (1, 1)], (0, 0)))
def test_a_step_over_a_common_past_makes_no_second_cache(pages, slices):
    """Neither of all it holds nor, for the copies, of what they have in common."""
    config = dataclasses.replace(CONFIG, heads=2, d_model=32, head_dim=16)
    copies, tokens, shape = 8, 4096, jax.ShapeDtypeStruct
    method = kvjax.method("adakv", budget=4096, window=8, page=64) if pages else kvjax.method("full")
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    _, cache = jax.eval_shape(
        partial(steps.prefill, Run(config, method), tokens_bound=tokens, room=8, compress=True),
        params, shape((1, tokens), jnp.int32), shape((1,), jnp.int32), None,
    )  # fmt: skip
    share = partial(_forked, copies=copies, slots=(16 if pages else tokens,) * len(cache.groups), room=8)
    shared = jax.eval_shape(share, cache)
    assert nbytes(shared) < 1.2 * nbytes(cache)
    run = Run(config, method.decode_part())
    token, row, one = shape((copies,), jnp.int32), shape((copies,), jnp.bool_), shape((), jnp.int32)
    if slices:
        keys = jax.eval_shape(lambda: jnp.broadcast_to(jax.random.key(0), (copies,)))
        draws = Draws(Sampler().settings, keys, shape((8,), jnp.int32), token)
        logits = shape((copies, config.vocab), jnp.float32)
        lowered = write_slice.lower(OneStep(run), params, shared, logits, row, draws, one, one)
    else:
        lowered = steps.step.lower(run, params, shared, token, row)
    with optimised(True):
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes + nbytes(shared.pools) >= 0.99 * nbytes(shared)
    assert memory.temp_size_in_bytes < (0.7 if pages else 0.3) * nbytes(shared)
    layer = nbytes(shared.pools[0].k if pages else shared.groups[0].bodies[0].k)
    assert large_copies(compiled.as_text(), layer) == 0


# --- other verbs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(model):
    """Make copies of their own, and copies with a past in common, both behind some tokens of their own."""
    cache = read(model, METHODS["full"](), room=16)
    turn = [[1, 2, 3], [4], [5, 6], [7, 8, 9]]
    return [kvjax.prefill(model, turn, cache=c, room=8)[1] for c in (fork(cache, 2), fork(cache, 2, room=16))]


@pytest.mark.rotating
def test_rows_that_are_taken_or_emptied_have_slots_of_their_own(both, model):
    for verb in (
        lambda c: kvjax.take_rows(c, [3, 0, 3]),
        lambda c: kvjax.reset_rows(c, [True, False, False, True]),
        lambda c: fork(c, 2),
    ):
        plain, shared = map(verb, both)
        assert not is_shared(shared)
        same_positions(plain, shared)
        rows = plain.next.shape[0]
        stepped(model, (plain, shared), np.arange(2 * rows, dtype=np.int32).reshape(rows, 2))


@pytest.mark.rotating
def test_a_saved_cache_holds_every_row_for_itself(both, model, tmp_path):
    kvjax.save_cache(tmp_path / "shared.cache", both[1])
    loaded = kvjax.load_cache(tmp_path / "shared.cache")
    same_positions(loaded, both[0])
    assert not is_shared(fork(loaded, 2, room=4))
    stepped(model, (fork(both[0], 1), loaded), np.ones((4, 1), np.int32))


@pytest.mark.rotating
def test_drafts_are_verified_and_taken_back_over_a_common_past(both, model):
    """What was added since the fork goes, and the past stays in common; what was before it is each row's."""
    draft = [[3, 1, 4, 1], [5], [9, 2], []]
    plain, shared = (fork(both[0], 1), fork(both[1], 1, room=8))
    want, plain = kvjax.verify(model, plain, draft)
    got, shared = kvjax.verify(model, shared, draft)
    for row, tokens in enumerate(draft):
        close(got[row, : len(tokens)], want[row, : len(tokens)]) if tokens else None
    for count, common in (([3, 1, 2, 0], True), ([2, 1, 1, 3], True), ([9, 0, 0, 4], False)):
        plain, shared = kvjax.rollback(plain, count), kvjax.rollback(shared, count)
        assert is_shared(shared) == common
        same_positions(plain, shared)
    stepped(model, (plain, shared), np.ones((4, 2), np.int32))


@pytest.mark.rotating
def test_a_row_goes_back_to_the_prefix_for_another_request(model, rng):
    prefix = kvjax.prefill(model, PROMPT[:1], room=0)[1]
    _, cache = kvjax.prefill(model, [[1, 2], [3, 4], [5, 6]], cache=fork(prefix, 3, room=16), room=8)
    held = nbytes(cache)
    cache = kvjax.rollback(cache, np.where([False, True, False], cache.next - prefix.next, 0))
    assert is_shared(cache) and nbytes(cache) == held
    assert cache.next.tolist() == [20, 18, 20]
    got, _ = kvjax.prefill(model, [[7], [7, 8, 9], [7]], cache=cache, room=0)
    close(got[1], kvjax.prefill(model, [[*PROMPT[0], 7, 8, 9]])[0][0])


def test_a_consumed_cache_and_wrong_numbers_are_refused(model):
    cache = read(model, METHODS["full"]())
    for room in (-1, 1.5):
        with pytest.raises(InputError, match=r"room is .*, expected"):
            unwrap(fork)(cache, 2, room=room)
    shared = fork(cache, 2, room=1)
    kvjax.rollback(kvjax.step(model, shared, [1, 2, 3, 4])[1], 4)
    with pytest.raises(InputError, match="consumed"):
        fork(shared, 2, room=1)
    _, full = kvjax.step(model, fork(cache, 2, room=1), [1, 2, 3, 4])
    with pytest.raises(InputError, match="the cache is full"):
        kvjax.step(model, full, [1, 2, 3, 4])
