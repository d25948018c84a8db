"""Fits of learned gates and convolutions against float64 numpy, and what they are worth."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.eval.tasks.sample import ForcedSample
from kvjax.fitting.gates.hidden_gate import GateBatch, guessed, read
from kvjax.fitting.gates.retaining_heads import looked_at, missed
from kvjax.fitting.gates.write_gates import TokenBatch, distilled, kept
from kvjax.fitting.loops.answers import answers
from kvjax.fitting.merges.convolutions import drawn, surprise
from kvjax.fitting.merges.residue import ResidueBatch, kept_before
from kvjax.fitting.merges.residue import cut as cut_texts
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.fitted import SHIPPED, as_fitted, fitted_words, shipped_for, with_fitted
from kvjax.keep.budgets.budget import AcrossLayers, Uniform
from kvjax.keep.gates.gate import Gated
from kvjax.keep.gates.gate_forms import RetainingHead, SinkGate, WriteGate
from kvjax.keep.patterns import Recent
from kvjax.methods import takes_budget
from tests.float64.reference import Prompt, rms_norm, rope, softmax
from tests.methods import learned
from tests.methods.battery import MAIN, decoder, model
from tests.sweep import sweep

TINY = "recall-tiny"
NAMES = ["fast-kvzip", "locret", "wg-kv"]
SHORT = {
    "fast-kvzip": dict(rank=4, sink_keys=3),
    "locret": dict(hidden=8),
    "wg-kv": dict(hidden=8, recent=4),
    "lococo": dict(budget=0.25, slots=2, neighbours=3),
}


def arrays_of(fitted):
    return {name: jnp.asarray(x) for name, x in fitted.arrays.items()}


def questions(rows=MAIN.first[:3]):
    said = [(5, 6, 7), (9,), (3, 1)]
    return [ForcedSample("", "get", tuple(c), (4, 8), a, ((0, 4),)) for c, a in zip(rows, said, strict=True)]


def texts(name):
    return questions() if name == "locret" else MAIN.first


@pytest.mark.rotating
def test_what_answers_look_at_most_and_how_far_heads_are_from_it():
    """The largest logit over the queries that say the answer, and a group's heads."""
    samples, a, m = questions(), arrays_of(learned.RETAINING), model("4/2")
    batch = jax.jit(looked_at, static_argnums=0)(m.config, m.params, answers(m, samples))
    error, apart, count = 0.0, 0.0, 0
    for b, one in enumerate(samples):
        prompt = Prompt(decoder("4/2"), [*one.context, *one.question, *one.answer[:-1]])
        t = len(one.context) + len(one.question)
        count += t
        assert np.asarray(batch.counts[b]).nonzero()[0].tolist() == list(range(t))
        for layer in range(2):
            q, k = prompt.q[layer].reshape(2, 2, -1, 16)[:, :, t - 1 :], prompt.k[layer][:, :t]
            want = np.einsum("kgth,ksh->kgts", q, k).max((1, 2)) / 4
            np.testing.assert_allclose(batch.largest[layer, b, :, :t], want, rtol=2e-4, atol=2e-5)
            said = learned.retaining_score(prompt, layer)[:, :t]
            off = np.abs(said - want)
            error += np.where(off < 1, off**2 / 2, off - 0.5).sum()
            apart += np.square(np.diff(said)).sum()
    got = missed(a, batch, 0.25)
    assert abs(got / (error / (2 * 2 * count) + 0.25 * apart / (2 * count)) - 1) < 1e-4


@pytest.mark.rotating
def test_the_entropy_of_sink_gates_and_scores_is_what_it_is_by_hand(rng):
    x, scores = rng.normal(size=(2, 1, 7, 32)), rng.random((2, 1, 2, 7))
    live = np.arange(7)[None] < 5
    want = 0.0
    for layer in range(2):
        said, y = learned.sink_gate(x[layer, 0, :5], layer), scores[layer, 0, :, :5]
        want -= (y * np.log(said) + (1 - y) * np.log(1 - said)).mean() / 2
    batch = GateBatch(jnp.asarray(x, jnp.float32), jnp.asarray(scores, jnp.float32), jnp.asarray(live))
    assert abs(guessed(arrays_of(learned.SINK_GATE), batch) / want - 1) < 1e-4


