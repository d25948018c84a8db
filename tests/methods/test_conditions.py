"""Refusals by conditions are needed: without them a sentence answers wrongly, or cannot run at all.

Refusals by facts are in `tests.methods.test_refusals`.
"""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.chains import check
from kvjax.grammar.keys import key_of
from kvjax.grammar.phase import ByRank
from kvjax.grammar.when import PREFILL_END, STEP, Every, WhenFull
from kvjax.keep.budgets.budget import Uniform, UpTo
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.observations.trace import Surprisal
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm, Position
from kvjax.place.host import Host, HostValues
from kvjax.state.cache import host_nbytes
from kvjax.store.affine import Affine
from tests.float64.reference import Row
from tests.methods.battery import MAIN, B, model, off, positions, prompt_of
from tests.methods.method_pairs import answers, apart, exact, unchecked
from tests.methods.table import BY_LABEL
from tests.sweep import sweep

UNIFORM = Uniform()


def of(id, **hyper):
    return kvjax.method(id, **hyper)


def quest(page, budget=0.5):
    return of("quest", budget=budget, page=page, skip_layers=0)


def row(label):
    return BY_LABEL[label].method()


SNAP, H2O, ADA = (
    of(id, budget=0.5, **more)
    for id, more in (("snapkv", dict(window=4)), ("h2o", {}), ("adakv", dict(window=4)))
)
IN_EIGHTS = Method(store=Store(Affine(4, axis="channel", group=8), Affine(4), residual=8))
CHANNELS = Affine(4, axis="channel", group=16)
IN_SIXTEENS = Method(store=Store(CHANNELS, CHANNELS, residual=16))

# For all layers together: what each does alone, as a method of every layer.
OF_ALL_LAYERS = {
    "ranks": of("streamingllm", budget=16),
    "unrotated keys": Method(store=Store(Affine(2), Affine(2), unrotated=True)),
    "query heads": Method(dataclasses.replace(SNAP.keep, per_query_head=True)),
    "a probe": row("kvzip"),
    "rewritten weights": of("kvpruner", keep=0.5),
    "restore tokens": Method(
        dataclasses.replace(row("restorekv").keep, score=KeyNorm(), probe=None, allocate=UNIFORM)
    ),
    "a shorter prompt": of("gemfilter", budget=0.5, filter_layer=0),
    "merged layers": of("minicache", start=0),
    "fewer tokens in upper layers": of("fastkv", budget=0.5, window=4, tsp_layer=0, share=0.5),
}
# What the refusal says, the parts of a sentence that it refuses, and what answers as it should.
METHODS = {
    "a keep beside layers": (
        "its layers already say all",
        (Method(SNAP.keep, layers=(Method(), Method())),),
        (SNAP,),
    ),
    "keys placed anew that are stored rotated": (
        "compares keys before rotation",
        (Method(read=row("reattention").read),),
        (row("reattention"),),
    ),
    "codes of rotated keys": (
        "compares keys before rotation",
        (Method(read=row("a2ats").read),),
        (row("a2ats"),),
    ),
    "values of what only some steps pick": (
        "brings the values that every layer picks in every step",
        (HostValues(), row("recycled-attention")),
        (row("recycled-attention"),),
    ),
    "values of what every query head picks": (
        "brings the values that every layer picks in every step",
        (HostValues(), row("magicpig")),
        (row("magicpig"),),
    ),
    "copies of pages that lose slots": (
        "holds copies of pages on the device, and the keep evicts",
        (Host(0.5), quest(4), H2O),
        (quest(4), H2O),
    ),
    "copies of pages of unequal heads": (
        "copies of pages of equally many slots",
        (Host(0.5), quest(4), ADA),
        (quest(4), ADA),
    ),
    "copies of parts of codes": (
        "which must be a multiple of the 16 tokens",
        (Host(0.5), quest(4), IN_SIXTEENS),
        (quest(4), IN_SIXTEENS),
    ),
}  # fmt: skip
METHODS |= {
    f"{name} in layers": ("concern all layers together", (Method(layers=(one, one)),), (one,))
    for name, one in OF_ALL_LAYERS.items()
}


def keep(score, budget=0.5, allocate=UNIFORM, **more):
    return Method(Keep(score, Budget(budget), allocate, **more))


def changed(method, **more):
    """Give a method other words in its keep."""
    return Method(dataclasses.replace(method.keep, **more))


