"""Prefill and decoding on different devices: the tokens of `generate` alone; only slots of prompts move."""

import threading

import jax
import pytest

import kvjax
from kvjax.serve import Prompt, System, run
from kvjax.serve.device import apart
from kvjax.serve.device import engine as engines_of_loop
from kvjax.serve.device.live import Live
from kvjax.serve.grammar import words
from kvjax.serve.load.metrics import metrics, times
from tests.methods import battery
from tests.methods.table import BY_LABEL
from tests.serve.test_engine import NEW, PAGE, alone, check_alone, crowd, texts
from tests.serve.test_loop import clean


def distserve(prefill=1, decode=1, **more):
    split = words.Apart(prefill, decode)
    return System(words.Blocks(PAGE), batch=words.PrefillFirst(8, 64), split=split, **more)


@pytest.fixture
def engines(monkeypatch):
    """Collect the engines of a run: those that prefill, and those that decode."""
    found, outcome = [], apart._outcome

    def kept(system, jobs, arrived, readers, writers):
        found[:] = [readers, writers]
        return outcome(system, jobs, arrived, readers, writers)

    monkeypatch.setattr(apart, "_outcome", kept)
    return found


def place(engine):
    (words,) = {next(iter(x.devices())) for x in engine.arena.words}
    return words


@pytest.mark.rotating
@pytest.mark.parametrize(
    "methods",
    [
        (None,),
        *(
            pytest.param((one,), marks=pytest.mark.rotating)
            for one in ("int8", "keydiff(budget=0.5)", "kvzip(budget=0.5)")
        ),
    ],
    ids=str,
)
def test_prompts_are_read_on_one_device_and_continued_on_another(methods, engines):
    prompts = crowd(tuple(kvjax.method(one) if one else None for one in methods))[:4]
    done = run(battery.model("4/2"), prompts, distserve(), watch=clean)
    check_alone(done, prompts)
    ((reader,), (writer,)) = engines
    assert (place(reader), place(writer)) == tuple(jax.devices()[:2])
    assert sum(one.read_tokens for one in writer.pages.values()) == 0
    assert reader.computed == sum(len(one.tokens) for one in prompts)
    assert writer.computed == sum(one.max_new_tokens - 1 for one in prompts)
    assert all(one.loop.ledger.free == one.loop.ledger.pages for one in (reader, writer))
    if methods == (None,):
        assert done.outcome.moved == sum(len(one.tokens) for one in prompts)
    figures = metrics(done.outcome)
    assert figures["completed"] == len(prompts) and figures["mean_tpot_ms"] > 0
    assert figures["recomputed_tokens"] == 0 and 0 <= figures["waste"] < 1


@pytest.mark.rotating
def test_requests_of_several_methods_on_four_devices_with_shared_prefixes(engines):
    prompts = crowd((None, BY_LABEL["adakv"].method(), None, BY_LABEL["keydiff"].method()))
    system = distserve(2, 2, share=words.Tree(), evict=words.LRU())
    done = run(battery.model("4/2"), prompts, system, watch=clean)
    check_alone(done, prompts)
    assert [place(one) for kind in engines for one in kind] == jax.devices()[:4]
    assert sum(answer.matched for answer in done.answers) > 0
    assert all(one.computed > 0 for kind in engines for one in kind)


@pytest.mark.rotating
@pytest.mark.parametrize("preempt", [words.Recompute(), words.Swap()], ids=repr)
def test_small_pools_lose_nothing(preempt, monkeypatch):
    def late(self):
        with self.changed:
            self.changed.wait_for(lambda: self.closed)

    # Decoding begins when all prompts are there.
    monkeypatch.setattr(apart.Live, "wait", late)
    prompts = crowd((None, BY_LABEL["adakv"].method()))
    done = run(battery.model("4/2"), prompts, distserve(preempt=preempt), pages=16, watch=clean)
    check_alone(done, prompts)
    assert sum(answer.preempted for answer in done.answers) > 0


@pytest.mark.rotating
def test_jobs_are_handed_on_when_the_iteration_of_their_first_token_has_ended(monkeypatch):
    """Else a decoding engine could end a text before the first token's time."""
    iterate, put, now = engines_of_loop.Engine._run, Live.put, threading.local()

    def iteration(self, effect):
        now.inside = True
        done = iterate(self, effect)
        now.inside = False
        return done

    def handed(self, job):
        assert not now.inside
        put(self, job)

    monkeypatch.setattr(engines_of_loop.Engine, "_run", iteration)
    monkeypatch.setattr(Live, "put", handed)
    done = run(battery.model("4/2"), crowd()[:4], distserve())
    assert times(done.outcome).itl.min() >= 0


@pytest.mark.rotating
def test_a_text_that_ends_with_its_first_token_is_not_handed_on(engines):
    text = texts()[0]
    first = alone(text)[0]
    prompts = [Prompt(text, 1, stop=[]), Prompt(text, NEW, stop=[first]), Prompt(text, NEW, stop=[])]
    done = run(battery.model("4/2"), prompts, distserve())
    assert [answer.reason for answer in done.answers] == ["length", "stop", "length"]
    assert [len(answer.tokens) for answer in done.answers] == [1, 1, NEW]
    assert done.answers[2].tokens.tolist() == alone(text)
    ((_,), (writer,)) = engines
    assert [*writer.jobs] == [2] and done.outcome.moved == len(text)


def test_what_cannot_run_apart_is_refused_before_anything_runs():
    model = battery.model("4/2")
    with pytest.raises(kvjax.InputError, match="request 0: h2o.* is stored in a lane"):
        run(model, [Prompt([1, 2], 2, "h2o(budget=0.5)")], distserve())
    with pytest.raises(kvjax.InputError, match="takes 9 devices, and there are 8"):
        run(model, [Prompt([1, 2], 2)], distserve(8, 1))


@pytest.mark.rotating
def test_an_engine_that_fails_ends_the_run_with_its_error(monkeypatch):
    def breaks(self, *_):
        raise RuntimeError("out of memory")

    for kind in (apart.PrefillEngine, apart.DecodeEngine):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "read", breaks)
            with pytest.raises(RuntimeError, match="out of memory"):
                run(battery.model("4/2"), crowd(), distserve())
