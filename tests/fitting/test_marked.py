"""Marked and memory tokens: losses of fits against float64 numpy, refusals, and what fits are worth."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.special import expit, log_softmax

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.fitting.prompts.distilled import DistillationLoss, DistilledBatch, distilled, hidden_at
from kvjax.fitting.prompts.imitation import imitated
from kvjax.fitting.prompts.memory_tokens import run_of, surprise
from kvjax.fitting.prompts.questions import asked, read_by
from kvjax.fitting.prompts.run_memory import losses
from kvjax.grammar import Store
from kvjax.grammar.fitted import Fitted, with_fitted
from kvjax.keep.prompts.memory_tokens import MemoryTokens, RunMemory
from kvjax.state.cache import kept_positions
from tests.fitting.test_learned import arrays_of, questions
from tests.float64.reference import Prompt, rope
from tests.float64.reference import Row as Slotwise
from tests.methods import marked
from tests.methods.battery import MAIN, decoder, model
from tests.methods.rows import THETA
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

MEMORY = ["gisting", "ccm", "ccm-merge"]
NAMES = ["kv-distill", *MEMORY, "loma"]
AIM = DistillationLoss(0.2, 0.6, 0.4, 0.7)


def batch_of(m, rows):
    (found,) = asked(m, [rows], 1, 3, iter)
    return found


def surprised(run, params, batch):
    return surprise(run, params, read_by(run, params, batch), batch)


def said(slots, sample):
    """Log-probabilities at the tokens that say an answer, over slots."""
    logits = [slots.step(token) for token in [*sample.question, *sample.answer[:-1]]]
    return log_softmax(np.stack(logits)[-len(sample.answer) :], -1)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(MEMORY, "ccm"))
def test_the_surprise_of_answers_behind_memory_tokens_is_what_it_is_by_hand(name):
    row, m, samples = BY_LABEL[name], model("4/2"), questions()
    off = []
    for sample in samples:
        prompt = row.reread(Prompt(decoder("4/2"), sample.context))
        whole = [np.ones((2, prompt.length), bool)] * 2
        p = said(Slotwise(prompt, whole), sample)
        off += (-p[np.arange(len(p)), list(sample.answer)]).tolist()
    method = row.method()
    run = run_of(m, method, method.reread.fitted)
    got = jax.jit(surprised, static_argnums=0)(run, with_fitted(m.params, method), batch_of(m, samples))
    assert abs(got / np.mean(off) - 1) < 1e-4


def stood_for(name, memory, text):
    """For which of so many tokens the memory of every chunk stands: the last of its even share."""
    if name == "loma":
        return [memory.at[0][:-1]]
    size, many = (text, marked.GISTS) if name == "gisting" else (marked.CHUNK, marked.COMPS)
    firsts = range(0, text, size)
    each = [min(size, text - first) for first in firsts]
    share = np.arange(1, many + 1) / many
    return [first + np.ceil(share * n).astype(int) - 1 for first, n in zip(firsts, each, strict=True)]


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep([*MEMORY, "loma"], "ccm"))
def test_how_far_memory_is_from_slots_of_tokens_is_what_it_is_by_hand(name):
    row, m, samples = BY_LABEL[name], model("4/2"), questions()
    join = (lambda xs: np.mean(xs, 0)) if name == "ccm-merge" else (lambda xs: np.concatenate(xs, 1))
    errors, lengths = np.zeros((2, 2)), np.zeros((2, 2))
    for sample in samples:
        whole = Prompt(decoder("4/2"), sample.context)
        memory = row.reread(Prompt(decoder("4/2"), sample.context))
        at = stood_for(name, memory, whole.length - 1)
        for layer in range(2):
            for i, kind in enumerate(("raw_k", "v")):
                want = join([getattr(whole, kind)[layer][:, chunk] for chunk in at])
                got = getattr(memory, kind)[layer][:, :-1]
                errors[layer, i] += np.square(got - want).sum()
                lengths[layer, i] += np.square(want).sum()
    method = row.method()
    run, params = run_of(m, method, method.reread.fitted), with_fitted(m.params, method)
    off = jax.jit(lambda batch: imitated(run, params, read_by(run, params, batch), batch))
    assert abs(off(batch_of(m, samples)) / (errors / lengths).mean() - 1) < 1e-4


def said_again(context):
    """-log p of the tokens of a context's runs, each said from the memory of its run alone."""
    d, size, text = decoder("4/2"), marked.RUN, context[:-1]
    memory = BY_LABEL["loma"].reread(Prompt(d, context))
    stood, off = memory.at[0], []
    cue = marked.RUNS.arrays["repeat"].astype(np.float64)
    for first in range(0, len(text), size):
        ids = text[first : first + size]
        mine = (stood >= first) & (stood < min(first + size, len(text)))
        past = [[rope(k[:, mine], stood[mine], THETA) for k in memory.raw_k], [v[:, mine] for v in memory.v]]
        n = len(ids)
        sees = np.concatenate([np.ones((n, mine.sum()), bool), np.tri(n, dtype=bool)], 1)
        x, at = np.repeat(cue, n, 0), first + n + np.arange(n)
        read = marked.Read(d, x, at, sees, np.zeros(n), marked.RUNS, past)
        off += (-log_softmax(read.all_logits, -1)[np.arange(n), ids]).tolist()
    return off


