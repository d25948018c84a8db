"""The engine on a device answers every request as `kvjax.generate` answers it alone."""

import json
import random
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.models.model import Model
from kvjax.models.transformer import forward
from kvjax.serve import Prompt, System, run
from kvjax.serve.device import code_step, lanes, paged_step, slice_step, write
from kvjax.serve.device import engine as engines
from kvjax.serve.device import pages as pages_of_device
from kvjax.serve.device.alone import compared
from kvjax.serve.device.arena import PageFormat
from kvjax.serve.device.code_pages import listed
from kvjax.serve.device.jobs import job_of
from kvjax.serve.device.lists import granule_words, lists_of
from kvjax.serve.device.pages import RequestPages, pages_refusal
from kvjax.serve.grammar import words
from kvjax.serve.ledger.audit import audit
from kvjax.serve.load.metrics import metrics
from kvjax.serve.load.synth import synthetic
from kvjax.serve.load.texts import scaled
from kvjax.serve.load.texts import texts as texts_of
from kvjax.serve.sim import Costs, simulate
from kvjax.steps.prefilling import two_programs
from tests.methods import battery
from tests.methods.table import BY_LABEL, ROWS
from tests.serve.test_loop import at_random, clean
from tests.sweep import sweep

# One process, whose tests share what `generate` writes for each request alone (tests/serve/test_mesh.py).
pytestmark = pytest.mark.xdist_group("engine")
NEW, PAGE, PAGES = 12, 4, 20
PAGED = System(words.Blocks(PAGE), words.Tree(), words.LRU(), batch=words.Chunked(16, 8))
SYSTEMS = {
    "chunks and a tree": PAGED,
    "by node": System(
        words.Blocks(PAGE), words.Tree(), words.LRU(), batch=words.Chunked(16, 8), attend=words.ByNode(2)
    ),
    "room for all": System(words.Blocks(PAGE), batch=words.Iterations(8), preempt=words.Reserved()),
    "far weights": System(words.Blocks(PAGE), weights=words.Brought()),
    "prompts first": System(words.Blocks(PAGE), batch=words.PrefillFirst(8, 64), preempt=words.Swap()),
    "iterations": System(words.Blocks(PAGE), batch=words.Iterations(8)),
    "static": System(words.Lanes("oracle", page=PAGE), batch=words.Whole(4), preempt=words.Never()),
}
# How many programs a run has: those of pages and lanes.
PROGRAMS = (
    write.write_slice, slice_step.gathered_slice, write._first, paged_step.read_piece, paged_step.mixed,
    paged_step.adopt, paged_step.taken, paged_step.put_back, code_step.adopt_codes, lanes.put, lanes.take,
    lanes.grown,
)  # fmt: skip


