"""Scores that remember how a slot came to be held: read or written, asked before or not."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs
from kvjax.keep.budgets.phases import IsGenerated, PromptAndGenerated
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.beehive import SampledAttention, SampleState
from kvjax.keep.scores.score import KeyNorm, Position
from tests.float64.reference import Prompt, Row
from tests.keep.test_score import LENGTH, B, H, K, N, S, f32, seen_by
from tests.keep.test_score import view as view  # a fixture
from tests.methods import battery
from tests.methods.table import BY_LABEL

RECEIVED = key_of(AccumulatedMass(Mass("sum")))


def inputs_of(tokens):
    x = jnp.zeros((B, K, tokens, H))
    return Inputs(x, x, x, x[:, 0], jnp.zeros((B, tokens), jnp.int32), jnp.ones(B, jnp.int32))


def test_what_comes_in_a_step_of_its_own_is_written():
    assert (IsGenerated().start(inputs_of(1), K) == 1).all()
    assert (IsGenerated().start(inputs_of(5), K) == 0).all() and IsGenerated().start(inputs_of(5), K).shape[
        -1
    ] == 5


def test_a_prompt_keeps_its_share_and_written_tokens_leave_among_themselves(rng, view):
    written = np.zeros((B, K, S))
    written[:, :, 6:9] = 1
    view = view._replace(traces={key_of(IsGenerated()): f32(written)})
    word, seen = PromptAndGenerated(KeyNorm(), Position(), written=0.4, newest=2), seen_by()
    norm, pos = -np.linalg.norm(np.asarray(view.k, np.float64), axis=-1), np.asarray(view.pos)
    read = (pos >= 0) & (written == 0)
    first = np.where(pos >= (LENGTH - 2)[:, None, None], np.inf, np.where(read, norm, -np.inf))
    got = np.asarray(word(view, seen))
    for b, n in enumerate(LENGTH // 2):
        for head in range(K):
            best = set(np.argsort(-first[b, head], kind="stable")[: int(n * 0.6)].tolist())
            live = range(LENGTH[b])
            want = [pos[b, head, j] if written[b, head, j] else 1e6 if j in best else -np.inf for j in live]
            assert got[b, head, : LENGTH[b]].tolist() == want
    in_step = np.asarray(word(view, seen._replace(query=jnp.zeros((B, N, 1, H)))))
    np.testing.assert_array_equal(in_step[pos >= 0], np.where(written > 0, pos, 1e6)[pos >= 0])


@pytest.mark.rotating
def test_old_samples_thin_out_and_the_peaks_of_others_become_samples(view):
    word, mark = SampleState(stride=3, sinks=2, recent=0.2), np.zeros((B, K, S))
    mark[:, :, 2:7] = 1
    received = np.random.default_rng(3).random((B, K, S))
    received[:, 0, 8:10] = 2.0  # equal ones: the older becomes a sample
    view = view._replace(traces={key_of(word): f32(mark), RECEIVED: f32(received)})
    got = np.asarray(word.judge(view, seen_by()))
    for b, n in enumerate(LENGTH // 2):
        end = LENGTH[b] - int(n * 0.2)
        want = np.where(np.arange(S) < end, -1.0, 0.0)
        want[:2], want[2:7:2], want[LENGTH[b] :] = 0, 1, 0
        for head in range(K):
            mine = want.copy()
            for at in range(7, end, 3):
                mine[at + np.argmax(received[b, head, at : min(at + 3, end)])] = 1
            assert got[b, head].tolist() == mine.tolist()
    few = seen_by()._replace(n=jnp.asarray(LENGTH, jnp.int32))
    np.testing.assert_array_equal(word.judge(view, few), mark)
    score = SampledAttention(3, 2, 0.2)(
        view._replace(traces=view.traces | {key_of(word): f32(got)}), seen_by()
    )
    np.testing.assert_array_equal(score, np.where(got == -1, -np.inf, np.asarray(f32(received))))


@pytest.mark.rotating
def test_a_ring_of_generated_tokens_forgets_the_oldest():
    row, m = BY_LABEL["snapstream"], battery.model("4/2")
    prompts = battery.MAIN.first
    _, cache = kvjax.prefill(m, prompts, method=row.method(), room=12)
    rows = []
    for tokens in prompts:
        prompt = Prompt(battery.decoder("4/2"), tokens)
        rows.append(Row(prompt, row.kept(prompt)))
    for token in np.random.default_rng(8).integers(0, battery.VOCAB, (8, len(prompts))):
        logits, cache = kvjax.step(m, cache, token)
        want = [one.step(int(t), victim=row.victim) for one, t in zip(rows, token, strict=True)]
        assert battery.off(logits, np.stack(want)) < 3e-5
    held = battery.positions(cache)
    assert all(held[i][b] == one.positions()[i] for b, one in enumerate(rows) for i in range(len(held)))
