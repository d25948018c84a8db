"""Codes of several tokens under keeps that evict while decoding: what is kept, and what steps answer."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.observe import Mass
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention
from tests.float64.granules import Granules, heaviest
from tests.float64.reference import Prompt, best
from tests.methods.battery import MAIN, VOCAB, decoder, model, off, positions
from tests.methods.table import BY_LABEL

BUDGET, RECENT, GROUP, RESIDUAL, TOKENS = 14, 4, 4, 3, 40
H2O = kvjax.method("h2o", budget=BUDGET, recent=RECENT / BUDGET)


def kivi(**hyper):
    return kvjax.method("kivi", **(dict(bits=8, group=GROUP, residual=RESIDUAL) | hyper))


def fed(method, prompts, tokens, name="4/2"):
    """Feed a decode; return the logits and positions of every step, and the last cache."""
    m, out = model(name), []
    _, cache = kvjax.prefill(m, prompts, method=method, room=TOKENS)
    for token in tokens:
        logits, cache = kvjax.step(m, cache, token.tolist())
        out.append((np.asarray(logits, np.float64), positions(cache)))
    return out, cache


def drawn(rows, seed=5):
    return np.random.default_rng(seed).integers(0, VOCAB, (TOKENS, rows))


def h2o_kept(prompt):
    """Keep the newest tokens, and those of the largest mass."""
    found = []
    for p in prompt.p:
        mass = p.reshape(2, -1, *p.shape[1:]).sum((1, 2))
        mass[:, prompt.length - RECENT :] = np.inf
        found.append(best(mass, np.full(2, BUDGET)))
    return found


@dataclasses.dataclass(frozen=True)
class OfNow(Word):
    """The attention that slots receive of what is read right now, summed over a group."""

    @property
    def needs(self):
        return frozenset({Mass("sum")})

    def __call__(self, view, seen):
        return seen.of(Mass("sum"))


NOW = Method(Keep(OfNow(), Budget(BUDGET), Uniform(), (Recent(RECENT),), when=STEP))
# The keep, what a token leaves by, the bits of codes, the error, and what happened to granules.
RULES = {"h2o": (H2O, "mass", 8, 0.01, ()), "now": (NOW, "now", 4, 0.1, ("emptied", "gathered"))}


@pytest.mark.rotating
@pytest.mark.parametrize("rule", RULES)
def test_the_union_of_codes_and_tail_loses_its_worst_token(rule):
    method, name, bits, error, happened = RULES[rule]
    tokens, rows = drawn(len(MAIN.first)), []
    for first in MAIN.first:
        prompt = Prompt(decoder("4/2"), first)
        places = -(-(BUDGET + 1 - RESIDUAL) // GROUP)
        how = dict(bits=bits, group=GROUP, residual=RESIDUAL, places=places)
        rows.append(Granules(prompt, h2o_kept(prompt), **how, worst=heaviest(BUDGET, RECENT, name)))
    done, cache = fed(kvjax.chain(method, kivi(bits=bits)), MAIN.first, tokens)
    for token, (logits, held) in zip(tokens, done, strict=True):
        for b, row in enumerate(rows):
            assert off(logits[b], row.step(token[b])) < error
            assert [lists[b] for lists in held] == row.positions()
    assert all(sum(row.memory[what] for row in rows) for what in happened)
    # Bytes are those of the budget, a granule of holes, and a plain tail.
    assert [part.capacity for part in cache.groups[0].parts] == [places * GROUP, RESIDUAL + GROUP]


def alike(one, other, error):
    """Two decodes that keep the same tokens, and whose logits differ by less than `error`."""
    for (logits, held), (others, kept) in zip(one, other, strict=True):
        assert held == kept
        assert off(logits, others) < error


@pytest.mark.rotating
def test_a_keep_that_nothing_leaves_is_the_store_alone():
    first, tokens = [MAIN.first[0][:20], MAIN.first[1][:20]], drawn(2)[:20]
    whole = kvjax.method("h2o", budget=1.0, recent=0.5)
    both, alone = kvjax.chain(whole, kivi(bits=2)), kivi(bits=2)
    alike(fed(both, first, tokens)[0], fed(alone, first, tokens)[0], 1e-5)


# Scores of masses, positions, keys, carried queries and thresholds; after every token and after several.
KEEPS = ["h2o", "tova", "streamingllm", "r-kv", "hashevict", "pagedeviction", "lagkv", "corm", "dcp"]
KEEPS += ["duoattention", "kvzap", "dms"]


@pytest.mark.rotating
@pytest.mark.parametrize("label", KEEPS)
def test_codes_behind_a_residual_that_holds_all_are_the_keep_alone(label):
    row, tokens = BY_LABEL[label], drawn(len(MAIN.first))[:12]
    plain = fed(row.method(), MAIN.first, tokens, name=row.model)[0]
    alike(
        fed(kvjax.chain(row.method(), kivi(residual=64)), MAIN.first, tokens, name=row.model)[0], plain, 1e-5
    )
    # With little residual most slots are codes of 8 bits: near, until one decision is another.
    coded = fed(kvjax.chain(row.method(), kivi(residual=2)), MAIN.first, tokens, name=row.model)[0]
    same = [held == kept for (_, held), (_, kept) in zip(coded, plain, strict=True)]
    until = same.index(False) if False in same else len(same)
    assert until > 0
    for (logits, _), (others, _) in zip(coded[:until], plain, strict=False):
        assert np.isfinite(logits).all() and off(logits, others) < 0.1


@pytest.mark.rotating
def test_what_is_remembered_of_slots_moves_with_them_into_codes():
    """A second turn chooses by the attention of both, as where slots lie as computed."""
    keep, found = Method(Keep(AccumulatedAttention(), Budget(0.5), Uniform())), []
    for method in (keep, kvjax.chain(keep, kivi())):
        _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=TOKENS)
        _, cache = kvjax.prefill(model("4/2"), MAIN.second, cache=cache)
        found.append(positions(cache))
    assert found[0] == found[1]