@cache
def texts(count=9, seed=0):
    """Prompts of 16 to 32 tokens, which begin alike."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, battery.VOCAB, 18).tolist()
    return [
        (*base[: rng.integers(8, 18)], *rng.integers(0, battery.VOCAB, rng.integers(8, 15)).tolist())
        for _ in range(count)
    ]


@cache
def alone(text, method=None, name="4/2", **options):
    """Return what `kvjax.generate` writes behind a text."""
    out = kvjax.generate(
        battery.model(name), [list(text)], method=method, max_new_tokens=NEW, stop=[], **options
    )
    return out.tokens[0].tolist()


def crowd(methods=(None,), **options):
    return [
        Prompt(text, NEW - 5 * i % 8, methods[i % len(methods)], stop=[], **options)
        for i, text in enumerate(texts())
    ]


def check_alone(done, prompts, name="4/2"):
    for answer, prompt in zip(done.answers, prompts, strict=True):
        want = alone(tuple(prompt.tokens), prompt.method, name)[: prompt.max_new_tokens]
        assert answer.state == "ended" and answer.tokens.tolist() == want, (prompt, answer)
        assert (answer.logprobs <= 0).all() and answer.reason == "length"


def adversary(monkeypatch, seed):
    draw = random.Random(seed)
    monkeypatch.setattr("kvjax.serve.loop.loop.decide", lambda s, v: at_random(draw, s, v))
    preempt = draw.choice([words.Recompute(), words.Swap()])
    return System(words.Blocks(PAGE), words.Tree(), words.LRU(), preempt=preempt)


@jax.jit
def _spoiled(words, free):
    """NaN in the free pages of a pool; by a mask, so that their number is no shape."""
    bits = jnp.int32(np.float32(np.nan).view(np.int32))
    return jnp.where(free.reshape(1, -1, *[1] * (words.ndim - 2)), bits, words)


def poisoned(monkeypatch):
    """Pages that nobody holds hold NaN, before every effect."""
    carry_out = engines.Engine.carry_out

    def poison(self, effect):
        arena = self.arena
        if arena is not None and not isinstance(effect, engines.Move):
            free = np.zeros((arena.shape.heads, arena.blocks), bool)
            free[:, np.array(self.loop.ledger.free_list, int)] = True
            arena.words = tuple(_spoiled(words, free.reshape(-1)) for words in arena.words)
        return carry_out(self, effect)

    monkeypatch.setattr(engines.Engine, "carry_out", poison)


@pytest.mark.parametrize("name", sweep(SYSTEMS, "iterations", "room for all"))
def test_every_policy_gives_the_tokens_of_generate_alone(name):
    prompts = crowd()
    done = run(battery.model("4/2"), prompts, SYSTEMS[name], pages=PAGES, watch=clean)
    check_alone(done, prompts)
    assert (np.diff(done.outcome.ends) >= 0).all()
    assert (sum(one.preempted for one in done.answers) > 0) != (name in ("static", "room for all"))
    assert (sum(one.matched for one in done.answers) > 0) == (SYSTEMS[name].share is not None)
    assert (done.outcome.moved > 0) == isinstance(SYSTEMS[name].preempt, words.Swap)


@pytest.mark.rotating
def test_pages_that_rows_share_are_read_once_by_the_device(monkeypatch):
    """Counted from the operands of the step: pages in pieces, which rows would read more often."""
    once, by_row, call = 0, 0, write.write_slice

    def counted(step, params, state, token, active, *more):
        nonlocal once, by_row
        nodes = state[1].nodes
        sizes = nodes.size // PAGE
        once += int(sizes.sum())
        by_row += int((sizes * (nodes.rows >= 0).sum(1)).sum())
        return call(step, params, state, token, active, *more)

    monkeypatch.setattr("kvjax.serve.device.pages.write_slice", counted)
    shared = texts()[0]
    prompts = [Prompt((*shared, i), NEW, stop=[]) for i in range(4)]
    done = run(battery.model("4/2"), prompts, SYSTEMS["by node"])
    check_alone(done, prompts)
    assert sum(answer.matched for answer in done.answers) > 0 and once < 0.7 * by_row


@pytest.mark.rotating
def test_four_samples_of_a_prompt_hold_less_than_a_third_more_than_one(monkeypatch):
    """Bytes of the device's pages that anybody holds, at most; all others are NaN before every effect."""
    poisoned(monkeypatch)
    prompt, sampler = sum(texts(), ())[:96], kvjax.Sampler(1.3)
    samples = [Prompt(prompt, 6, sampler=sampler, key=jax.random.key(i), stop=[]) for i in range(4)]

    def held(prompts, system):
        found = []
        # What only the tree holds counts, too.
        done = run(
            battery.model("4/2"), prompts, system, pages=4 * 26,
            watch=lambda loop: found.append(loop.ledger.pages - loop.ledger.free),
        )  # fmt: skip
        for answer, one in zip(done.answers, prompts, strict=True):
            want = kvjax.generate(
                battery.model("4/2"), [[*prompt]], sampler=sampler, key=one.key, max_new_tokens=6, stop=[]
            )
            assert answer.tokens.tolist() == want.tokens[0].tolist()
        assert len({(*answer.tokens,) for answer in done.answers}) == len(prompts)
        return max(found) * done.page_bytes

    shared = System(words.Blocks(PAGE), words.Tree(), words.LRU(), batch=words.Chunked(32, 8))
    one = held(samples[:1], shared)
    assert one < held(samples, shared) < 1.3 * one
    assert held(samples, System(words.Blocks(PAGE), batch=words.Chunked(32, 8))) > 2.5 * one


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in range(2, 200))]


