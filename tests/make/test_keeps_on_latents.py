"""Keeps over rewritten models that store latents: what the model stores changes no selection."""

import contextlib
import dataclasses
import hashlib
from functools import cache

import jax
import numpy as np
import pytest

import kvjax
from kvjax.grammar import Method
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.models.model import Model
from kvjax.models.params import init
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


@pytest.mark.parametrize(
    "method",
    [
        kvjax.method("snapkv", budget=8, window=4),
        kvjax.method("h2o", budget=8),
        kvjax.method("quest", budget=8, page=4, skip_layers=0),
    ],
    ids=lambda method: method.id,
)
def test_a_norm_over_all_heads_is_right_where_heads_keep_different_tokens(method):
    """Every KV head has its own latents here, and evicts or reads others than its neighbour."""
    config = dataclasses.replace(model("4/2").config, layers=2, qk_norm="full")
    m = Model(config, init(config, jax.random.key(0)))
    tokens, found = MAIN.first[:1], []
    for one in (method, kvjax.chain(WHOLE["palu"], method)):
        prepared = kvjax.prepare(m, one)
        _, cache = kvjax.prefill(prepared, tokens, method=one, room=4)
        for token in (3, 5, 7):
            logits, cache = kvjax.step(prepared, cache, np.array([token]))
        found.append(logits)
    assert apart(*found) < 1e-5


@pytest.mark.parametrize("norm", ["full", "head", ""])
def test_a_cache_of_latents_that_were_not_divided_is_refused(norm):
    """Releases that stored the latents of a model with a norm over all heads as they are labelled it so."""
    config = dataclasses.replace(model("4/2").config, layers=1, qk_norm=norm)
    method = WHOLE["palu"]
    m = kvjax.prepare(Model(config, init(config, jax.random.key(0))), method)
    _, cache = kvjax.prefill(m, MAIN.first[:1], method=method, room=1)
    old = hashlib.sha256(f"{m.made_of} {m.made_by!r}".encode()).hexdigest()[:16]
    assert (cache.model == old) == (norm != "full")
    old_cache = dataclasses.replace(cache, model=old)
    with pytest.raises(kvjax.InputError, match="model") if norm == "full" else contextlib.nullcontext():
        kvjax.step(m, old_cache, np.array([3]))


def test_a_norm_over_all_heads_beside_biases_is_refused():
    config = dataclasses.replace(model("4/2").config, qk_norm="full", qkv_bias=True)
    m = Model(config, init(config, jax.random.key(0)))
    with pytest.raises(kvjax.InputError, match="no biases of keys beside qk_norm='full'"):
        kvjax.prepare(m, WHOLE["palu"])