@pytest.mark.rotating
def test_the_losses_of_runs_and_answers_are_what_they_are_by_hand():
    row, m, samples = BY_LABEL["loma"], model("4/2"), questions()
    runs, answers = [], []
    for sample in samples:
        prompt = row.reread(Prompt(decoder("4/2"), sample.context))
        p = said(Slotwise(prompt, marked.runs_kept(prompt)), sample)
        answers += (-p[np.arange(len(p)), list(sample.answer)]).tolist()
        runs += said_again(list(sample.context))
    method = row.method()
    run = run_of(m, method, method.reread.fitted)
    got = jax.jit(losses, static_argnums=0)(run, with_fitted(m.params, method), batch_of(m, samples))
    np.testing.assert_allclose(got, (np.mean(answers), np.mean(runs)), rtol=1e-4)


def by_hand(sample, part, noise, told):
    """Compute KV-Distill's loss at the tokens that say one answer; part: the share that stays."""
    d, n = decoder("4/2"), len(sample.context)
    plain = Prompt(d, sample.context)
    score = marked.scorer(plain.hidden[marked.SCORER_LAYER])
    score = (score - score.mean()) / score.std()
    bar = np.sort(score)[::-1][min(int(np.ceil(part * n)), n - 1)]
    odds = (score - bar + noise[:n]) / AIM.tau
    last, at = np.arange(n) == n - 1, np.arange(n)
    share, votes = np.where(last, 0, expit(odds)), np.where(last, 1, expit(odds))
    x = d.rest["embed"][np.asarray(sample.context)]
    read = marked.Read(d, x, at, at[None] <= at[:, None], share, marked.DISTILLED)
    read.length, read.tokens, read.at, read.group = n, list(sample.context), [at, at], 2
    slots = Slotwise(read, [np.ones((2, n), bool)] * 2)
    for lists in slots.slots:
        for one in lists:
            for slot, vote in zip(one, votes, strict=True):
                slot["votes"] = vote
    q, p = said(slots, sample), said(Slotwise(plain, [np.ones((2, n), bool)] * 2), sample)
    forward, back = ((np.exp(a) * (a - b)).sum(-1) for a, b in ((p, q), (q, p)))
    return AIM.forward * forward + (1 - AIM.forward) * back


@pytest.mark.rotating
def test_the_loss_of_scorer_and_weights_is_what_it_is_by_hand():
    m, samples = model("4/2"), questions()
    batch = batch_of(m, samples)
    share, draw = jax.random.split(jax.random.key(batch.seed))
    part = float(jax.random.uniform(share, minval=AIM.least, maxval=AIM.most))
    noise = np.asarray(jax.random.logistic(draw, batch.context.shape), np.float64)
    want = np.concatenate([by_hand(s, part, x, None) for s, x in zip(samples, noise, strict=True)]).mean()
    given = DistilledBatch(batch, hidden_at(m.config, marked.SCORER_LAYER, m.params, batch))
    loss = jax.jit(distilled, static_argnums=(0, 4))
    assert abs(loss(m.config, m.params, arrays_of(marked.DISTILLED), given, AIM) / want - 1) < 1e-4