@pytest.mark.rotating
@pytest.mark.parametrize("seed", SEEDS)
def test_any_legal_schedule_gives_the_tokens_of_generate_alone(seed, monkeypatch):
    """Random rows, chunks, preemptions and returns, with NaN in every page that nobody holds."""
    system = adversary(monkeypatch, seed)
    poisoned(monkeypatch)
    prompts = crowd()
    done = run(battery.model("4/2"), prompts, system, pages=PAGES, watch=clean)
    check_alone(done, prompts)


MIXED = {
    "pages": ("adakv", "expected-attention", "kvzip", "keydiff"),
    "lanes": ("h2o", "kivi"),
}


def mixed(labels, system):
    prompts = crowd((None, *(BY_LABEL[label].method() for label in labels)))
    done = run(battery.model("4/2"), prompts, system, pages=PAGES, watch=clean)
    check_alone(done, prompts)


@pytest.mark.rotating
def test_requests_of_five_methods_in_one_batch_are_written_by_one_program(monkeypatch):
    call, crews = slice_step.gathered_slice, []
    before = call._cache_size()

    def counted(step, params, pools, rows, token, active, *more):
        crews.append(int(active.sum()))
        return call(step, params, pools, rows, token, active, *more)

    monkeypatch.setattr("kvjax.serve.device.pages.gathered_slice", counted)
    mixed(MIXED["pages"], SYSTEMS["iterations"])
    # Neighbours are of different methods.
    assert max(crews) > 1 and call._cache_size() - before <= 2


def test_prompts_are_read_in_one_program_with_the_step_of_others(monkeypatch):
    """Pieces of several prompts at once, too; no row has a program of its own while prompts are read."""
    calls, model = [], battery.model("4/2")

    def heard(name):
        call = getattr(pages_of_device, name)

        def counted(*args):
            calls.append((name, args))
            return call(*args)

        monkeypatch.setattr(pages_of_device, name, counted)

    for name in ("mixed", "read_piece", "write_slice"):
        heard(name)
    runs, carry_out = [], engines.Engine.carry_out

    def effect_of(self, effect):
        before = len(calls)
        done = carry_out(self, effect)
        if isinstance(effect, engines.RunIteration) and effect.read and effect.write:
            names = [name for name, _ in calls[before:]]
            assert names.count("mixed") == 1 and "write_slice" not in names
            ((rows, pieces),) = [args[3:5] for name, args in calls[before:] if name == "mixed"]
            assert (rows.counts > 0).sum() == len(effect.write)
            runs.append((pieces.counts > 0).sum())
        return done

    monkeypatch.setattr(engines.Engine, "carry_out", effect_of)
    prompts = crowd()
    done = run(model, prompts, replace(PAGED, batch=words.Chunked(40, 8)), pages=PAGES)
    check_alone(done, prompts)
    assert min(runs) == 1 and max(runs) > 1