# Stores slots of a second tier as they are.
SAME = exact().store
STREAMING = of("streamingllm", budget=20)
ALL = (of("full"),)
# What the refusal says, a keep that it refuses, and what answers as it should.
KEEPS = {
    "more protected tokens than the budget": (
        "8 of a long prompt's tokens must stay",
        keep(KeyNorm(), 4, protect=(Recent(8),)),
        (keep(Position(), 8),),
    ),
    "a budget that is larger than what evicts": (
        "give a smaller budget",
        keep(AccumulatedAttention(), 20, when=WhenFull(16)),
        (keep(AccumulatedAttention(), 16, when=STEP),),
    ),
    "more high scores than slots": (
        "can give high scores to more slots than fit",
        keep(AccumulatedAttention(), allocate=UpTo(0.0), when=STEP),
        ALL,
    ),
    "observations of prompts in steps": (
        "observes prefills only",
        changed(row("q-filters"), when=STEP),
        (row("q-filters"),),
    ),
    "slots that tokens drop, after several tokens": (
        "slots that newer tokens drop are evicted in every step",
        changed(row("dcp"), when=Every(4)),
        (row("dcp"),),
    ),
    "a threshold over a second tier": (
        "a second tier has as many slots as a budget evicts",
        keep(AccumulatedAttention(), allocate=UpTo(1e9), lower=SAME),
        ALL,
    ),
    "single slots of a second tier that encodes several": (
        "takes slots one by one while decoding",
        changed(H2O, lower=IN_EIGHTS.store),
        ALL,
    ),
    "newest slots of a second tier": (
        "has no newest tokens",
        changed(SNAP, lower=Store(Affine(2), Affine(2), residual=64)),
        ALL,
    ),
    "merges beside a second tier": (
        "no slot is dropped that others could take anything of",
        changed(SNAP, lower=SAME, merge=ZipMerge(0.0)),
        ALL,
    ),
    "a second tier that takes several slots": (
        "a second tier takes slots that are evicted at the end",
        changed(STREAMING, lower=SAME, when=Every(3)),
        ALL,
    ),
    "a second tier of unequal heads in steps": (
        "a second tier takes slots that are evicted at the end",
        changed(row("kvzap"), lower=SAME),
        ALL,
    ),
    "received attention by query heads": (
        "received attention is recorded per KV head",
        changed(H2O, per_query_head=True),
        (H2O,),
    ),
    "directions of KV heads by query heads": (
        "is about KV heads",
        changed(row("q-filters"), per_query_head=True),
        (row("q-filters"),),
    ),
    "answers of KV heads by query heads": (
        "at their positions in the KV heads|received attention is recorded per KV head",
        changed(row("less"), per_query_head=True),
        (row("less"),),
    ),
    "a merge by what is not recorded": (
        "which its score does not record",
        keep(Position(), merge=ValueMerge(), when=STEP),
        ALL,
    ),
    "a probe after a prompt in steps": (
        "cannot score by a probe that follows a prompt",
        changed(row("kvzip"), when=STEP, allocate=UNIFORM),
        (row("kvzip"),),
    ),
    "a probe that the keep does not read": (
        "its score reads the probe",
        changed(row("kvzip"), probe=None),
        (row("kvzip"),),
    ),
}


def needed(says, refused, right):
    """Whether what is refused cannot run, or answers otherwise than what is right."""
    with unchecked():
        sentence = kvjax.chain(*refused) if len(refused) > 1 else refused[0]
    with pytest.raises(ValueError, match=says):
        check(sentence)
    try:
        got, _ = answers(sentence, checked=False)
    except Exception as error:  # noqa: BLE001 (whatever a program of such words raises, it cannot run)
        # Another check than the one that is left out; a full cache is none.
        return "the cache is full" in str(error) or not isinstance(error, MemoryError | kvjax.InputError)
    # A row that has no room left answers NaN.
    return bool(np.isnan(got).any()) or apart(got, answers(kvjax.chain(*right))[0]) > 1e-3


@pytest.mark.parametrize("name", sweep(METHODS))
def test_parts_that_a_condition_keeps_apart_answer_wrongly_or_cannot_run(name):
    assert needed(*METHODS[name])


@pytest.mark.parametrize("name", sweep(KEEPS))
def test_words_of_a_keep_that_a_condition_keeps_apart_answer_wrongly_or_cannot_run(name):
    says, one, right = KEEPS[name]
    assert needed(says, (one,), right)


# Keeps with a second tier of unencoded slots answer as without a keep: nothing is dropped.
TIERS = {
    "ranks": changed(STREAMING, lower=SAME, when=PREFILL_END),
    "ranks in steps": changed(STREAMING, lower=SAME),
    "ranks in pages": changed(ADA, lower=SAME, phase=ByRank()),
    "codes of several slots": changed(SNAP, lower=exact(5).store),
    "codes of several slots in pages": changed(ADA, lower=exact(5).store),
}


