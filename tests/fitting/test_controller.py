"""ADORE: the loss of its controller against float64 numpy, tiers, refusals, and what its fit is worth."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.fitting.gates.controller import looked_at, missed
from kvjax.fitting.loops.answers import answers
from kvjax.grammar.fitted import Fitted
from kvjax.state.cache import kept_positions
from tests.fitting.test_learned import arrays_of, questions
from tests.float64.reference import Prompt
from tests.methods import controlled, learned
from tests.methods.battery import MAIN, decoder, model

SHARE = 0.3


def adore(**more):
    return kvjax.method("adore", **dict(budget=0.5, newest=2, bits=None, fitted=controlled.CONTROLLER) | more)


def loss_of(m, fitted, samples, share=SHARE):
    given = answers(m, samples)
    batch = looked_at(m.config, share, m.params, given.tokens, given.lengths)
    return float(jax.jit(missed)(arrays_of(fitted), batch))


def by_hand(sample):
    """-log of how likely the controller holds what is true of pairs of tokens, of all layers and heads."""
    tokens = [*sample.context, *sample.question, *sample.answer[:-1]]
    prompt, off = Prompt(decoder("4/2"), tokens), []
    for layer, (x, p) in enumerate(zip(prompt.hidden, prompt.p, strict=True)):
        a = learned.of_layer(controlled.CONTROLLER, layer)
        z = controlled.states(x, a)
        for head in range(learned.KV_HEADS):
            group = p.reshape(learned.KV_HEADS, -1, *p.shape[1:])[head].sum(0)
            for t in range(len(tokens) - 1):
                asked = z[t] @ a["ask"][:, head] + a["ask_bias"][head]
                score = x[: t + 1] @ a["told"][:, head] @ asked
                next_one = group[t + 1, : t + 1]
                most = np.sort(next_one)[::-1][: int(np.ceil(SHARE * (t + 1)))].min()
                off += np.logaddexp(0, np.where(next_one >= most, -score, score)).tolist()
    return off


@pytest.mark.rotating
def test_the_loss_of_a_controller_is_what_it_is_by_hand():
    samples = questions()
    want = np.mean([off for sample in samples for off in by_hand(sample)])
    assert abs(loss_of(model("4/2"), controlled.CONTROLLER, samples) / want - 1) < 1e-4


@pytest.mark.rotating
def test_twenty_steps_make_the_loss_of_a_controller_smaller():
    m, options = model("4/2"), dict(share=SHARE, epochs=5, hidden=6, channels=3)
    start, end = (kvjax.fit(m, "adore", questions(), rate=rate, **options) for rate in (0.0, 1e-2))
    assert loss_of(m, end, questions()) < loss_of(m, start, questions())
    kvjax.prefill(m, MAIN.first, method=adore(fitted=end), room=1)


@pytest.mark.rotating
def test_what_a_prompt_releases_lies_in_a_second_tier_and_nothing_is_lost():
    m, rows = model("4/2"), MAIN.first
    tiers, dropped = (
        kvjax.prefill(m, rows, method=adore(**more), room=1)[1] for more in (dict(bits=4, group=8), {})
    )
    for group, pos in zip(tiers.groups, kept_positions(dropped), strict=True):
        upper, (lower,) = np.asarray(group.tail.pos), (np.asarray(body.pos) for body in group.bodies)
        for b, row in enumerate(rows):
            for head in range(learned.KV_HEADS):
                above, below = ({int(x) for x in part[0, b, head] if x >= 0} for part in (upper, lower))
                assert above == {int(x) for x in pos[b, head] if x >= 0}
                assert above | below == set(range(len(row))) and not above & below


def test_a_controller_of_another_model_is_refused():
    wide = {n: np.concatenate([x, x], 1) if n == "in" else x for n, x in controlled.CONTROLLER.arrays.items()}
    m, method = model("4/2"), adore(fitted=Fitted(wide, "Controller", ""))
    with pytest.raises(InputError, match=r"\(layers, width\) of its controller are \(2, 64\), this model's"):
        kvjax.prefill(m, MAIN.first, method=method, room=1)
    with pytest.raises(InputError, match="never fitted to a model: run `kvjax fit adore"):
        kvjax.prefill(m, MAIN.first, method=adore(fitted=None), room=1)


def right(m, method):
    """Compute the share of answers of the task "get" that are right behind contexts with their questions."""
    samples = read_texts(m, text=None, tasks=["get"], rows=24, length=256, seed=99, questions=True)
    given = [[*s.context, *s.question] for s in samples]
    logits, cache = kvjax.prefill(m, given, method=method, room=16)
    same = []
    for i in range(len(samples[0].answer)):
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        same.append(token == [s.answer[i] for s in samples])
        logits, cache = kvjax.step(m, cache, token)
    return np.all(same, 0).mean()


@pytest.mark.slow
def test_a_fit_of_a_controller_finds_what_an_unfitted_one_releases():
    tiny = kvjax.load("recall-tiny")
    seen, other = (
        read_texts(tiny, text=None, tasks=None, rows=n, length=256, seed=n, questions=True) for n in (48, 4)
    )
    fits = [kvjax.fit(tiny, "adore", seen, hidden=20, **x) for x in (dict(rate=0.0, epochs=1), {})]
    start, end = (loss_of(tiny, x, [s for s in other if s.answer and s.spans], 0.125) for x in fits)
    assert end < 0.6 * start
    before, after = (right(tiny, adore(budget=0.25, newest=16, fitted=x)) for x in fits)
    assert after > before + 0.1
