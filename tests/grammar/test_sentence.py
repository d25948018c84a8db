"""Sentences: which can be built, which are equal, and what a decode step depends on."""

import dataclasses

import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Store, chain
from kvjax.grammar.when import STEP
from kvjax.keep.budgets.budget import AcrossHeads, Uniform, UpTo
from kvjax.keep.merges.merge_cam import ValueMerge
from kvjax.keep.merges.merge_counted import GaussianMerge
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.recent_queries import Votes
from kvjax.keep.scores.score import AccumulatedAttention, DecayedAttention, Position
from kvjax.methods import ALIASES, METHODS, methods, takes_budget
from kvjax.place.host import Host
from kvjax.read.pages import PageBounds
from kvjax.store.affine import Affine


def make(id, **hyper):
    return kvjax.method(id, **({"budget": 0.5} if takes_budget(id) else {}), **hyper)


def test_a_chain_joins_the_verbs_of_its_parts():
    both = chain(make("snapkv"), make("kivi"))
    assert both.keep == make("snapkv").keep and both.store == make("kivi").store and both.read is None
    assert both.id == "snapkv + kivi"
    assert chain(make("quest"), make("int8")).read == make("quest").read


@pytest.mark.parametrize(
    "parts, message",
    [
        (("h2o", "snapkv"), "the first evicts while decoding, too"),
        (("int8", "kivi"), "at most one store"),
        (("keepkv", "kivi"), "writes slots one by one"),
        (("streamingllm", "quest"), "a key is rotated by its position for all queries, and this keep"),
    ],
)
def test_sentences_that_cannot_work_are_refused_when_they_are_built(parts, message):
    with pytest.raises(ValueError, match=message):
        chain(*(make(id) for id in parts))


def test_words_that_cannot_work_together_are_refused():
    half = Budget(0.5)
    with pytest.raises(ValueError, match="evicting while decoding works with the uniform allocation"):
        chain(Keep(Position(), half, AcrossHeads(), when=STEP))
    coded = Store(Affine(2, axis="channel", group=32))
    with pytest.raises(ValueError, match="must be a multiple of the 32"):
        chain(PageBounds(half, page=16), coded, Host())
    chain(PageBounds(half, page=64), coded, Host())
    with pytest.raises(ValueError, match=r"needs AccumulatedMass\(.*which its score does not record"):
        chain(Keep(Position(), half, Uniform(), merge=ValueMerge()))
    chain(Keep(AccumulatedAttention(), half, Uniform(), merge=ValueMerge()))
    with pytest.raises(ValueError, match=r"needs AccumulatedMass\(.*which its score does not record"):
        chain(Keep(DecayedAttention(0.7), half, Uniform(), merge=GaussianMerge()))
    chain(Keep(AccumulatedAttention(), half, Uniform(), merge=GaussianMerge(), when=STEP))
    # A step has room for n slots and one more, however many are above a threshold.
    with pytest.raises(
        ValueError, match="can give high scores to more slots than fit: use a `bounded` score"
    ):
        chain(Keep(AccumulatedAttention(), half, UpTo(1.0), when=STEP))
    chain(Keep(Votes(8, 8), half, UpTo(1.0), when=STEP), Store(Affine(8)))
    with pytest.raises(ValueError, match="may evict more: use the uniform allocation"):
        chain(Keep(Position(), half, UpTo(1.0), lower=Store(Affine(4))))


@pytest.mark.parametrize(
    ("word", "keep"),
    [
        ("QueryFilters", lambda: make("q-filters").keep),
        ("HeadGates", lambda: make("duoattention").keep),
        ("RepeatContext", lambda: dataclasses.replace(make("kvzip").keep, allocate=Uniform())),
        ("Profile", lambda: make("headkv").keep),
    ],
)
def test_what_speaks_of_kv_heads_selects_no_query_heads(word, keep):
    with pytest.raises(ValueError, match=rf"{word}.* is about KV heads"):
        chain(dataclasses.replace(keep(), per_query_head=True))
    # What looks at query heads may.
    chain(dataclasses.replace(make("compresskv").keep, per_query_head=True))


@pytest.mark.parametrize("id", ["random", "l2compress", "adakv", "pyramidkv", "expected-attention", "kvzip"])
def test_what_acts_on_prompts_only_shares_the_plain_decode_step(id):
    assert make(id).decode_part() == make("full").decode_part()


@pytest.mark.parametrize(
    "id", ["h2o", "tova", "sink-recent", "streamingllm", "keepkv", "int8", "kivi", "quest"]
)
def test_what_acts_while_decoding_does_not(id):
    assert make(id).decode_part() != make("full").decode_part()


def test_decode_steps_differ_where_their_rules_do():
    assert make("h2o").decode_part() != kvjax.method("h2o", budget=0.25).decode_part()
    assert make("snapkv").decode_part() == kvjax.method("snapkv", budget=0.25, window=8).decode_part()


def test_protecting_adds_slots_that_must_stay():
    kept = make("tova").protecting(Recent(1)).keep
    assert kept.protect == (Recent(1),)
    assert make("full").protecting(Recent(1)) == make("full")


def test_every_method_says_what_it_is():
    found = methods()
    assert [m.id for m in found] == list(METHODS)
    for m in found:
        assert m.title and m.phase in ("none", "prefill", "decode", "both")
        # Papers of CaM, KVgrad, Q-Hitter and ArkVale are not on arXiv; the entropy gate is code of kvpress.
        elsewhere = ("cam", "kvgrad", "q-hitter", "entropy-gated-chunkkv", "arkvale")
        assert bool(m.arxiv) == (m.family != "baseline" and m.id not in elsewhere)
        assert (m.year is None) == (not m.arxiv)
    by_id = {m.id: m for m in found}
    assert by_id["snapkv"].verbs == ("keep",) and by_id["adakv"].verbs == ("keep", "place")
    assert by_id["kivi"].verbs == ("store",) and by_id["quest"].verbs == ("read",)
    assert by_id["h2o"].phase == "both" and by_id["snapkv"].phase == "prefill"


def test_ids_are_forgiving_and_errors_name_the_nearest():
    for alias, id in ALIASES.items():
        assert make(alias) is make(id)
    assert make("Sink_Recent") is make("sink-recent")
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        kvjax.method("snapvk")
    with pytest.raises(ValueError, match="did you mean 'window'"):
        kvjax.method("snapkv", budget=0.5, windw=3)
    for text in ("snapkv", "snapkv:window=8", "snapkv(window=8) + int8"):
        with pytest.raises(ValueError, match="needs budget="):
            kvjax.method(text)
    with pytest.raises(ValueError, match="variant must be one of 'grouped', 'paper', 'kvpress'"):
        kvjax.method("snapkv", budget=0.5, variant="mine")