@pytest.mark.parametrize("name", sweep(TIERS))
def test_a_second_tier_that_loses_nothing_is_no_keep(name):
    got, cache = answers(kvjax.chain(TIERS[name]))
    assert apart(got, answers(*ALL)[0]) < 2e-6
    assert all(group.bodies for group in cache.groups)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["ranks in steps", "ranks in pages", "codes of several slots"])
def test_a_second_turn_over_a_tier_that_loses_nothing_is_that_over_no_keep(name):
    found = []
    for method in (TIERS[name], *ALL):
        _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=method, room=8)
        for tokens in MAIN.steps:
            _, cache = kvjax.step(model("4/2"), cache, tokens)
        logits, cache = kvjax.prefill(model("4/2"), MAIN.second, cache=cache, room=8)
        found.append(np.stack([logits, kvjax.step(model("4/2"), cache, MAIN.steps[0])[0]]))
    assert apart(*found) < 2e-6


@pytest.mark.rotating
def test_scales_of_several_slots_of_a_second_tier_are_theirs():
    """Scales of five slots, which divide no power of two, of dense slots and of pages; 8 bits."""
    lower = Store(Affine(8, axis="channel", group=5), Affine(8))
    for one in (SNAP, ADA):
        assert apart(answers(changed(one, lower=lower))[0], answers(*ALL)[0]) < 2e-2


def steps_of(method, rows, name="4/2"):
    """How far steps of a method are from those of float64 rows, at the most."""
    worst = 0.0
    with unchecked():
        _, cache = kvjax.prefill(model(name), MAIN.first, method=method, room=8)
        for tokens in MAIN.steps:
            logits, cache = kvjax.step(model(name), cache, tokens)
            want = np.stack([one.step(token) for one, token in zip(rows, tokens, strict=True)])
            worst = max(worst, off(np.asarray(logits, np.float64), want))
    return worst


@pytest.mark.rotating
def test_unequal_heads_of_several_budgets_would_share_pages_of_one():
    small, large = (of("adakv", budget=share, window=2) for share in (0.25, 0.75))
    kept = [
        positions(kvjax.prefill(model("4/2"), MAIN.first, method=one, room=8)[1]) for one in (small, large)
    ]

    def rows(*layers):
        """Float64 rows whose layers hold the tokens that these methods keep."""
        found = []
        for b in range(B):
            prompt = prompt_of("4/2", "main", b)
            stays = [
                np.stack([np.isin(np.arange(prompt.length), [*held]) for held in one[i][b]])
                for i, one in enumerate(layers)
            ]
            found.append(Row(prompt, stays))
        return found

    with pytest.raises(kvjax.InputError, match="share the pages of one keep, and its layers have several"):
        kvjax.by_layer([small, large])
    pairs = zip((small, large), kept, strict=True)
    found = [steps_of(Method(layers=(small, one)), rows(kept[0], held)) for one, held in pairs]
    assert found[0] < 1e-5 and found[1] > 1e-3


@pytest.mark.rotating
def test_tokens_that_upper_layers_leave_out_would_surprise_nobody():
    """EM-LLM cuts a text where tokens surprise the model, here in the whole text."""
    fast, em = of("fastkv", budget=1.0, window=4, tsp_layer=0, share=0.9), BY_LABEL["em-llm"]
    with pytest.raises(ValueError, match="learns from all tokens of a prompt"):
        kvjax.chain(fast, em.method())
    with unchecked():
        both = kvjax.chain(fast, em.method())
        _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=both, room=8)
    _, whole = kvjax.prefill(model("4/2"), MAIN.first, method=em.method(), room=8)
    parts = [[part for group in one.groups for part in group.parts] for one in (cache, whole)]
    told = [[np.asarray(part.traces[key_of(Surprisal())]).any() for part in each] for each in parts]
    assert not any(told[0]) and all(told[1])


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["tidaldecode", "kcache"])
def test_values_in_host_memory_are_those_that_any_layer_picked(name):
    got, cache = answers(kvjax.chain(HostValues(), row(name)))
    assert apart(got, answers(row(name))[0]) == 0 and host_nbytes(cache) > 0


@pytest.mark.rotating
@pytest.mark.parametrize("host", [Host(0.5), HostValues(0.5)])
def test_without_a_read_all_is_in_host_memory(host):
    (got, cache), (want, other) = answers(kvjax.chain(SNAP, host)), answers(kvjax.chain(SNAP, Host()))
    assert apart(got, want) == 0 and host_nbytes(cache) == host_nbytes(other) > 0


@pytest.mark.rotating
def test_pages_need_not_be_multiples_of_what_is_encoded_together():
    """Twelve slots hold whole pages of six and whole codes of four."""
    got, cache = answers(kvjax.chain(quest(6, 1.0), exact(4)))
    assert apart(got, answers(of("full"))[0]) < 2e-5
    assert all(group.bodies[0].capacity % 12 == 0 for group in cache.groups)