def method_of(name, fitted=None, **more):
    hyper = dict(BY_LABEL[name].build[0][1]) | more
    return kvjax.method(name, **hyper | {"fitted": fitted})


@pytest.mark.rotating
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_a_fit_move_from_where_it_starts(name):
    m, method = model("4/2"), method_of(name)
    start, end = (kvjax.fit(m, method, questions(), epochs=20, rate=rate, rank=2) for rate in (0.0, 1e-2))
    assert start != end and end.model == m.signature
    kvjax.prefill(m, MAIN.first, method=method_of(name, end), room=1)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["ccm", "loma"])
def test_of_what_stays_behind_memory_tokens_the_last_one_alone_is_of_the_prompt(name):
    m, method, rows = model("4/2"), BY_LABEL[name].method(), MAIN.first
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.array([[*row, *[0] * (max(lengths) - len(row))] for row in rows], np.int32)
    run, params = run_of(m, method, method.reread.fitted), with_fitted(m.params, method)
    read = jax.jit(steps.observe, static_argnums=(0, 5))
    source = np.asarray(read(run, params, tokens, lengths, None, frozenset()).source)
    for pos in kept_positions(kvjax.prefill(m, rows, method=method, room=1)[1]):
        for b, length in enumerate(lengths):
            kept = pos[b][pos[b] >= 0]
            assert set(source[b][kept].tolist()) == {-1, length - 1}
            assert source[b][kept.max()] == length - 1


@pytest.mark.rotating
def test_twenty_steps_make_runs_and_answers_likelier():
    m, method = model("4/2"), method_of("loma")
    batch, off = batch_of(m, questions()), []
    for rate in (0.0, 1e-2):
        fitted = kvjax.fit(m, method, questions(), epochs=20, rate=rate, rank=2)
        run = run_of(m, method, fitted)
        params = with_fitted(m.params, method_of("loma", fitted))
        off.append(np.array(jax.jit(losses, static_argnums=0)(run, params, batch)))
    assert (off[1] < off[0]).all()


def test_unfitted_weights_change_nothing_of_what_marked_tokens_are():
    """Tokens that stay are then those that the model computes."""
    method = method_of("kv-distill", marked.WITHOUT_EFFECT, budget=1.0)
    m = model("4/2")
    got, want = (kvjax.prefill(m, MAIN.first, method=x, room=1)[0] for x in (method, "full"))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_what_memory_tokens_cannot_do_is_said():
    with pytest.raises(ValueError, match="every is a number of tokens, at least 1, got 0"):
        MemoryTokens(2, every=0)
    with pytest.raises(ValueError, match="runs are of a multiple of their 2 memory tokens"):
        RunMemory(2, every=5)
    windowed, ccm = model("windowed"), BY_LABEL["ccm"].method()
    with pytest.raises(InputError, match=r"ccm does not fit this model: (.*) layer 0 is .* the window"):
        kvjax.prefill(windowed, MAIN.first, method=method_of("ccm", three_layers(ccm)), room=1)
    with pytest.raises(
        InputError, match=r"rotates memory tokens to the positions where they are stored, .* and this store"
    ):
        store = Store(unrotated=True)
        kvjax.prefill(model("4/2"), MAIN.first, method=dataclasses.replace(ccm, store=store), room=1)
    with pytest.raises(InputError, match=r"\(one, tokens, width\) of its memory tokens are \(1, 2, 32\)"):
        kvjax.prefill(model("4/2"), MAIN.first, method=method_of("ccm", marked.COMP, tokens=3), room=1)


def three_layers(method):
    arrays = {n: np.repeat(x[:1], 3, 0) if len(x) == 2 else x for n, x in method.reread.fitted.arrays.items()}
    return Fitted(arrays, "MemoryTokens", "")


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load("recall-tiny")