def gated_by_hand(tokens, recent, gates=True):
    """Compute the last hidden states behind the norm, and the gates, of a decoder that remembers by gates."""
    d, pos, found = decoder("4/2"), np.arange(len(tokens)), []
    x = d.rest["embed"][np.asarray(tokens)]
    for layer, weights in enumerate(d.layers):
        raw_q, raw_k, v = d.project(weights, x)
        q, k = (rope(y, pos, d.config.rope.theta) for y in (raw_q, raw_k))
        s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
        g = np.stack([learned.write_gate(raw_k[head], pos, layer, head) for head in range(2)])
        found.append(g)
        if gates:
            far = pos[:, None] - pos[None] >= recent
            s = s + np.where(far, np.log(np.repeat(g, 2, 0))[:, None], 0.0)
        p = softmax(np.where(pos[None] > pos[:, None], -np.inf, s))
        x = d.finish(weights, x, p @ np.repeat(v, 2, 0))
    return rms_norm(x, d.rest["norm"], d.config.norm_eps), np.stack(found)


@pytest.mark.rotating
def test_what_write_gates_change_and_let_through_is_what_it_is_by_hand():
    rows, recent, m = [MAIN.first[0][:20], MAIN.first[1][:11]], 3, model("4/2")
    error, through, count = 0.0, 0.0, sum(map(len, rows))
    for row in rows:
        (gated, g), (whole, _) = (gated_by_hand(row, recent, gates) for gates in (True, False))
        error += np.square(gated - whole).mean(-1).sum() / count
        near = np.minimum(recent / np.arange(len(row), 0, -1), 1)
        through += (near + (1 - near) * (1 - (1 - g) ** 2)).mean((0, 1)).sum() / count
    tokens = jnp.asarray([r + [0] * (20 - len(r)) for r in rows], jnp.int32)
    batch = TokenBatch(tokens, jnp.asarray([20, 11], jnp.int32))
    a = arrays_of(learned.WRITE_GATE)
    got = jax.jit(distilled, static_argnums=(0, 1))(m.config, recent, m.params, a, batch)
    assert error > 1e-4
    np.testing.assert_allclose(got, (error, through), rtol=1e-3)
    assert kept(jnp.ones((1, 2, 5)), jnp.asarray([5]), 2) == 1


