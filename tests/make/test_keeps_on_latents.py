"""Keeps over rewritten models that store latents: what the model stores changes no selection."""

from functools import cache

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method
from kvjax.make.grouped_low_rank import GroupedLowRank
from tests.methods.battery import MAIN, Prompt, decoder, model, positions
from tests.methods.expected import STAYS, count, critical_score
from tests.methods.method_pairs import answers, apart
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

# Every channel of every KV head: the rewritten models answer as the one that they are made of.
WHOLE = {
    "palu": Method(make=GroupedLowRank(1.0, heads=1)),
    "eigen-attention": BY_LABEL["eigen-attention"].method(),
    "kvpruner": kvjax.method("kvpruner", keep=1.0),
}
# Scores by the output matrix; the last also reads the keys of its own probe.
KEEPS = {
    "criticalkv": kvjax.method("criticalkv", budget=0.5, window=4),
    "defensivekv": kvjax.method("defensivekv", budget=0.5, window=4),
    "kvgrad": kvjax.method("kvgrad", budget=0.5, prefix=(1, 2, 3)),
}
PAIRS = [(keep, make) for keep in KEEPS for make in WHOLE]


@pytest.mark.rotating
@pytest.mark.parametrize(("keep", "make"), sweep(PAIRS, ("kvgrad", "palu"), ("criticalkv", "palu")))
def test_values_are_weighed_as_the_output_matrix_takes_them(keep, make):
    got, _ = answers(kvjax.chain(WHOLE[make], KEEPS[keep]))
    assert apart(got, alone(keep)) < 1e-5


@cache
def alone(keep):
    return answers(KEEPS[keep])[0]


def test_heads_of_one_latent_select_together_and_first_what_most_of_them_put_first():
    """In numpy: CriticalKV's score of two KV heads, whose first stages are infinite for other tokens."""
    row = BY_LABEL["criticalkv"]
    method = kvjax.chain(Method(make=GroupedLowRank(1.0, heads=2)), row.method())
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method)
    differ = 0
    for b, tokens in enumerate(MAIN.first):
        prompt = Prompt(decoder("4/2"), tokens)
        for layer, lists in enumerate(positions(cache)):
            each = critical_score(prompt, layer)
            first = each >= STAYS
            rest = np.where(first, 0, each).sum(0) / np.maximum((~first).sum(0), 1)
            order = np.lexsort((np.arange(len(tokens)), -rest, -first.sum(0)))
            want = sorted(order[: count(len(tokens))].tolist())
            assert sorted(np.asarray(lists[b][0]).tolist()) == want
            differ += (first.any(0) & ~first.all(0)).any()
    assert differ
