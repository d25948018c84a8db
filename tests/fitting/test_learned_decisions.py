"""Decisions of DMS, Attention-Gate and DMC: losses against float64 numpy, and what fits are worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_softmax

import kvjax
from kvjax.commands.texts import read_texts
from kvjax.fitting.gates.eviction_gates import EvictionLoss, attention_odds, evicted, linear_odds
from kvjax.fitting.gates.run_gates import shared
from kvjax.fitting.loops.cuts import CutTexts, cut_after_contexts
from kvjax.keep.gates import eviction_gates
from kvjax.keep.gates.eviction_gates import attention_gate
from tests.fitting.test_learned import arrays_of, found, questions
from tests.float64.reference import rms_norm, rope, softmax
from tests.methods import learned
from tests.methods.battery import MAIN, decoder, model
from tests.sweep import sweep

AIM, RECENT, CUT, SAID, SEED = EvictionLoss(0.9, 2.0, 0.4), 3, 13, 17, 5
TOKENS = [*MAIN.first[0], *MAIN.second[0]][:24]


def noise(layer):
    """Draw what is drawn of one text's tokens."""
    key = jax.random.fold_in(jax.random.key(SEED), layer)
    return np.asarray(jax.random.logistic(key, (1, 2, len(TOKENS))), np.float64)[0]


def by_hand(left):
    """Return (logits behind the cut, with all that was before it and with what is left; the mean decision).

    left(layer, x, raw_k, v, head): unrotated keys, values, what is added to logits, and decisions, of
    [cut].
    """
    d, pos, said, decided = decoder("4/2"), np.arange(len(TOKENS)), [], []
    for thins in (False, True):
        x = d.rest["embed"][np.asarray(TOKENS)]
        for layer, weights in enumerate(d.layers):
            raw_q, raw_k, v = d.project(weights, x)
            q, k = (rope(y, pos, d.config.rope.theta) for y in (raw_q, raw_k))
            s = q @ np.repeat(k, 2, 0).swapaxes(1, 2) / np.sqrt(d.config.head_dim)
            out = softmax(np.where(pos[None] > pos[:, None], -np.inf, s)) @ np.repeat(v, 2, 0)
            inputs = rms_norm(x, weights["attn_norm"], d.config.norm_eps)
            for head in range(4 if thins else 0):
                of = head // 2
                keys, values, amount, decisions = left(layer, inputs, raw_k[of], v[of], of)
                decided.append(decisions)
                keys = np.concatenate([rope(keys, pos[:CUT], d.config.rope.theta), k[of, CUT:]])
                values = np.concatenate([values, v[of, CUT:]])
                for t in range(CUT, len(TOKENS)):
                    s = q[head, t] @ keys[: t + 1].T / np.sqrt(d.config.head_dim)
                    s[:CUT] += amount
                    out[head, t] = softmax(s) @ values[: t + 1]
            x = d.finish(weights, x, out)
        said.append(d.logits(x)[CUT:])
    return *said, np.mean(decided)


def loss_by_hand(left):
    told, said, decided = by_hand(left)
    p, q = log_softmax(told, -1), log_softmax(said, -1)
    return (np.exp(p) * (p - q)).sum(-1)[SAID - CUT :].mean() + AIM.penalty * max(AIM.target - decided, 0)


BATCH = CutTexts(
    jnp.asarray([TOKENS], jnp.int32), jnp.asarray([len(TOKENS)], jnp.int32), jnp.asarray([CUT], jnp.int32),
    jnp.arange(len(TOKENS))[None] >= SAID, jnp.int32(SEED),
)  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(["dms", "attention-gate"], "dms"))
def test_the_loss_of_decisions_about_what_leaves_is_what_it_is_by_hand(name):
    recent = RECENT if name == "dms" else 0

    def left(layer, x, raw_k, v, head):
        if name == "dms":
            a = learned.of_layer(learned.EVICTION, layer)
            logit = (x @ a["out"] + a["out_bias"])[:CUT, head]
        else:
            logit = -learned.attention_odds(x[:CUT], layer)[head]
        odds = (logit + noise(layer)[head, :CUT]) / AIM.tau
        amount = np.where(np.arange(CUT) < CUT - recent, -np.logaddexp(0, odds), 0)
        return raw_k[:CUT], v[:CUT], amount, expit(odds)

    fitted, odds = {
        "dms": (learned.EVICTION, linear_odds), "attention-gate": (learned.ATTENTION_GATE, attention_odds)
    }[name]  # fmt: skip
    m = model("4/2")
    loss = jax.jit(evicted, static_argnums=(0, 4, 5, 6))
    got = loss(m.config, m.params, arrays_of(fitted), BATCH, odds, AIM, recent)
    assert abs(got / loss_by_hand(left) - 1) < 1e-4


