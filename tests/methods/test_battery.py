"""Every method of the table through what must hold for all of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.cache import Slots, nbytes
from kvjax.methods import TABLE
from kvjax.models.params import init, plan, regroup
from kvjax.steps import Run
from tests.methods.battery import (
    ALONE,
    BATCHES,
    MAIN,
    ROOM,
    SHARED,
    VOCAB,
    B,
    T,
    kept_of,
    model,
    off,
    positions,
    prompt_of,
    step,
    talk,
)
from tests.methods.table import BY_LABEL, ROWS, Sizes
from tests.reference import Row as Slotwise

LABELS = [r.label for r in ROWS]


def rows(labels, marks=lambda label: ()):
    """One test per method; those of a method run in one process, which compiles its conversation once."""
    group = pytest.mark.xdist_group
    return pytest.mark.parametrize("label", [pytest.param(x, marks=(group(x), *marks(x))) for x in labels])


every = rows(LABELS)


def some(*labels):
    """Costly checks of all methods: these in the plain suite, the others with -m slow."""
    assert set(labels) <= set(LABELS)
    return rows(LABELS, lambda label: () if label in labels else (pytest.mark.slow,))


def test_every_method_has_a_row():
    assert set(TABLE) == {id for r in ROWS for id, _ in r.build if len(r.build) == 1}


# --- what it keeps and what it answers, against float64 numpy ---------------------------------------------


@every
def test_a_prompt_leaves_the_tokens_that_the_method_says(label):
    found = positions(talk(label).prompt[1])
    for b, tokens in enumerate(MAIN.first):
        want = kept_of(label, prompt_of(BY_LABEL[label].model, "main", b))
        for layer, keep in enumerate(want):
            assert found[layer][b] == [set(np.flatnonzero(k).tolist()) for k in keep], (layer, b, len(tokens))


def same(label):
    """What equal numbers may differ by: float noise moves a code to its neighbour now and then."""
    return 1e-5 if BY_LABEL[label].method().store is None else 2e-3


def slotwise(label, b):
    row = BY_LABEL[label]
    prompt = prompt_of(row.model, "main", b)
    return prompt, Slotwise(prompt, kept_of(label, prompt), row.phase)


exact = rows([r.label for r in ROWS if r.error is not None])


@exact
def test_logits_are_those_of_the_prompt_and_of_attention_over_what_is_kept(label):
    done, error = talk(label), BY_LABEL[label].error
    prompts, asked = [], []
    for b, tokens in enumerate(MAIN.first):
        prompt, slots = slotwise(label, b)
        prompts.append(prompt.all_logits[-1])
        asked.append(slots.step(tokens[-1], append=False))
    assert off(done.prompt[0], np.stack(prompts)) < 1e-5
    assert off(done.asked, np.stack(asked)) < error


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
            assert [lists[b] for lists in positions(cache)] == slots.positions()


@exact
def test_a_second_turn_attends_to_what_is_kept_and_to_itself(label):
    want = []
    for b, tokens in enumerate(MAIN.second):
        slots = slotwise(label, b)[1]
        want.append([slots.step(token) for token in tokens][-1])
    assert off(talk(label).second[0], np.stack(want)) < BY_LABEL[label].error


@every
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
        if row.kept is not None and "skip_layers" not in dict(row.build[0][1]) and row.model != "windowed":
            lists = sum(len(now[b]) for now in after)
            assert total <= lists * (new // 2)


# --- identity -----------------------------------------------------------------------------------------


@rows([r.label for r in ROWS if r.whole is not None])
def test_a_budget_that_covers_the_prompt_changes_nothing(label):
    row = BY_LABEL[label]
    m = model(row.model)
    logits, cache = kvjax.prefill(m, MAIN.first, method=row.method(row.whole), room=ROOM)
    full = kvjax.prefill(m, MAIN.first, room=ROOM)
    last = [tokens[-1] for tokens in MAIN.first]
    assert off(logits, full[0]) < 1e-6
    assert off(step(m, cache, last, append=False)[0], step(m, full[1], last, append=False)[0]) < 1e-5
    want = positions(full[1])
    assert all(lists == row[:1] * len(lists) for got, all_ in zip(positions(cache), want, strict=True)
               for lists, row in zip(got, all_, strict=True))  # fmt: skip


# --- compilation --------------------------------------------------------------------------------------


@every
def test_equal_arguments_give_one_object_and_one_tree(label):
    row = BY_LABEL[label]
    assert row.method() == row.method() and hash(row.method()) == hash(row.method())
    if len(row.build) == 1:
        assert row.method() is row.method()
    trees = [jax.tree.structure(talk(label, batch).prompt[1]) for batch in ("main", "other")]
    assert trees[0] == trees[1]


@every
def test_other_data_of_the_same_shapes_compiles_nothing(label):
    # Not what was kept of it: the programs may have been forgotten since.
    talk.__wrapped__(label)
    compiled = [f._cache_size() for f in (steps.prefill, steps.step_keeping)]
    talk.__wrapped__(label, "other")
    assert [f._cache_size() for f in (steps.prefill, steps.step_keeping)] == compiled


@some("h2o")
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
    """The conversation of row `mine` of the main batch and that of row `its` of another one."""
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


@some(
    "streamingllm", "h2o", "tova", "snapkv", "snapkv windowed", "adakv", "pyramidkv", "kvzip", "keepkv",
    "kivi", "quest",
)  # fmt: skip
def test_a_row_is_the_same_alone_and_in_a_smaller_bucket(label):
    compare_rows(label, ALONE, talk(label, "alone"), 0)


@rows([r.label for r in ROWS if r.moves])
def test_the_order_of_slots_does_not_matter(label):
    m, done = model(BY_LABEL[label].model), talk(label)
    cache, rng = done.prompt[1], np.random.default_rng(0)

    def shuffle(segment):
        if not isinstance(segment, Slots):
            return segment
        order = rng.permutation(segment.capacity)
        return jax.tree.map(lambda x: x[:, :, :, order], segment)

    mixed = dataclasses.replace(
        cache, groups=tuple(tuple(shuffle(s) for s in group) for group in cache.groups)
    )
    got, twin = kvjax.prefill(m, MAIN.second, cache=mixed, room=8)
    assert off(got, done.second[0]) < same(label)
    assert positions(twin) == positions(done.second[1])
    for token, (logits, twin) in zip(MAIN.steps, done.steps, strict=True):
        got, mixed = step(m, mixed, token, append=True)
        assert off(got, logits) < same(label)
        assert positions(mixed) == positions(twin)


@every
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


@every
def test_bytes_are_those_of_the_claim_before_and_after_running(label):
    row = BY_LABEL[label]
    m, cache = model(row.model), talk(label).prompt[1]
    c = m.config
    sizes = Sizes(B, c.kv_heads, c.heads, c.head_dim, c.layers, T, ROOM)
    assert nbytes(cache) == row.nbytes(sizes)
    shape = jax.ShapeDtypeStruct
    _, planned = jax.eval_shape(
        lambda params, tokens, lengths: steps.prefill(
            Run(c, row.method()), params, tokens, lengths, None, tokens_bound=T, room=ROOM, compress=True
        ),
        m.params, shape((B, T), jnp.int32), shape((B,), jnp.int32),
    )  # fmt: skip
    assert nbytes(planned) == nbytes(cache)


# --- layouts ------------------------------------------------------------------------------------------


def spread(tree, mesh, spec_of):
    """The tree with every array placed over the mesh as spec_of(path, array) says."""
    place = lambda path, x: jax.device_put(x, jax.NamedSharding(mesh, spec_of(path, x)))  # noqa: E731
    return jax.tree.map_with_path(place, tree)


def heads_split(path, x):
    """Projections are split over the heads, everything else is on every device."""
    name = getattr(path[-1], "key", "")
    return {"o": jax.P(None, "heads")}.get(
        name, jax.P(None, None, "heads") if name in ("q", "k", "v") else jax.P()
    )


@some("snapkv", "h2o", "adakv", "kvzip", "snapkv + kivi")
def test_stacked_sharded_and_scanned_decoding_equals_the_plain_one(label):
    row, done = BY_LABEL[label], talk(label)
    m = model(row.model)
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
    run = Run(m.config, row.method())
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


@some("keepkv", "kvzip", "snapkv + kivi")
def test_gradients_through_a_compressed_cache_are_finite(label):
    row = BY_LABEL[label]
    config = dataclasses.replace(model(row.model).config, layers=2, windows=())
    params = init(config, jax.random.key(2), groups=plan(config, stacked=True))
    run, rng = Run(config, row.method()), np.random.default_rng(0)
    first, second = jnp.asarray(rng.integers(0, VOCAB, (2, 2, 16)), jnp.int32)
    lengths = jnp.asarray([16, 12], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(params):
        a, cache = steps.prefill(run, params, first, lengths, None, tokens_bound=16, room=16, compress=True)
        b, _ = steps.prefill(run, params, second, lengths, cache, tokens_bound=32, room=0, compress=False)
        return jax.nn.logsumexp(a) + jax.nn.logsumexp(b)

    for path, g in jax.tree.leaves_with_path(gradient(params)):
        assert np.isfinite(g).all() and (g != 0).any(), path