def test_what_a_method_evicts_is_free_for_others():
    """Half of the slots of every prompt leave at its end, so that more requests run at once."""
    half, system, held = kvjax.method("keydiff", budget=0.5), SYSTEMS["iterations"], {}

    def watch(loop):
        clean(loop)
        for entry in loop.writing:
            if entry.written == 1:
                # A few pages more may be there for the steps to come.
                least = -(-(entry.request.prompt // 2) // PAGE)
                held[entry.request.id] = entry.held - least

    prompts = crowd((half,))
    done = run(battery.model("4/2"), prompts, system, pages=PAGES, watch=watch)
    check_alone(done, prompts)
    assert len(held) == 9 and min(held.values()) == 0 and max(held.values()) <= NEW // PAGE
    asked = [entry.request for entry in done.outcome.entries]
    costs = Costs("by hand", 0.01, 0.0, 2e-6, 1e-5, 0.0, 1e-5, 1e6, 1.0)
    assert len(done.outcome.ends) < len(simulate(system, asked, costs, pages=PAGES).ends)


@pytest.mark.rotating
def test_waste_is_what_the_lists_of_pages_hold_and_do_not_use(monkeypatch):
    """Counted from the lists on the device at every step; what lies in lanes is in no page."""
    used, held = [], []

    def watched(counted):
        def call(self, jobs, *more):
            before = {job.id: self.lists[job.id].copy() for job in jobs}
            found = counted(self, jobs, *more)
            for lists in before.values():
                for step in range(1, found.count + 1):
                    used.append((lists + step).sum())
                    held.append(lists.size * PAGE * -(-int(lists.max() + step) // PAGE))
            return found

        return call

    for name in ("_steps", "_mixed"):
        monkeypatch.setattr(RequestPages, name, watched(getattr(RequestPages, name)))
    methods = (None, *(BY_LABEL[label].method() for label in ("adakv", "keydiff", "h2o")))
    for some in (methods[:3], methods):
        used.clear(), held.clear()
        done = run(battery.model("4/2"), crowd(some), SYSTEMS["iterations"])
        assert metrics(done.outcome)["waste"] == pytest.approx(1 - sum(used) / sum(held))
        assert 0 < sum(used) < sum(held)
    assert [entry.outside for entry in done.outcome.entries] == [i % 4 == 3 for i in range(9)]
    lanes_alone = run(battery.model("4/2"), crowd(methods[3:])[:2], SYSTEMS["iterations"])
    assert "waste" not in metrics(lanes_alone.outcome)


CODED = (
    "int8", "keydiff(budget=0.5) + int8", "adakv(budget=0.75, window=4) + int4(group=4)",
    "int4(group=4)", "kivi(group=4, residual=20)", "adakv(budget=0.75, window=4) + kivi(group=4, residual=6)",
)  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(
    "methods, kinds", [(CODED[1::3], 3), pytest.param(CODED, 5, marks=pytest.mark.rotating)]
)
def test_codes_are_stored_in_pages_in_their_own_bytes(methods, kinds, monkeypatch):
    """Beside the full cache, under random schedules, with NaN in every page that nobody holds."""
    prompts = crowd((None, *methods))
    poisoned(monkeypatch)
    with monkeypatch.context() as patch:
        done = run(battery.model("4/2"), prompts, adversary(patch, 3), pages=PAGES, watch=clean)
    check_alone(done, prompts)
    assert not any(entry.outside for entry in done.outcome.entries)
    source = engines.KnownRequests()
    engine = engines.Engine(battery.model("4/2"), PAGED, PAGES, 8, PAGES, source)
    for i, method in enumerate((None, *methods)):
        engine.accept(job_of(battery.model("4/2"), i, Prompt(texts()[i], 4, method)), 0.0)
    assert len(engine.pages) == kinds and all(one.arena is engine.arena for one in engine.pages.values())


@pytest.mark.rotating
@pytest.mark.parametrize(
    "method, kernels",
    [
        ("int8", True),
        ("int8", False),
        pytest.param("int4(group=4)", False, marks=pytest.mark.rotating),
        ("kivi(group=4,residual=6)", False),
    ],
)
def test_codes_in_pages_are_those_of_the_cache(method, kernels, monkeypatch):
    """What a cache of `kvjax.prefill` and `kvjax.step` holds, slot by slot."""
    for module in (pages_of_device, engines):
        monkeypatch.setattr(module, "PageFormat", partial(PageFormat, kernels=kernels))
    model, text = battery.model("4/2"), texts()[4]
    source = engines.KnownRequests()
    engine = engines.Engine(model, PAGED, PAGES, 8, PAGES, source)
    job = job_of(model, 0, Prompt(text, 5, method, stop=[]))
    source.start([engine.accept(job, 0.0)])
    engine.run()
    _, cache = kvjax.prefill(model, [text], method=method, room=8)
    for token in job.written[:4]:
        _, cache = kvjax.step(model, cache, np.array([token], np.int32))
    (pages,) = engine.pages.values()
    count = len(text) + 4
    assert (pages.lists[0] == count).all()
    for pool, whole in zip(pages.pools, lists_of(cache), strict=True):
        order = np.argsort(np.where(whole.pos < 0, 1 << 30, whole.pos), axis=-1)[:, :, :count, None]
        want = [np.take_along_axis(x, order, 2) for x in (whole.k, whole.v)]
        for mine, theirs in zip(held_by(pool, pages.tables[0], count), want, strict=True):
            # Sums are rounded in another order, by which a float16 zero or scale may be the next number.
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2.0**-10 * np.abs(theirs).max())


def held_by(pool, table, count):
    """Keys and values [L, K, count, H] of a request of the pool, in order."""
    lists = np.arange(2)[:, None] * PAGES + np.array(table)
    if isinstance(pool, paged_step.PagePool):
        return [
            np.stack([_decoded(pool, name, lists[head], count) for head in range(2)], 1)
            for name in ("key", "value")
        ]
    found, first = [], pool.holding.first
    coded = pool.holding.coded(count) if pool.plain else count
    for layer in range(pool.words.shape[0]):
        k, v, _ = listed(pool.words, pool.coded, jnp.array(lists[None, :, first:]), layer)
        each = [np.array(x[0])[:, :coded] for x in (k, v)]
        if pool.plain:
            ring = listed(pool.words, pool.plain, jnp.array(lists[None, :, :first]), layer)[:2]
            newest = np.arange(coded, count) % pool.holding.ring
            each = [
                np.concatenate([x, np.array(y[0])[:, newest]], 1) for x, y in zip(each, ring, strict=True)
            ]
        found.append(each)
    return [np.stack(x) for x in zip(*found, strict=True)]


def _decoded(pool, name, at, count):
    scale, zero = (np.float64(pool.number(f"{name}_{x}"))[:, at][..., None] for x in ("scale", "zero"))
    codes = np.float64(pool.keys if name == "key" else pool.values)[:, at]
    return (codes * scale + zero).reshape(len(codes), -1, codes.shape[-1])[:, :count]


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(10))
def test_codes_in_pages_are_answered_alone_under_any_schedule(seed, monkeypatch):
    prompts = crowd((*CODED, None, "h2o(budget=0.5)"))
    poisoned(monkeypatch)
    system = adversary(monkeypatch, seed)
    check_alone(run(battery.model("4/2"), prompts, system, pages=PAGES, watch=clean), prompts)


@pytest.mark.rotating
def test_methods_in_lanes_beside_pages_are_answered_alone(monkeypatch):
    mixed(MIXED["lanes"][:1], adversary(monkeypatch, 4))


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(20))
def test_requests_of_many_methods_are_answered_alone_under_any_schedule(seed, monkeypatch):
    mixed(random.Random(seed).sample(MIXED["pages"] + MIXED["lanes"], 3), adversary(monkeypatch, seed))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.method().read_prompt is None], ids=lambda row: row.label
)
def test_every_method_is_served_under_any_schedule(row, monkeypatch):
    """Each compressed alone: lists in pages where they last, lanes of its own cache elsewhere."""
    system, method = adversary(monkeypatch, len(row.label)), row.method()
    prompts = [Prompt(text, 7, method, stop=[]) for text in texts() if len(text) > 16][:3]
    done = run(battery.model(row.model), prompts, system, pages=PAGES, watch=clean)
    check_alone(done, prompts, row.model)