@pytest.mark.rotating
def test_the_loss_of_decisions_about_what_shares_a_slot_is_what_it_is_by_hand():
    """Slots are accumulated from their last token to their first, one by one."""

    def left(layer, x, raw_k, v, head):
        a = learned.of_layer(learned.RUNS, layer)
        logit = (x @ a["join"] + a["join_bias"])[:CUT, head]
        odds = (logit + noise(layer)[head, :CUT]) / AIM.tau
        join = expit(odds)
        weight = learned.weighs(x, layer, head)
        rows, amount = np.zeros((CUT, 32)), np.zeros(CUT)
        sums, z = 0.0, 0.0
        for i in reversed(range(CUT)):
            follows = join[i + 1] if i + 1 < CUT else 0.0
            sums = weight[i] * np.concatenate([raw_k[i], v[i]]) + follows * sums
            z = weight[i] + follows * z
            rows[i], amount[i] = sums / z, np.log(z / weight[i]) + (-np.logaddexp(0, odds[i]) if i else 0.0)
        return rows[:, :16], rows[:, 16:], amount, join

    m = model("4/2")
    got = jax.jit(shared, static_argnums=(0, 4))(m.config, m.params, arrays_of(learned.RUNS), BATCH, AIM)
    assert abs(got / loss_by_hand(left) - 1) < 1e-4


def test_a_gate_that_attends_is_the_same_in_strips_of_queries(rng, monkeypatch):
    x, at = jnp.asarray(rng.normal(size=(2, 7, 32)), jnp.float32), jnp.asarray([7 * [1], 6 * [1] + [-1]])
    gate = {name: y[0] for name, y in arrays_of(learned.ATTENTION_GATE).items()}
    whole = attention_gate(gate, x, at >= 0)
    monkeypatch.setattr(eviction_gates, "STRIP", 3)
    np.testing.assert_allclose(attention_gate(gate, x, at >= 0), whole, rtol=1e-5, atol=1e-5)


NAMES = ["dms", "attention-gate", "dmc"]


@pytest.mark.rotating
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_a_fit_move_from_where_it_starts(name):
    m, short = model("4/2"), dict(recent=2) if name == "dms" else {}
    start, end = (
        kvjax.fit(m, name, questions(), epochs=20, batch=4, rate=rate, **short) for rate in (0.0, 1e-2)
    )
    assert start != end and end.model == m.signature
    kvjax.prefill(m, MAIN.first, method=kvjax.method(name, fitted=end), room=1)


@pytest.fixture(scope="module")
def tiny():
    return kvjax.load("recall-tiny")


def losses(name, m, rows):
    """Return the loss of a fit on questions that it has not seen."""
    (batch,) = cut_after_contexts(m, [rows], 1, 0, iter)
    aim = EvictionLoss(0.5, 10.0, 0.3)
    if name == "dmc":
        return lambda fitted: shared(m.config, m.params, arrays_of(fitted), batch, aim)
    odds, recent = (linear_odds, 16) if name == "dms" else (attention_odds, 0)
    return lambda fitted: evicted(m.config, m.params, arrays_of(fitted), batch, odds, aim, recent)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_fit_lowers_the_loss_on_other_questions_and_finds_what_unfitted_decisions_lose(name, tiny):
    options = dict(epochs=12) | (dict(recent=16) if name == "dms" else {})
    window = dict(window=16) if name == "dms" else {}
    seen, other = (
        read_texts(tiny, text=None, tasks=None, rows=n, length=256, seed=n, questions=True) for n in (32, 8)
    )
    start, end = (kvjax.fit(tiny, name, seen, **options, **more) for more in (dict(rate=0.0), {}))
    loss = losses(name, tiny, other)
    assert loss(end) < 0.8 * loss(start)
    before, after = (found(tiny, kvjax.method(name, fitted=x, page=16, **window)) for x in (start, end))
    assert after > before + 0.1