def surprise_by_hand(tokens, cut, kept):
    """Say how unlikely what is behind a cut is if what is before it was mixed; kept: per layer, [K, cut]."""
    d, pos = decoder("4/2"), np.arange(len(tokens))
    x = d.rest["embed"][np.asarray(tokens)]
    for layer, weights in enumerate(d.layers):
        raw_q, raw_k, v = d.project(weights, x)
        q, k = (rope(y, pos, d.config.rope.theta) for y in (raw_q, raw_k))
        s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
        p = softmax(np.where(pos[None] > pos[:, None], -np.inf, s))
        out = p @ np.repeat(v, 2, 0)
        for head in range(4):
            stays, mass = kept[layer][head // 2], p[head // 2 * 2 : head // 2 * 2 + 2, :cut, :cut].sum((0, 1))
            able = [i for i in np.argsort(mass) if stays[i] and i < cut - learned.NEWEST]
            takes = able[: learned.MIXTURES]
            at = sorted([*takes, *np.flatnonzero(~stays)])
            rows = np.concatenate([raw_k[head // 2][at], v[head // 2][at]], 1)
            new = learned.mix(rows, [i for i, slot in enumerate(at) if slot in takes], layer)
            keys, values = k[head // 2].copy(), v[head // 2].copy()
            for i, slot in enumerate(at):
                if slot in takes:
                    keys[slot] = rope(new[i : i + 1, :16], [slot], d.config.rope.theta)[0]
                    values[slot] = new[i, 16:]
            for t in range(cut, len(tokens)):
                see = [*np.flatnonzero(stays), *range(cut, t + 1)]
                out[head, t] = softmax(q[head, t] @ keys[see].T / np.sqrt(d.config.head_dim)) @ values[see]
        x = d.finish(weights, x, out)
    said = softmax(d.logits(x))[np.arange(cut, len(tokens) - 1), tokens[cut + 1 :]]
    return -np.log(said).mean()


def test_how_unlikely_a_text_is_behind_what_was_mixed_is_what_it_is_by_hand():
    tokens, cut, m = [*MAIN.first[0], *MAIN.second[0]][:24], 13, model("4/2")
    kept = np.random.default_rng(3).random((2, 1, 2, len(tokens))) < 0.5
    batch = ResidueBatch(
        jnp.asarray([tokens], jnp.int32), jnp.asarray([len(tokens)], jnp.int32),
        jnp.asarray([cut], jnp.int32), jnp.asarray(kept),
    )  # fmt: skip
    got = jax.jit(surprise, static_argnums=(0, 1))(
        m.config, learned.NEWEST, m.params, arrays_of(learned.CONV), batch
    )
    assert abs(got / surprise_by_hand(tokens, cut, kept[:, 0, :, :cut]) - 1) < 1e-4


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep([*NAMES, "lococo"], "locret"))
def test_a_fit_moves_from_where_it_starts(name):
    m, options = model("4/2"), SHORT[name] | dict(epochs=2)
    start, end = (kvjax.fit(m, name, texts(name), rate=rate, **options) for rate in (0.0, 1e-2))
    assert start != end and end.model == m.signature
    method = kvjax.method(name, fitted=end, **(dict(budget=0.5) if takes_budget(name) else {}))
    assert {word.fitted for word in fitted_words(method)} == {end}


def test_what_comes_with_kvjax_is_small_and_of_the_shipped_model():
    files = sorted(SHIPPED.glob("*/*.safetensors"))
    assert {*NAMES, "kvzap"} <= {file.stem for file in files}
    assert all(file.stat().st_size <= 100 * 1024 for file in files)
    names = shipped_for(kvjax.load(TINY).signature)
    assert names == {file.stem: f"{TINY}/{file.stem}" for file in files}


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load(TINY)


@pytest.mark.rotating
def test_a_method_finds_what_comes_with_kvjax_and_a_saved_cache_finds_it_again(tiny, tmp_path):
    method = kvjax.chain(kvjax.method("locret", budget=0.5, newest=4), kvjax.method("int8"))
    _, cache = kvjax.prefill(tiny, [list(range(3, 35))], method=method, room=1)
    assert dict(cache.method.spec[1][1][1])["fitted"] == f"{TINY}/locret"
    given = kvjax.method("locret", budget=0.5, newest=4, fitted=f"{TINY}/locret")
    assert cache.method == kvjax.chain(given, kvjax.method("int8"))
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert kvjax.load_cache(tmp_path / "a.cache").method == cache.method
    assert kvjax.prefill(tiny, [[3, 4]], cache=cache, method=method)[1].next.tolist() == [34]


def test_another_model_is_told_which_command_fits_it_and_takes_no_fit_of_this_one(tiny):
    other = dataclasses.replace(tiny, params=tiny.params | {"embed": -tiny.params["embed"]})
    with pytest.raises(InputError, match="never fitted to a model: run `kvjax fit wg-kv --model MODEL"):
        kvjax.prefill(other, [[1, 2]], method="wg-kv")
    foreign = kvjax.method("wg-kv", fitted=f"{TINY}/wg-kv")
    with pytest.raises(InputError, match="wg-kv: it was fitted to another model .* run `kvjax fit wg-kv`"):
        kvjax.prefill(other, [[1, 2]], method=foreign)


@pytest.mark.rotating
def test_a_fit_of_so_many_memory_tokens_is_not_taken_for_another_number_of_them(tiny):
    assert kvjax.prefill(tiny, [[1, 2, 3]], method="gisting", room=1)[1].next.tolist() == [5]
    with pytest.raises(InputError, match="gisting was never fitted .* run `kvjax fit gisting:tokens=3 --mod"):
        kvjax.prefill(tiny, [[1, 2, 3]], method=kvjax.method("gisting", tokens=3), room=1)


def test_programs_that_are_traced_one_after_the_other_share_fitted_arrays(tiny):
    method = kvjax.method(
        "locret", budget=0.5, fitted=dataclasses.replace(as_fitted(f"{TINY}/locret"), word="x")
    )
    total = lambda: sum(jnp.sum(x) for x in jax.tree.leaves(with_fitted({}, method)))  # noqa: E731
    first, second = jax.jit(total)(), jax.jit(lambda: total() + 1)()
    assert second == first + 1


@pytest.mark.rotating
def test_the_signature_of_a_model_is_that_of_its_weights_in_any_dtype(tiny):
    assert kvjax.load(TINY, dtype=jnp.float16).signature == tiny.signature


def found(m, method):
    """Compute the share of records that a method finds in contexts of the task "get"."""
    samples = read_texts(m, text=None, tasks=["get"], rows=24, length=256, seed=99, questions=True)
    right = 0
    for one in samples:
        cache = kvjax.prefill(m, [one.context], method=method, room=1)[1]
        out = kvjax.generate(m, [one.question], cache=cache, max_new_tokens=len(one.answer), stop=[])
        right += tuple(np.asarray(out.tokens[0]).tolist()) == one.answer
    return right / len(samples)


# Options of a fit, and a keep of a part of all slots by what was fitted.
WORTH = {
    "fast-kvzip": dict(rank=8, sink_keys=8, epochs=2),
    "locret": dict(hidden=32),
    "wg-kv": dict(hidden=32, recent=16),
}
GATES = {"fast-kvzip": SinkGate, "locret": RetainingHead, "wg-kv": WriteGate}


def by_gates(name, fitted):
    across, budget = (Uniform() if name == "locret" else AcrossLayers()), (0.5 if name == "wg-kv" else 0.25)
    return Method(Keep(Gated(GATES[name](fitted)), Budget(budget), across, (Recent(16),), page=16))


def losses(name, m, rows):
    """Return the loss of a fit on texts that it may not have seen."""
    if name == "locret":
        seen = looked_at(m.config, m.params, answers(m, rows))
        return lambda fitted: missed(arrays_of(fitted), seen, 0.0)
    rows = [list(row) for row in rows]
    if name == "fast-kvzip":
        (scored,) = read(m, [rows], 1, iter)
        return lambda fitted: guessed(arrays_of(fitted), scored)
    tokens = jnp.asarray([r + [0] * (256 - len(r)) for r in rows], jnp.int32)
    batch = TokenBatch(tokens, jnp.asarray([len(r) for r in rows], jnp.int32))

    def loss(fitted):
        off, through = distilled(m.config, 16, m.params, arrays_of(fitted), batch)
        return off + 0.04 * through

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fit_lowers_the_loss_on_other_texts_and_finds_what_an_unfitted_gate_loses(name, tiny):
    seen, other = (
        read_texts(tiny, text=None, tasks=None, rows=n, length=256, seed=n, questions=name == "locret")
        for n in (32, 8)
    )
    start, end = (kvjax.fit(tiny, name, seen, **WORTH[name], **more) for more in (dict(rate=0.0), {}))
    loss = losses(name, tiny, other)
    assert loss(end) < 0.8 * loss(start)
    assert found(tiny, by_gates(name, end)) > found(tiny, by_gates(name, start)) + 0.25


@pytest.mark.slow
def test_fitted_convolutions_make_the_rest_of_a_text_likelier_than_others_do(tiny):
    def rows(seed, many):
        texts = read_texts(tiny, text=None, tasks=None, rows=many, length=256, seed=seed, questions=False)
        return [list(row) for row in texts]

    method, options = kvjax.method("lococo", budget=0.125), dict(slots=16, neighbours=5)
    found = kvjax.fit(tiny, method, rows(0, 64), epochs=8, **options)
    other, first = rows(5, 16), drawn(tiny.config, *options.values(), seed=0)
    batch = cut_texts(tiny, kept_before(tiny, method, [other]), other, np.random.default_rng(0))
    of = jax.jit(lambda arrays: surprise(tiny.config, 0, tiny.params, arrays, batch))
    dropped = surprise(tiny.config, 0, tiny.params, None, batch)
    assert of(arrays_of(found)) < min(of(first) - 0.03, dropped)


def test_names_of_files_are_not_mistaken_for_what_comes_with_kvjax(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(f"{TINY}").mkdir()
    Path(f"{TINY}/locret").write_bytes(b"x" * 20)
    with pytest.raises(InputError, match=f"{TINY}/locret is damaged"):
        as_fitted(f"{TINY}/locret")
