"""Refusals are needed: without its check a sentence of each kind answers wrongly, or cannot run at all."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import steps
from kvjax.grammar import Budget, Method, Store
from kvjax.grammar.facts import Fact, clashes
from kvjax.keep.merges.merge import ZipMerge
from kvjax.make.grouped_low_rank import GroupedLowRank
from kvjax.state.cache import host_nbytes
from kvjax.steps import Run
from kvjax.store.affine import Affine
from kvjax.words import SegmentScores
from tests.methods.battery import model
from tests.methods.method_pairs import PROMPTS, answers, apart, exact, talked, unchecked
from tests.methods.table import BY_LABEL
from tests.sweep import sweep


def of(id, **hyper):
    return kvjax.method(id, **hyper)


SNAP = of("snapkv", budget=0.5, window=4)
QUEST = of("quest", budget=1.0, page=4, skip_layers=0)
TRACED = of("infllm", budget=0.5, page=4, newest=4, sinks=4)
TWO_TIERS = Method(dataclasses.replace(SNAP.keep, lower=Store(Affine(8))))
MERGING = Method(dataclasses.replace(SNAP.keep, merge=ZipMerge(0.0)))
# Latents of full rank, one for each KV head: the model answers as the one that it is made of.
LATENT = Method(make=GroupedLowRank(1.0, heads=1))
# Both layers of the model are merged.
MERGED = of("minicache", start=0)
GEMS = of("gemfilter", budget=0.5, filter_layer=0)
GISTS = BY_LABEL["gisting"].method()
RANGES = BY_LABEL["smoothquant"].method()
FAST = of("fastkv", budget=0.5, window=4, tsp_layer=0, share=0.5)
OFFLOADED = of("offloaded")
# Reads every block of a prompt.
DENSE = Method(read_prompt=SegmentScores(Budget(1.0), segment=8, block=4, skip_layers=0))
FEW = Method(read_prompt=SegmentScores(Budget(4), segment=8, block=4, skip_layers=0))

# The fact, a sentence in which one part needs it and another breaks it, and what answers as it should. A read
# of all keys from host memory (sparq + offloaded) is absent: a CPU, whose two memories are one, can do it.
CASES = {
    "layers that read all of their slots in host memory": (
        Fact.SUMMARIES,
        (OFFLOADED, BY_LABEL["recycled-attention"].method()),
        (BY_LABEL["recycled-attention"].method(),),
    ),
    "slots of every query head in host memory": (
        Fact.SUMMARIES,
        (OFFLOADED, BY_LABEL["magicpig"].method()),
        (BY_LABEL["magicpig"].method(),),
    ),
    "codes over the layer below in host memory": (
        Fact.SUMMARIES,
        (OFFLOADED, BY_LABEL["aqua-kv"].method()),
        (BY_LABEL["aqua-kv"].method(),),
    ),
    "latents scored by the newest queries in steps": (
        Fact.STORED_KEYS,
        (LATENT, BY_LABEL["morphkv"].method()),
        (BY_LABEL["morphkv"].method(),),
    ),
    "latents scored by their hashes": (
        Fact.STORED_KEYS,
        (LATENT, BY_LABEL["hashevict"].method()),
        (BY_LABEL["hashevict"].method(),),
    ),
    "latents rotated anew": (
        Fact.STORED_KEYS,
        (LATENT, BY_LABEL["streamingllm"].method()),
        (BY_LABEL["streamingllm"].method(),),
    ),
    "tokens that upper layers read, chosen by latents": (Fact.STORED_KEYS, (LATENT, FAST), (FAST,)),
    "tokens of a prompt chosen by latents": (Fact.STORED_KEYS, (LATENT, GEMS), (GEMS,)),
    "latents under a read of representative keys": (
        Fact.STORED_KEYS,
        (LATENT, BY_LABEL["infllm"].method()),
        (BY_LABEL["infllm"].method(),),
    ),
    "a second tier under a read": (Fact.ONE_TIER, (TWO_TIERS, QUEST), (TWO_TIERS,)),
    "a keep over merged layers": (Fact.ALL_TOKENS, (SNAP, MERGED), (SNAP,)),
    "keys of ranks under a read": (
        Fact.KEYS_BY_POSITION,
        (of("finch", budget=0.5, question=4), QUEST),
        (of("finch", budget=0.5, question=4),),
    ),
    "memory tokens stored unrotated": (Fact.ROTATED_KEYS, (GISTS, exact(unrotated=True)), (GISTS,)),
    "latents of two heads under a read of traces": (
        Fact.STORED_KEYS,
        (Method(make=GroupedLowRank(1.0, heads=2)), TRACED),
        (TRACED,),
    ),
    "latents under a merge": (Fact.STORED_KEYS, (LATENT, MERGING), (MERGING,)),
    "merges into codes of several tokens": (
        Fact.ONE_BY_ONE,
        (of("d2o", budget=0.5), exact(4)),
        (of("d2o", budget=0.5),),
    ),
    "codes of several tokens in merged layers": (
        Fact.ONE_BY_ONE,
        (MERGED, exact(4)),
        (MERGED,),
    ),
    "merged layers under a read": (Fact.ALL_ATTENDED, (MERGED, QUEST), (MERGED,)),
    "codes of each layer in merged layers": (Fact.ONE_CODE, (MERGED, RANGES), (RANGES,)),
    "first tokens that a second tier encodes": (
        Fact.FIRST_TOKENS,
        (TWO_TIERS, Method(store=Store(Affine(4), Affine(4), sinks=64))),
        (of("full"),),
    ),
    "first tokens in merged layers": (Fact.FIRST_TOKENS, (MERGED, exact(sinks=64)), (of("full"),)),
    "a gate of KV heads over latents of two": (
        Fact.KV_HEADS,
        (BY_LABEL["wg-kv"].method(), Method(make=GroupedLowRank(1.0, heads=2))),
        (BY_LABEL["wg-kv"].method(),),
    ),
    "tokens that hide others in blocks of a prompt": (
        Fact.DENSE_PROMPTS,
        (BY_LABEL["dcp"].method(), DENSE),
        (BY_LABEL["dcp"].method(),),
    ),
    "upper layers with fewer tokens in blocks of a prompt": (
        Fact.DENSE_PROMPTS,
        (FAST, DENSE),
        (FAST,),
    ),
    "weights beside those of a rewritten model": (
        Fact.GIVEN_WEIGHTS,
        (GISTS, of("kvpruner", keep=1.0)),
        (GISTS,),
    ),
    "queries while memory tokens are read": (
        Fact.OBSERVED,
        (GISTS, of("snapkv", budget=1.0, window=2)),
        (GISTS,),
    ),
    "what is asked for while memory tokens are read": (
        Fact.PLAIN_READING,
        (GISTS, of("infllm", budget=1.0, page=4, newest=4)),
        (GISTS,),
    ),
}
# What happens without the check where a sentence cannot run: the exception, and words of it or of the line
# that raises it. Every other case answers otherwise than what is right.
FAILS = {
    "layers that read all of their slots in host memory": (ValueError, "memory_space of all inputs"),
    "slots of every query head in host memory": (ValueError, "memory_space of all inputs"),
    "codes over the layer below in host memory": (ValueError, "nothing that it was fitted to at hand"),
    "a second tier under a read": (ValueError, "a summary has .* got nothing"),
    "keys of ranks under a read": (AssertionError, "_read"),
    "memory tokens stored unrotated": (KeyError, "UnrotatedKeys"),
    "latents of two heads under a read of traces": (TypeError, "incompatible shapes"),
    "merges into codes of several tokens": (AssertionError, "emptied"),
    "codes of several tokens in merged layers": (ValueError, "pytree structure error"),
    "merged layers under a read": (ValueError, "a summary has .* got nothing"),
    "codes of each layer in merged layers": (ValueError, "nothing that it was fitted to at hand"),
    "a gate of KV heads over latents of two": (TypeError, "incompatible shapes"),
    "tokens that hide others in blocks of a prompt": (AssertionError, "__init__"),
    "upper layers with fewer tokens in blocks of a prompt": (TypeError, "incompatible shapes"),
    "queries while memory tokens are read": (ValueError, "was not recorded"),
    "what is asked for while memory tokens are read": (KeyError, "LocalScore"),
}


def sentence(parts):
    with unchecked():
        return kvjax.chain(*parts)


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(CASES, "keys of ranks under a read"))
def test_what_is_refused_answers_wrongly_or_cannot_run(name):
    fact, parts, right = CASES[name]
    with pytest.raises(ValueError, match=fact.value):
        kvjax.chain(*parts)
    refused = sentence(parts)
    assert fact in {clash.fact for clash in clashes(refused)}
    if name in FAILS:
        kind, words = FAILS[name]
        with pytest.raises(kind) as failed:
            answers(refused, checked=False)
        # Another check than the one that is left out is an InputError; an assertion is known by its function.
        assert type(failed.value) is kind
        assert re.search(words, f"{failed.value} {failed.traceback[-1].name}")
        return
    assert apart(answers(refused, checked=False)[0], answers(kvjax.chain(*right))[0]) > 1e-3


def test_every_fact_has_a_case():
    others = {Fact.OWN_SLOTS, Fact.WHOLE_PROMPTS}  # in the tests below
    assert {fact for fact, _, _ in CASES.values()} | others == {*Fact}


@pytest.mark.rotating
def test_memory_tokens_would_be_read_without_the_blocks_of_a_prompt():
    with pytest.raises(ValueError, match=Fact.DENSE_PROMPTS.value):
        kvjax.chain(GISTS, FEW)
    got, _ = answers(sentence((GISTS, FEW)), checked=False)
    assert apart(got, answers(GISTS)[0]) == 0
    assert apart(answers(FEW)[0], answers(of("full"))[0]) > 1e-3


@pytest.mark.rotating
def test_a_prompt_that_is_read_in_blocks_is_scored_by_gradients_of_a_probe_alone():
    """Nothing is refused here: the probe is read over the slots of the prompt, however that was read."""
    keep = of("kvgrad", budget=0.5, prefix=(1, 2, 3))
    assert apart(answers(kvjax.chain(keep, DENSE))[0], answers(keep)[0]) < 1e-5


@pytest.mark.rotating
def test_differences_to_the_layer_below_would_find_no_slots_of_it_in_merged_layers():
    """Another fact stands against the two as well: merged layers share codes, and these differ by layer."""
    one = of("xquant-cl", bits=8, first=8, layers=1, tokens=1)
    refused = sentence((one, MERGED))
    assert {clash.fact for clash in clashes(refused)} == {Fact.OWN_SLOTS, Fact.ONE_CODE}
    with pytest.raises(AssertionError):
        answers(refused, checked=False)


@pytest.mark.rotating
def test_merged_layers_would_stay_on_the_device():
    _, cache = answers(sentence((MERGED, of("offloaded"))), checked=False)
    assert host_nbytes(cache) == 0


def read_shorter(one, name="4/2"):
    """Find the tokens that GemFilter reads of a prompt, and where they are."""
    run, tokens = Run(model(name).config, GEMS), jnp.asarray([one])
    lengths = jnp.asarray([len(one)])
    read = steps.observe(run, model(name).params, tokens, lengths, None, frozenset())
    source = np.asarray(read.source[0])
    return [one[i] for i in source if i >= 0], source[source >= 0]


@pytest.mark.rotating
def test_gemfilter_would_compare_queries_with_keys_that_they_do_not_meet():
    keep = BY_LABEL["lm-infinite"].method()
    with pytest.raises(ValueError, match=Fact.WHOLE_PROMPTS.value):
        kvjax.chain(GEMS, keep)
    shorter, _ = read_shorter(PROMPTS[0])
    got = talked(sentence((GEMS, keep)), [PROMPTS[0]] * 2, checked=False)[0]
    assert apart(got, talked(keep, [shorter] * 2)[0]) > 1e-3


@pytest.mark.rotating
def test_contexts_of_a_text_would_end_elsewhere_in_the_text_that_gemfilter_reads():
    """What is right has contexts of what GemFilter leaves of each, here counted in numpy."""
    ids, lengths = PROMPTS[0], (12, 12)
    contexts = lambda sizes, prefix: of("ape", contexts=sizes, shared_prefix=prefix)  # noqa: E731
    with pytest.raises(ValueError, match=Fact.WHOLE_PROMPTS.value):
        kvjax.chain(GEMS, contexts(lengths, 4))
    shorter, source = read_shorter(ids)
    left = np.histogram(source, (0, 4, 16, 28, len(ids)))[0].tolist()
    want = talked(contexts(tuple(left[1:3]), left[0]), [shorter] * 2)[0]
    got = talked(sentence((GEMS, contexts(lengths, 4))), [ids] * 2, checked=False)[0]
    assert left[1] != 12 and apart(got, want) > 1e-3


@pytest.mark.rotating
def test_homer_would_cut_the_text_that_was_given_where_gemfilter_reads_a_shorter_one():
    keep, name = BY_LABEL["homer"].method(), BY_LABEL["homer"].model
    with pytest.raises(ValueError, match=Fact.WHOLE_PROMPTS.value):
        kvjax.chain(GEMS, keep)
    shorter, _ = read_shorter(PROMPTS[0], name)
    got = talked(sentence((GEMS, keep)), [PROMPTS[0]] * 2, checked=False, name=name)[0]
    assert apart(got, talked(keep, [shorter] * 2, name=name)[0]) > 1e-3