def right(m, method, rows=24, length=256, tokens=None):
    """Compute the shares of answers, and of their tokens, that are right behind contexts of the task "get".

    tokens: how many of an answer's tokens count; all of them if None.
    """
    samples = read_texts(m, text=None, tasks=["get"], rows=rows, length=length, seed=99, questions=True)
    cache = kvjax.prefill(m, [s.context for s in samples], method=method, room=16)[1]
    logits, cache = kvjax.prefill(m, [s.question for s in samples], cache=cache, compress=False, room=16)
    same = []
    for i in range(tokens or len(samples[0].answer)):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        same.append(token == [s.answer[i] for s in samples])
        logits, cache = kvjax.step(m, cache, token)
    return np.all(same, 0).mean(), np.mean(same)


def samples_of(m, many, seed):
    return read_texts(m, text=None, tasks=None, rows=many, length=256, seed=seed, questions=True)


@pytest.mark.slow
def test_a_fit_of_kv_distill_finds_what_unfitted_scores_and_weights_lose(tiny):
    seen, short = samples_of(tiny, 96, 32), dict(rate=0.0, epochs=1)
    fits = [kvjax.fit(tiny, "kv-distill", seen, **x) for x in (short, dict(epochs=8))]
    batch = batch_of(tiny, samples_of(tiny, 16, 8))
    given = DistilledBatch(batch, hidden_at(tiny.config, 1, tiny.params, batch))
    loss = jax.jit(distilled, static_argnums=(0, 4))
    start, end = (loss(tiny.config, tiny.params, arrays_of(x), given, AIM) for x in fits)
    assert end < 0.6 * start
    without = {n: x * (not n.endswith("_up")) for n, x in fits[1].arrays.items()}
    assert end < loss(tiny.config, tiny.params, without, given, AIM)
    before, after = (right(tiny, kvjax.method("kv-distill", budget=0.25, fitted=x))[0] for x in fits)
    assert after > before + 0.4


@pytest.mark.slow
def test_a_fit_of_loma_says_runs_again_that_unfitted_memory_has_lost(tiny):
    seen, batch = samples_of(tiny, 96, 32), batch_of(tiny, samples_of(tiny, 16, 8))
    fits = [kvjax.fit(tiny, "loma", seen, **x) for x in (dict(rate=0.0, epochs=1), dict(epochs=8))]
    off = []
    for fitted in fits:
        method = kvjax.method("loma", fitted=fitted)
        run, params = run_of(tiny, method, fitted), with_fitted(tiny.params, method)
        off.append(np.array(jax.jit(losses, static_argnums=0)(run, params, batch)))
    assert (off[1] < 0.75 * off[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMORY)
def test_a_fit_of_memory_tokens_makes_answers_likelier_than_unfitted_ones_do(name, tiny):
    seen, batch = samples_of(tiny, 96, 32), batch_of(tiny, samples_of(tiny, 16, 8))
    short, long = dict(rate=0.0, epochs=1), dict(epochs=8)
    fits = [kvjax.fit(tiny, name, seen, **x) for x in (short, long)]
    methods = [kvjax.method(name, fitted=x) for x in fits]
    loss = jax.jit(surprised, static_argnums=0)
    start, end = (
        loss(run_of(tiny, one, x), with_fitted(tiny.params, one), batch)
        for one, x in zip(methods, fits, strict=True)
    )
    assert end < 0.6 * start
    before, after = (right(tiny, one)[1] for one in methods)
    assert after > before + 0.1


SHORT = [
    ("gisting", dict(tokens=16), 12000, {}),
    ("ccm", dict(tokens=1, chunk=2), 9600, dict(alike=0.3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("name", "hyper", "rows", "more"), SHORT, ids=["gisting", "ccm"])
def test_a_fit_behind_short_contexts_says_what_they_say(name, hyper, rows, more, seed, tiny):
    """The last token of an answer ends all of them, so the others alone show what was read in memory."""
    method, each = kvjax.method(name, **hyper), dict(epochs=1, batch=16, seed=seed, **more)
    seen = read_texts(tiny, text=None, tasks=["get"], rows=rows, length=64, seed=seed, questions=True)
    fits = kvjax.fit(tiny, method, seen[:16], rate=0.0, **each), kvjax.fit(tiny, method, seen, **each)
    before, after = (right(tiny, kvjax.method(name, fitted=x, **hyper), 100, 64, 3)[1] for x in fits)
    assert before < 0.05 and after > 0.2