@pytest.mark.rotating
def test_a_run_has_at_most_twelve_programs():
    before = sum(f._cache_size() for f in PROGRAMS)
    config = battery.Config(
        vocab=battery.VOCAB, d_model=16, head_dim=8, d_ff=16, layers=1, heads=2, kv_heads=1
    )
    model = Model(config, battery.init(config, jax.random.key(3)))
    system = System(words.Blocks(PAGE), words.Tree(), words.LRU(), preempt=words.Swap())
    done = run(model, crowd(), system, pages=PAGES)
    assert all(one.state == "ended" for one in done.answers) and done.outcome.moved > 0
    assert sum(f._cache_size() for f in PROGRAMS) - before <= 12


@pytest.mark.rotating
@pytest.mark.parametrize("labels", [MIXED["pages"][:1], MIXED["pages"]], ids=len)
def test_each_method_of_a_run_adds_at_most_three_programs(labels):
    """Its prompts are read, compressed and copied; what follows is shared with all others."""

    def count():
        return np.array([sum(f._cache_size() for f in each) for each in (own, PROGRAMS)])

    own = two_programs.read, two_programs.compress, granule_words
    before = count()
    size = dict(d_model=16, head_dim=8, d_ff=16, layers=2, heads=4, kv_heads=2)
    config = battery.Config(vocab=battery.VOCAB, **size)
    model = Model(config, battery.init(config, jax.random.key(3)))
    methods = [BY_LABEL[label].method() for label in labels]
    done = run(model, crowd((None, *methods)), SYSTEMS["iterations"], pages=60)
    assert all(one.state == "ended" for one in done.answers)
    more, shared = count() - before
    assert 2 <= more <= 3 * len(methods) and shared <= 12


