"""Pairs of methods: where one of both changes no number, the sentence answers as the other one alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.grammar import Method
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.steps import Run
from tests.methods.battery import model, positions
from tests.methods.method_pairs import PROMPTS, STEPS, answers, apart, exact, talked
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

SINKS = exact(sinks=2)


def of(id, **hyper):
    return kvjax.method(id, **hyper)


# Sentences that first tokens apart, as computed, may stand in.
WITH_SINKS = {
    "h2o": lambda: of("h2o", budget=0.5),
    "d2o": lambda: of("d2o", budget=0.5),
    "streamingllm": lambda: of("streamingllm", budget=0.5),
    "r-kv": lambda: of("r-kv", budget=0.5, buffer=4, window=2),
    "adakv": lambda: of("adakv", budget=0.5, window=4),
    "finch": lambda: of("finch", budget=0.5, question=4),
}
# Reads of all there is, beside the same.
READS = {
    "quest": lambda: of("quest", budget=1.0, page=4, skip_layers=0),
    "sparq": lambda: of("sparq", budget=1.0, newest=4),
    "pqcache": lambda: of("pqcache", budget=1.0, newest=4),
    "infllm": lambda: of("infllm", budget=1.0, page=4, newest=4),
    "tidaldecode": lambda: of("tidaldecode", budget=1.0, skip_layers=0),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(WITH_SINKS, "h2o"))
def test_first_tokens_apart_are_ranked_with_all_others(name):
    alone = WITH_SINKS[name]()
    (got, cache), (want, _) = answers(kvjax.chain(alone, SINKS)), answers(alone)
    assert apart(got, want) < 2e-5
    assert all(group.sinks is not None for group in cache.groups)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(READS, "quest"))
def test_a_read_of_all_slots_beside_first_tokens_apart_is_attention_to_all(name):
    got, cache = answers(kvjax.chain(READS[name](), SINKS))
    assert apart(got, answers(kvjax.method("full"))[0]) < 2e-5
    assert all((group.sinks.pos >= 0).all() for group in cache.groups)


# A keep may choose of the shorter text that GemFilter reads.
READ_SHORTER = {
    "h2o": lambda: of("h2o", budget=0.5),
    "adakv": lambda: of("adakv", budget=0.5, window=4),
    "kvzip": lambda: of("kvzip", budget=0.5),
    "fastkv": lambda: of("fastkv", budget=0.5, window=4),
    "streamingllm + int8": lambda: kvjax.chain(of("streamingllm", budget=0.5), of("int8")),
    "restorekv": lambda: BY_LABEL["restorekv"].method(),
    "aqua-kv": lambda: BY_LABEL["aqua-kv"].method(),
    "minicache": lambda: of("minicache", start=0),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(READ_SHORTER, "h2o"))
def test_a_keep_chooses_of_the_text_that_gemfilter_reads_as_if_it_were_given(name):
    whole, keep = model("4/2"), READ_SHORTER[name]()
    word, one = of("gemfilter", budget=0.5, filter_layer=0), PROMPTS[0]
    run, ids = Run(whole.config, word), jnp.asarray([one])
    observe = jax.jit(steps.observe, static_argnames=("run", "needs"))
    read = observe(run, whole.params, ids, jnp.asarray([len(one)]), None, frozenset())
    shorter = [one[i] for i in np.asarray(read.source[0]) if i >= 0]
    assert len(shorter) == len(one) // 2
    got, want = talked(kvjax.chain(word, keep), [one] * 2)[0], talked(keep, [shorter] * 2)[0]
    assert apart(got, want) < 2e-5


MEMORIES = ("gisting", "ccm", "loma", "kv-distill")
# Keeps that look at nothing but slots.
OF_SLOTS = {
    "l2compress": dict(skip_layers=0), "keydiff": {}, "pagedeviction": {}, "random": {}, "sink-recent": {},
    "curdkv": {},
}  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("memory", "keep"),
    sweep([(a, b) for a in MEMORIES for b in OF_SLOTS], ("gisting", "keydiff")),
)
def test_a_keep_of_all_memory_tokens_changes_nothing(memory, keep):
    alone = BY_LABEL[memory].method()
    both = kvjax.chain(alone, of(keep, budget=1.0, **OF_SLOTS[keep]))
    assert apart(answers(both)[0], answers(alone)[0]) < 2e-5


def test_a_keep_chooses_among_memory_tokens_by_their_keys():
    """Of the slots that the reading leaves those of the smallest keys, as numpy ranks them."""
    alone = BY_LABEL["gisting"].method()
    keep = of("l2compress", budget=2, skip_layers=0)
    _, whole = kvjax.prefill(model("4/2"), PROMPTS, method=alone, room=8)
    _, found = kvjax.prefill(model("4/2"), PROMPTS, method=kvjax.chain(alone, keep), room=8)
    for one, other in zip(whole.groups, found.groups, strict=True):
        pos, k = np.asarray(one.tail.pos), np.asarray(one.tail.k, np.float64)
        norms = np.where(pos >= 0, np.linalg.norm(k, axis=-1), np.inf)
        best = np.take_along_axis(pos, np.argsort(norms, -1)[..., :2], -1)
        held = np.sort(np.asarray(other.tail.pos), -1)[..., -2:]
        assert (pos >= 0).sum(-1).min() > 2
        np.testing.assert_array_equal(np.sort(best, -1), held)


@pytest.mark.rotating
def test_blocks_of_what_a_keep_leaves_are_read_as_it_leaves_them():
    keep = of("snapkv", budget=0.5, window=4)
    both = kvjax.chain(keep, of("infllm", budget=1.0, page=4, newest=4))
    assert apart(answers(both)[0], answers(keep)[0]) < 2e-5


@pytest.mark.rotating
def test_a_store_that_was_not_fitted_is_read_in_part():
    store = of("think", group=4, residual=4)
    both = kvjax.chain(store, of("quest", budget=1.0, page=4, skip_layers=0))
    assert apart(answers(both)[0], answers(store)[0]) < 2e-5


@pytest.mark.rotating
@pytest.mark.parametrize("heads", [1, 2])
def test_tova_over_latents_of_full_rank_keeps_what_it_keeps_of_keys(heads):
    """It needs no keys after a token, and one set serves all heads; a second turn computes keys anew."""
    alone, found = of("tova", budget=0.5), []
    latents = Method(make=GroupedLowRank(1.0, heads=heads))
    for method in (alone, kvjax.chain(latents, alone)):
        _, cache = kvjax.prefill(model("4/2"), PROMPTS, method=method, room=24)
        for tokens in STEPS:
            _, cache = kvjax.step(model("4/2"), cache, tokens)
        second, cache = kvjax.prefill(model("4/2"), PROMPTS, cache=cache, room=8)
        held = [[lists[0] for lists in layer] for layer in positions(cache)]
        found.append((np.stack([second, kvjax.step(model("4/2"), cache, STEPS[0])[0]]), held))
    assert apart(found[1][0], found[0][0]) < 2e-5 and found[1][1] == found[0][1]


KIVI = of("kivi", group=8, residual=8)
INSIDE = {
    "think of all channels": (of("think", keys=1.0, group=8, residual=8), KIVI),
    "mustafar of all numbers": (of("mustafar", keys=1.0, values=1.0, residual=8), KIVI),
    "think": (exact(8, residual=8), of("think", group=8, residual=8)),
    "mustafar": (exact(residual=8), of("mustafar", residual=8)),
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(INSIDE, "think of all channels"))
def test_a_store_inside_another_that_loses_nothing_is_that_one(name):
    lossless, alone = INSIDE[name]
    assert apart(answers(kvjax.chain(lossless, alone))[0], answers(alone)[0]) < 2e-5
