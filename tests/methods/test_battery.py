"""Whole conversations: one method of every class of layout through what must hold for all of them.

A prompt, steps and a second turn; alone, among others, in chunks, sharded, with gradients. The plain suite
has the classes whose steps differ most, and the other rows take turns (`pytest -m rotating`). What every
method must do with a prompt is `test_sentences.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.api.prepare import made
from kvjax.grammar.fitted import with_fitted
from kvjax.models.params import init, plan, regroup
from kvjax.ops.base.memory import there
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.state.cache import Slots, nbytes
from kvjax.steps import Run
from tests.float64.reference import Row as Slotwise
from tests.methods.battery import (
    ALONE,
    BATCHES,
    MAIN,
    PLAIN,
    ROOM,
    SHARED,
    VOCAB,
    B,
    T,
    class_of,
    first_of_each_class,
    kept_of,
    model,
    off,
    packed,
    positions,
    prompt_of,
    step,
    stored,
    talk,
)
from tests.methods.rows import count
from tests.methods.table import BY_LABEL, FURTHER, ROWS

ALL = (*ROWS, *FURTHER)
LABELS = [r.label for r in ALL]
FIRST = first_of_each_class()


def rows(labels, plain=PLAIN):
    """One test per method, rotating unless it is in `plain`; those of a method share programs."""

    def marks(label):
        group = pytest.mark.xdist_group(label)
        return (group,) if label in plain else (group, pytest.mark.rotating)

    return pytest.mark.parametrize("label", [pytest.param(x, marks=marks(x)) for x in labels])


every = rows(LABELS)


def some(*labels):
    """Costly checks: these methods in the plain suite."""
    assert set(labels) <= set(LABELS)
    return rows(LABELS, labels)


def test_every_class_of_layout_has_a_method_that_stands_for_it():
    assert len(FIRST) == len({class_of(row) for row in ROWS}) == len(set(FIRST))
    # No two of the plain suite stand for one class.
    assert len({class_of(BY_LABEL[label]) for label in PLAIN}) == len(PLAIN)


# --- what it keeps and what it answers, against float64 numpy ---------------------------------------------


@pytest.mark.rotating
@some("snapkv windowed")
def test_a_prompt_leaves_what_the_shared_reading_of_it_leaves(label):
    mine, shared = talk(label), packed(label)
    assert off(mine.prompt[0], shared.logits[:B]) < 1e-6
    assert off(mine.asked, shared.asked[:B]) < same(label)
    for lists, others in zip(positions(mine.prompt[1]), positions(shared.cache), strict=True):
        assert lists == others[:B]


def same(label):
    """Return what equal numbers may differ by: float noise moves a code to its neighbour now and then.

    Least squares multiply it by as much as the row of the method says.
    """
    row = BY_LABEL[label]
    if label == "attention-matching":
        return row.error
    return 1e-5 if row.method().store is None else 2e-3


def slotwise(label, b):
    row = BY_LABEL[label]
    prompt = row.read(prompt_of(row.model, "main", b))
    return prompt, Slotwise(prompt, kept_of(label, prompt), row.phase, row.leave, row.attends)


exact = rows([r.label for r in ALL if r.error is not None])


@exact
def test_steps_attend_then_evict_what_the_method_says(label):
    row, done = BY_LABEL[label], talk(label)
    for b in range(B):
        slots = slotwise(label, b)[1]
        for token, (logits, cache) in zip(MAIN.steps[:, b], done.steps, strict=True):
            want = slots.step(token, victim=row.victim)
            assert off(logits[b], want) < row.error
            if row.model == "windowed":
                continue  # slots outside the window are dropped there, and never seen here
            want = [stored(row, lists) for lists in slots.positions()]
            assert [lists[b] for lists in positions(cache)] == want


@rows([r.label for r in ALL if r.error is not None and r.reads_all])
def test_a_second_turn_attends_to_what_is_kept_and_to_itself(label):
    want = []
    for b, tokens in enumerate(MAIN.second):
        slots = slotwise(label, b)[1]
        # What tokens hide is hidden from themselves, in a turn as in steps.
        drops = BY_LABEL[label].victim if BY_LABEL[label].hides else None
        want.append([slots.step(token, victim=drops) for token in tokens][-1])
    assert off(talk(label).second[0], np.stack(want)) < BY_LABEL[label].error


@rows([r.label for r in ALL if r.reread is None], ("h2o", "adakv", "kivi"))
def test_a_second_turn_leaves_each_head_a_subset_of_old_and_new_within_the_budget(label):
    row, done = BY_LABEL[label], talk(label)
    before, after = positions(done.prompt[1]), positions(done.second[1])
    for b in range(B):
        old, new = len(MAIN.first[b]), len(MAIN.first[b]) + len(MAIN.second[b])
        total = 0
        for was, now in zip(before, after, strict=True):
            for mine, held in zip(was[b], now[b], strict=True):
                assert held <= mine | set(range(old, new))
                if row.kept is None:
                    assert held == set(range(new))
                total += len(held)
        if (
            row.kept is not None
            and not row.counted
            and "budget" in dict(row.build[0][1])
            and "skip_layers" not in dict(row.build[0][1])
            and row.model != "windowed"
        ):
            lists = sum(len(now[b]) for now in after)
            assert total <= lists * (new // 2)


@rows(["h2o"])
def test_a_second_turn_keeps_what_both_turns_attended_to(label):
    """The largest sums of attention over both turns, beside the newest tokens."""
    found = positions(talk(label).second[1])
    for b, tokens in enumerate(MAIN.second):
        slots = slotwise(label, b)[1]
        for token in tokens:
            slots.step(token)
        n = count(slots.next)
        for held, lists in zip(found, slots.slots, strict=True):
            for mine, one in zip(held[b], lists, strict=True):
                newest = {s["pos"] for s in one if s["pos"] >= slots.next - n // 2}
                rest = sorted((s for s in one if s["pos"] not in newest), key=lambda s: -s["mass"])
                assert mine == newest | {s["pos"] for s in rest[: n - len(newest)]}


# --- rows that are taken ----------------------------------------------------------------------------------

TAKEN = [[2, 0, 2, 3], [1], [3, 2, 1, 0]]


@some("h2o", "kivi")
def test_taking_rows_then_stepping_is_stepping_then_taking(label):
    """Reordered, repeated and left out; a step of as many rows as the conversation runs its program."""
    done, m = talk(label), model(BY_LABEL[label].model)
    cache, (want, after) = done.prompt[1], done.steps[0]
    for index in TAKEN:
        taken = kvjax.take_rows(cache, jnp.asarray(index))
        assert positions(taken) == [[lists[b] for b in index] for lists in positions(cache)]
        # Where the data says how much a row keeps, some rows have more than their share.
        assert BY_LABEL[label].counted or nbytes(taken) * B <= nbytes(cache) * len(index)
        if len(index) != B:
            continue
        logits, mine = step(m, taken, MAIN.steps[0][index], append=True)
        assert off(logits, want[jnp.asarray(index)]) < 1e-6
        assert positions(mine) == [[lists[b] for b in index] for lists in positions(after)]


@rows(LABELS, ())
def test_copies_with_a_past_in_common_step_as_copies_of_their_own(label):
    """Two rows twice: as many as the conversation has, whose program the copies run."""
    m, cache = model(BY_LABEL[label].model), kvjax.take_rows(talk(label).prompt[1], [0, 2])
    plain, shared = kvjax.fork(cache, 2), kvjax.fork(cache, 2, room=2)
    for tokens in MAIN.steps[:2]:
        want, plain = step(m, plain, tokens, append=True)
        got, shared = step(m, shared, tokens, append=True)
        assert off(got, want) < 1e-5
        assert positions(shared) == positions(plain)


# --- compilation --------------------------------------------------------------------------------------


@pytest.mark.rotating
@every
def test_other_data_gives_the_same_tree(label):
    trees = [jax.tree.structure(talk(label, batch).prompt[1]) for batch in ("main", "other")]
    assert trees[0] == trees[1]


@rows([r.label for r in ALL if not r.counted])
def test_other_data_of_the_same_shapes_compiles_nothing(label):
    # Not what was kept of it: the programs may have been forgotten since.
    talk.__wrapped__(label)
    programs = steps.prefill, steps.read, steps.compress, steps.step_keeping
    compiled = [f._cache_size() for f in programs]
    talk.__wrapped__(label, "other")
    assert [f._cache_size() for f in programs] == compiled


@some()
def test_without_jit_the_numbers_are_the_same(label):
    done, data, m = talk(label, "alone"), BATCHES["alone"], model(BY_LABEL[label].model)
    with jax.disable_jit():
        logits, cache = kvjax.prefill(m, data.first, method=BY_LABEL[label].method(), room=ROOM)
        asked, _ = step(m, cache, [data.first[0][-1]], append=False)
    assert positions(cache) == positions(done.prompt[1])
    assert off(logits, done.prompt[0]) < 1e-5
    assert off(asked, done.asked) < same(label)


# --- rows and slots -----------------------------------------------------------------------------------


def test_the_batches_compared_below_differ_in_companions_and_in_bucket():
    lengths = {name: [len(r) for r in b.first] for name, b in BATCHES.items()}
    assert lengths["main"] != lengths["other"] and lengths["main"][SHARED] == lengths["other"][SHARED]
    assert lengths["alone"] == [lengths["main"][ALONE]]


def compare_rows(label, mine, other, its):
    """Compare the conversation of row `mine` of the main batch with that of row `its` of another one."""
    main = talk(label)
    pairs = [
        (main.prompt, other.prompt),
        *zip(main.steps, other.steps, strict=True),
        (main.second, other.second),
    ]
    assert off(other.asked[its], main.asked[mine]) < same(label)
    for (logits, cache), (want, twin) in pairs:
        assert off(want[its], logits[mine]) < same(label)
        assert [lists[mine] for lists in positions(cache)] == [lists[its] for lists in positions(twin)]


@every
def test_a_row_is_the_same_among_other_rows(label):
    compare_rows(label, SHARED, talk(label, "other"), SHARED)


@some()
def test_a_row_is_the_same_alone_and_in_a_smaller_bucket(label):
    compare_rows(label, ALONE, talk(label, "alone"), 0)


@pytest.mark.rotating
@rows([r.label for r in ALL if r.moves])
def test_the_order_of_slots_does_not_matter(label):
    m, done = model(BY_LABEL[label].model), talk(label)
    cache, rng = done.prompt[1], np.random.default_rng(0)

    def shuffle(segment):
        if not isinstance(segment, Slots):
            return segment
        order = rng.permutation(segment.capacity)
        return jax.tree.map(lambda x: there(lambda y: y[:, :, :, order], x), segment)

    mixed = dataclasses.replace(
        cache, groups=jax.tree.map(shuffle, cache.groups, is_leaf=lambda x: isinstance(x, Slots))
    )
    got, twin = kvjax.prefill(m, MAIN.second, cache=mixed, room=8)
    assert off(got, done.second[0]) < same(label)
    assert positions(twin) == positions(done.second[1])
    for token, (logits, twin) in zip(MAIN.steps, done.steps, strict=True):
        got, mixed = step(m, mixed, token, append=True)
        assert off(got, logits) < same(label)
        assert positions(mixed) == positions(twin)


@pytest.mark.rotating
@rows([r.label for r in ALL if not r.looks_ahead and r.method().read_prompt is None], ("kivi",))
def test_reading_in_chunks_equals_reading_in_turns_and_leaves_ended_rows_alone(label):
    m, method = model(BY_LABEL[label].model), BY_LABEL[label].method()
    first = [tokens if i == SHARED else (tokens * 4)[:T] for i, tokens in enumerate(MAIN.first)]
    second = [[] if i == SHARED else tokens for i, tokens in enumerate(MAIN.second)]
    logits, cache = kvjax.prefill(
        m, [a + b for a, b in zip(first, second, strict=True)], method=method, room=8, chunk=T
    )
    assert off(logits[SHARED], talk(label).prompt[0][SHARED]) < 1e-5
    ended = [lists[SHARED] for lists in positions(talk(label).prompt[1])]
    assert [lists[SHARED] for lists in positions(cache)] == ended
    # The other rows: a second turn by hand (one token stands in for the row that ended).
    _, past = kvjax.prefill(m, first, method=method, room=ROOM)
    want, twin = kvjax.prefill(m, [b or [0] for b in second], cache=past, room=8)
    others = [i for i in range(B) if i != SHARED]
    assert off(logits[np.array(others)], want[np.array(others)]) < 1e-5
    for got, lists in zip(positions(cache), positions(twin), strict=True):
        assert [got[i] for i in others] == [lists[i] for i in others]


# --- bytes --------------------------------------------------------------------------------------------


@pytest.mark.rotating
@rows([r.label for r in ALL if not r.counted])
def test_bytes_are_planned_before_running(label):
    row, cache = BY_LABEL[label], talk(label).prompt[1]
    m, shape = made(model(row.model), row.method()), jax.ShapeDtypeStruct
    _, planned = jax.eval_shape(
        lambda params, tokens, lengths: steps.prefill(
            Run(m.config, row.method()), params, tokens, lengths, None,
            tokens_bound=T, room=ROOM, compress=True,
        ),
        with_fitted(m.params, row.method()), shape((B, T), jnp.int32), shape((B,), jnp.int32),
    )  # fmt: skip
    # What `kvjax explain` and `inspect` say, of layers that are stacked.
    told = CacheSizes(model(row.model).config, "float32", T, [row.method()], rows=B)
    assert told.nbytes(row.method(), ROOM) == nbytes(planned) == nbytes(cache)


# --- layouts ------------------------------------------------------------------------------------------


def spread(tree, mesh, spec_of):
    """Place every array of the tree over the mesh as spec_of(path, array) says."""
    place = lambda path, x: jax.device_put(x, jax.NamedSharding(mesh, spec_of(path, x)))  # noqa: E731
    return jax.tree.map_with_path(place, tree)


def heads_split(path, x):
    """Projections are split over the heads, everything else is on every device."""
    name = getattr(path[-1], "key", "")
    return {"o": jax.P(None, "heads")}.get(
        name, jax.P(None, None, "heads") if name in ("q", "k", "v") else jax.P()
    )


@pytest.mark.rotating
@rows([r.label for r in ALL if r.stacks], ("adakv",))
def test_stacked_sharded_and_scanned_decoding_equals_the_plain_one(label):
    row, done = BY_LABEL[label], talk(label)
    m = made(model(row.model), row.method())
    heads = m.config.kv_heads
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, heads), ("rows", "heads"), auto, devices=jax.devices()[: 2 * heads])
    params = spread(regroup(m.params, plan(m.config, stacked=True)), mesh, heads_split)
    assert len(params["layers"]) < m.config.layers or row.model == "windowed"
    tokens = np.zeros((B, T), np.int32)
    for b, r in enumerate(MAIN.first):
        tokens[b, : len(r)] = r
    lengths = np.array([len(r) for r in MAIN.first], np.int32)
    tokens, lengths = spread((tokens, lengths), mesh, lambda _, x: jax.P("rows"))
    run, params = Run(m.config, row.method()), with_fitted(params, row.method())
    if run.method.host is not None and run.method.read is not None:
        pytest.skip("pages come from host memory on devices that rules name: tests/place/test_host.py")
    logits, cache = steps.prefill(
        run, params, tokens, lengths, None, tokens_bound=T, room=ROOM, compress=True
    )
    assert off(logits, done.prompt[0]) < 1e-5
    assert positions(cache) == positions(done.prompt[1])

    def per_slot(path, x):
        lists = x.ndim >= 4 and x.shape[1] == B and x.shape[2] % heads == 0
        return jax.P(None, "rows", "heads") if lists else jax.P()

    cache = spread(cache, mesh, per_slot)
    live = Run(m.config, run.method.decode_part())

    @jax.jit
    def decode(params, cache, tokens):
        def body(cache, token):
            logits, cache = steps.step_fn(live, params, cache, token, jnp.full(token.shape, True))
            return cache, logits

        return jax.lax.scan(body, cache, tokens)

    cache, logits = decode(params, cache, jnp.asarray(MAIN.steps, jnp.int32))
    assert off(logits, jnp.stack([x for x, _ in done.steps])) < same(label)
    assert positions(cache) == positions(done.steps[-1][1])


@some("keepkv")
@pytest.mark.rotating
def test_gradients_through_a_compressed_cache_are_finite(label):
    row = BY_LABEL[label]
    if row.method().host is not None:
        pytest.skip("JAX takes no gradients through what lies in host memory")
    config = dataclasses.replace(model(row.model).config, layers=2, windows=())
    params = init(config, jax.random.key(2), groups=plan(config, stacked=row.stacks))
    run, rng = Run(config, row.method()), np.random.default_rng(0)
    first, second = jnp.asarray(rng.integers(0, VOCAB, (2, 2, 16)), jnp.int32)
    lengths = jnp.asarray([16, 12], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(params):
        params = with_fitted(params, row.method())
        a, cache = steps.prefill(run, params, first, lengths, None, tokens_bound=16, room=16, compress=True)
        b, _ = steps.prefill(run, params, second, lengths, cache, tokens_bound=32, room=0, compress=False)
        return jax.nn.logsumexp(a) + jax.nn.logsumexp(b)

    for path, g in jax.tree.leaves_with_path(gradient(params)):
        assert np.isfinite(g).all() and (g != 0).any(), path