def test_engine_and_simulator_make_the_same_iterations():
    prompts = crowd()
    costs = Costs("by hand", 0.01, 0.0, 2e-6, 1e-5, 0.0, 1e-5, 1e6, 1.0)
    for name in ("prompts first", "iterations", "static"):
        done = run(battery.model("4/2"), prompts, SYSTEMS[name], pages=PAGES)
        asked = [entry.request for entry in done.outcome.entries]
        out = simulate(SYSTEMS[name], asked, costs, pages=PAGES)
        for ours, theirs in zip(done.outcome.entries, out.entries, strict=True):
            assert (ours.request.id, ours.spans, ours.preempted) == (
                theirs.request.id, theirs.spans, theirs.preempted,
            )  # fmt: skip
        assert len(done.outcome.ends) == len(out.ends) and done.outcome.computed == out.computed


@pytest.mark.parametrize("name", sweep(["prompts first", "iterations", "chunks and a tree"], "iterations"))
def test_engine_and_simulator_hear_arrivals_at_the_same_iterations(name, monkeypatch):
    """A clock that counts iterations; a slice of 16 hears of an arrival when it ends."""
    seconds, written = [0.0], engines.Engine._write

    def counted(self, *given):
        steps = written(self, *given)
        seconds[0] += steps
        return steps

    monkeypatch.setattr(engines.Engine, "_write", counted)
    draw = np.random.default_rng(0)
    at = np.cumsum(draw.exponential(9.0, len(crowd()))).tolist()
    prompts = [
        Prompt(one.tokens, 12 + 3 * i, stop=[], arrived=at[i]) for i, one in enumerate(crowd())
    ]  # fmt: skip
    done = run(battery.model("4/2"), prompts, SYSTEMS[name], pages=60, clock=lambda: seconds[0])
    asked = [entry.request for entry in done.outcome.entries]
    costs = Costs("by hand", 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e6, 1.0, slice=write.SLICE)
    out, soon = (simulate(SYSTEMS[name], asked, one, pages=60) for one in (costs, replace(costs, slice=1)))
    assert [entry.spans for entry in done.outcome.entries] == [entry.spans for entry in out.entries]
    np.testing.assert_allclose(done.outcome.ends, out.ends)
    assert metrics(out)["mean_ttft_ms"] > metrics(soon)["mean_ttft_ms"]


def test_tokens_are_drawn_as_generate_draws_them():
    sampler, key = kvjax.Sampler(1.3, top_k=20, top_p=0.95), jax.random.key(5)
    prompts = crowd(sampler=sampler, key=key)
    prompts[0] = Prompt(texts()[0], 3, stop=[])
    done = run(battery.model("4/2"), prompts, PAGED, pages=PAGES)
    for answer, prompt in zip(done.answers[1:], prompts[1:], strict=True):
        want = kvjax.generate(
            battery.model("4/2"), [prompt.tokens], max_new_tokens=NEW, stop=[], sampler=sampler, key=key
        )
        assert answer.tokens.tolist() == want.tokens[0, : prompt.max_new_tokens].tolist()
    assert done.answers[0].tokens.tolist() == alone(texts()[0])[:3]


@pytest.mark.rotating
def test_the_likeliest_tokens_are_named_beside_each_that_is_written():
    """As a pass over the whole text without a cache has them; by pages and by lanes."""
    model, text = battery.model("4/2"), texts()[2]
    asked = [(3, None), (0, None), (20, None), (4, BY_LABEL["kivi"].method())]
    prompts = [Prompt(text, NEW, method, stop=[], top=top) for top, method in asked]
    done = run(model, prompts, SYSTEMS["iterations"])
    want = np.array(alone(text))
    whole = jnp.array([[*text, *want[:-1]]])
    read = jax.jit(forward, static_argnums=2)
    logits = np.float64(read(model.params, whole, model.config, jnp.array([whole.shape[1]])))[0]
    logits = logits[len(text) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for answer, (top, method) in zip(done.answers, asked, strict=True):
        assert [len(one) for one in answer.tops] == [top] * NEW
        best = [one[0] for one in answer.tops if one]
        if top:
            # Nothing is drawn, so what was written is the likeliest.
            assert best == [*zip(answer.tokens.tolist(), answer.logprobs.tolist(), strict=True)]
        if method is None:
            assert answer.tokens.tolist() == want.tolist()
            ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :top]
            np.testing.assert_array_equal([[id for id, _ in one] for one in answer.tops], ids)
            np.testing.assert_allclose(
                [[x for _, x in one] for one in answer.tops],
                np.take_along_axis(logprobs, ids, -1), atol=1e-5,
            )  # fmt: skip
    with pytest.raises(kvjax.InputError, match="top is 21, expected at most 20"):
        run(model, [Prompt(text, NEW, top=21)])


@pytest.mark.rotating
def test_in_bfloat16_answers_differ_at_ties_alone():
    """Counted, where two likeliest tokens are within two steps of the format; in pages of two methods."""
    model = battery.model("4/2")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    half = Model(model.config, half, name="half")
    prompts = crowd((None, kvjax.method("keydiff", budget=0.5)))
    # Of one length, so that one program writes them all alone.
    prompts = [Prompt(one.tokens, NEW, one.method, stop=[]) for one in prompts]
    done = run(half, prompts, SYSTEMS["iterations"], pages=PAGES)
    found = compared(half, prompts, done.answers)
    assert found.unequal == 0 and found.equal + found.tied == len(prompts) and found.equal >= 6
    # Another token is no tie, and neither is the same text cut off.
    wrong = [one._replace(tokens=(one.tokens + 1) % battery.VOCAB) for one in done.answers[:2]]
    wrong += [one._replace(tokens=one.tokens[:-1]) for one in done.answers[:1]]
    assert compared(half, [*prompts[:2], prompts[0]], wrong) == (0, 0, 3)


@pytest.mark.rotating
def test_a_stop_token_ends_a_request_and_its_pages_are_free():
    text = texts()[1]
    want = alone(text)
    end = next(i for i in range(2, NEW) if want[i] not in want[:i])
    others = crowd()[2:4]
    done = run(
        battery.model("4/2"),
        [Prompt(text, NEW, stop=[want[end], 3]), *others],
        PAGED,
        pages=PAGES,
        watch=clean,
    )
    assert done.answers[0].tokens.tolist() == want[: end + 1] and done.answers[0].reason == "stop"
    for answer, prompt in zip(done.answers[1:], others, strict=True):
        assert answer.tokens.tolist() == alone(tuple(prompt.tokens))[: prompt.max_new_tokens]


def test_who_needs_more_than_the_pool_is_refused_and_others_go_on():
    prompts = [Prompt(texts()[0] * 4, NEW, stop=[]), *crowd()[1:3]]
    done = run(battery.model("4/2"), prompts, PAGED, pages=PAGES, watch=clean)
    assert done.answers[0].state == "refused" and not len(done.answers[0].tokens)
    assert [one.state for one in done.answers[1:]] == ["ended", "ended"]


def test_logits_that_are_no_numbers_fail_one_request_and_harm_no_other():
    model, bad = battery.model("4/2"), 63
    embed = model.params["embed"].at[bad].set(jnp.nan)
    assert not model.config.tied
    broken = Model(model.config, {**model.params, "embed": embed})
    prompts = [one for one in crowd() if bad not in one.tokens][:4]
    prompts[1] = Prompt((*prompts[1].tokens, bad), NEW, stop=[])
    want = [alone(tuple(one.tokens))[: one.max_new_tokens] for one in prompts]
    done = run(broken, prompts, PAGED, pages=PAGES, watch=clean)
    assert done.answers[1].state == "failed" and "are not numbers" in done.answers[1].error
    for i in (0, 2, 3):
        if bad not in want[i]:
            assert done.answers[i].tokens.tolist() == want[i]


def test_who_leaves_gives_back_all_pages_and_others_are_unharmed():
    model, prompts = battery.model("4/2"), crowd()
    source = engines.KnownRequests()
    engine = engines.Engine(model, PAGED, PAGES, 8, PAGES, source)
    jobs = [job_of(model, i, one) for i, one in enumerate(prompts)]
    source.start([engine.accept(job, 0.0) for job in jobs])
    calls = []

    def watch(loop):
        calls.append(1)
        clean(loop)
        engine.gone |= {1: {0}, 4: {3}, 6: {8}}.get(len(calls), set())

    engine.run(watch)
    states = [entry.state for entry in engine.loop.entries]
    assert [i for i, state in enumerate(states) if state == "gone"] == [0, 3, 8]
    for job in jobs:
        if states[job.id] == "ended":
            assert job.written == alone(texts()[job.id])[: prompts[job.id].max_new_tokens]
    ledger = engine.loop.ledger
    assert not ledger.tables and ledger.free + ledger.idle == PAGES and not audit(ledger, engine.loop.tree)


@pytest.mark.parametrize(
    "given, said",
    [
        (Prompt([1, 64]), "request 1: .*token id 64"),
        (Prompt([]), "request 1: .*at least one"),
        (Prompt([1], 0), "request 1: max_new_tokens is 0"),
        (Prompt([1], 4, "snapkw"), "did you mean"),
        (Prompt([1] * 9000, 4), "request 1: the prompt reaches position"),
    ],
)
def test_what_generate_would_refuse_is_refused_before_anything_runs(given, said):
    with pytest.raises(ValueError, match=said):
        run(battery.model("4/2"), [Prompt([1]), given])


@pytest.mark.rotating
def test_pages_of_half_words_are_refused_first():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), battery.model("4/2").params)
    with pytest.raises(kvjax.InputError, match="a multiple of 2 in bfloat16"):
        run(Model(battery.model("4/2").config, half), [Prompt([1, 2])], System(words.Blocks(3)))


@pytest.mark.rotating
def test_pages_hold_windows_and_say_what_they_do_not_hold():
    prompts = crowd()[:4]
    done = run(battery.model("windowed"), prompts, PAGED, pages=PAGES, watch=clean)
    check_alone(done, prompts, "windowed")
    why = pages_refusal(battery.model("4/2"), kvjax.method("h2o", budget=0.5))
    assert why == "h2o has steps, slots or weights of its own"
    assert "windowed" in pages_refusal(battery.model("windowed"), kvjax.method("keydiff", budget=0.5))


@pytest.mark.rotating
def test_the_command_serves_drawn_requests_and_compares_them_with_generate(monkeypatch, capsys):
    monkeypatch.setattr("kvjax.io.load.load", lambda *_, **__: battery.model("4/2"))
    words = ["--synthetic", "tree:requests=4,groups=1,prefix=600,suffix=300,output=200", "--scale", "40"]
    assert main(["serve", "run", "--system", "sglang(page=4,rows=1)", "--check", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["equal"], found["unequal"], found["failed"]) == (4, 4, 0, 0)
    assert not found["simulated"] and "measured on" in found["costs"] and found["hit_rate"] > 0.3


@pytest.mark.parametrize(
    "words, said",
    [
        (["--system", "vlm"], "did you mean vllm?"),
        (["--method", "snapkw"], "did you mean 'snapkv'?"),
        (["--scale", "0"], "--scale"),
        (["--synthetic", "tree:requests=1,prefix=9000"], "more than the 2048 positions of the model"),
    ],
)
def test_what_cannot_be_served_is_answered_in_a_line(words, said, capsys):
    load = [] if "--synthetic" in words else ["--synthetic", "tree:requests=1,prefix=8,suffix=8"]
    assert main(["serve", "run", *words, *load]) == 2
    assert said in capsys.readouterr().err


def test_equal_keys_are_equal_tokens_and_lengths_are_divided():
    asked = synthetic("tree:requests=30,groups=3,prefix=600,suffix=300,output=200")
    found = texts_of(scaled(asked, 20), 64, 2048)
    for one, text in zip(asked, found, strict=True):
        assert len(text) == -(-one.prompt // 20) and max(text) < 64
    heads = {one.keys[0]: tuple(text[:30]) for one, text in zip(asked, found, strict=True)}
    assert len(set(heads.values())) == len(heads) == 3
    assert all(tuple(text[:30]) == heads[one.keys[0]] for one, text in zip(asked, found, strict=True))
