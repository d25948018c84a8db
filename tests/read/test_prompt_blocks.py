"""Reads in prompts: logits after a prompt of which blocks alone are attended to, against float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.explain_sentences import at_prefill
from kvjax.compat.model_fit import check_fit
from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.prompt_reads import PromptQueries
from kvjax.keep.observations.observe import Mass
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.read.antidiagonals import Antidiagonals
from kvjax.read.covering_blocks import CoveringBlocks
from kvjax.read.head_patterns import AShape, BestBlocks, HeadPatterns, VerticalSlash
from kvjax.read.prompt_blocks import visible_blocks
from kvjax.read.segment_scores import SegmentScores
from kvjax.serve import Prompt as Request
from kvjax.serve.device.jobs import job_of
from kvjax.steps import Run, read_tokens
from tests.float64 import prompt_blocks as by_hand
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import model as tiny
from tests.methods.battery import off
from tests.read.test_persistent import model

LENGTHS = (61, 40, 17, 5)
ROWS = [np.random.default_rng(i).integers(0, 64, n).tolist() for i, n in enumerate(LENGTHS)]
SLASH = dict(asked=7, first=2, nearest=3)
CHOSEN = np.array([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 0, 2]])
PATTERNS = (VerticalSlash(5, 6, **SLASH), AShape(3, 7), BestBlocks(2), VerticalSlash(2, 12, **SLASH))
BY_HAND = (
    by_hand.vertical_slash(5, 6, 4, **SLASH), by_hand.a_shape(3, 7, 4), by_hand.best_blocks(2, 4),
    by_hand.vertical_slash(2, 12, 4, **SLASH),
)  # fmt: skip


def third(tokens):
    """Return what Budget(0.3) leaves of so many."""
    return max(1, tokens * 3 // 10)


CASES = {
    "critiprefill": (
        SegmentScores(Budget(0.3), segment=8, block=4, below=0.25, skip_layers=0),
        by_hand.critiprefill(third, 8, 4, 0.25),
    ),
    "critiprefill alone": (
        SegmentScores(Budget(8), segment=8, block=4, below=0.0, skip_layers=1),
        by_hand.critiprefill(lambda n: min(n, 8), 8, 4, 0.0, skip_layers=1),
    ),
    "xattention": (Antidiagonals(0.6, stride=2, block=8), by_hand.xattention(0.6, 2, 8)),
    "flexprefill": (CoveringBlocks(0.5, 0.17, 4, 4), by_hand.flexprefill(0.5, 0.17, 4, 4)),
    "minference": (HeadPatterns(PATTERNS, 4), by_hand.minference(BY_HAND)),
    "minference fitted": (
        HeadPatterns(PATTERNS, 4, 0, Fitted({"pattern": CHOSEN}, "HeadPatterns", "")),
        by_hand.minference(BY_HAND, CHOSEN),
    ),
}
# The table of methods holds xattention and flexprefill to the same forms.
TURNS = ("critiprefill alone", "minference", "xattention", "flexprefill")
cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.rotating) if n in TURNS else n for n in CASES]
)


@functools.cache
def prompts(name):
    m = model(layers=3)
    return [Prompt(Decoder(m), tokens, hides=CASES[name][1]) for tokens in ROWS]


@pytest.mark.rotating
@cases
def test_a_prompt_attends_to_what_the_equations_pick(name):
    logits, cache = kvjax.prefill(model(layers=3), ROWS, method=Method(read_prompt=CASES[name][0]), room=4)
    assert off(logits, np.stack([p.all_logits[-1] for p in prompts(name)])) < 3e-5
    full = np.stack([Prompt(Decoder(model(layers=3)), tokens).all_logits[-1] for tokens in ROWS[:2]])
    assert off(logits[:2], full) > 1e-3
    rows = [Row(p, [np.ones((len(k), p.length), bool) for k in p.k]) for p in prompts(name)]
    for token in np.random.default_rng(9).integers(0, 64, (2, len(ROWS))):
        logits, cache = kvjax.step(model(layers=3), cache, token)
        assert off(logits, np.stack([r.step(t) for r, t in zip(rows, token, strict=True)])) < 3e-5


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["critiprefill", "flexprefill"])
def test_a_row_is_read_alike_alone_and_in_a_batch(name):
    method = Method(read_prompt=CASES[name][0])
    together, _ = kvjax.prefill(model(layers=3), ROWS, method=method)
    for row in (1, 3):
        alone, _ = kvjax.prefill(model(layers=3), [ROWS[row]], method=method)
        assert off(together[row], alone[0]) < 1e-5


WHOLE = (
    "critiprefill(budget=1.0, segment=8, block=4)",
    "critiprefill(budget=64, segment=8, block=4)",
    "xattention(covered=1.0, stride=2, block=8)",
    "flexprefill(covered=1.0, least=4, block=8)",
    "minference(slash=64, block=8)",
)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "text", [WHOLE[0], *(pytest.param(t, marks=pytest.mark.rotating) for t in WHOLE[1:])]
)
def test_reading_all_blocks_is_full_attention(text):
    full, _ = kvjax.prefill(model(layers=3), ROWS)
    assert off(kvjax.prefill(model(layers=3), ROWS, method=text)[0], full) < 1e-5


@pytest.mark.rotating
@pytest.mark.parametrize("form", ["gpu interpret", pytest.param("tpu interpret", marks=pytest.mark.rotating)])
def test_kernels_read_prompts_of_unequal_rows_as_the_plain_form_does(form):
    method = "critiprefill(budget=0.3, segment=16, block=16, below=0.25, skip_layers=0)"
    plain, _ = kvjax.prefill(model(layers=2), ROWS, method=method)
    found, _ = kvjax.prefill(model(layers=2), ROWS, method=method, implementation=form)
    assert 0 < off(found, plain) < 1e-5
    assert off(found, kvjax.prefill(model(layers=2), ROWS)[0]) > 1e-3


def test_heads_of_a_prompt_pick_by_means_and_by_verticals_and_slashes():
    seen = []
    for tokens in ROWS[:2]:
        Prompt(Decoder(model(layers=3)), tokens, hides=by_hand.flexprefill(0.5, 0.17, 4, 4, seen))
    assert 0 < sum(seen) < len(seen)


def test_short_prompts_are_those_of_the_full_cache_bit_by_bit():
    full, _ = kvjax.prefill(model(layers=3), [ROWS[2]])
    for text in ("critiprefill(budget=16, segment=16, block=8)", "xattention", "flexprefill", "minference"):
        np.testing.assert_array_equal(kvjax.prefill(model(layers=3), [ROWS[2]], method=text)[0], full)


@pytest.mark.rotating
def test_received_attention_is_that_of_what_was_read():
    """The attention to picked blocks alone, by every reduction that keeps ask for."""
    mass = tuple(Mass(kind) for kind in ("sum", "max"))
    run = Run(model(layers=3).config, Method(read_prompt=CASES["critiprefill"][0]))
    tokens = np.stack([np.pad(row, (0, 61 - len(row))) for row in ROWS])
    read = jax.jit(read_tokens, static_argnums=(0, 5))
    prompt = read(run, model(layers=3).params, tokens, np.array(LENGTHS), None, frozenset(mass))
    for layer, fresh in enumerate(prompt.fresh):
        (received,) = fresh.masses
        for b, one in enumerate(prompts("critiprefill")):
            p = one.p[layer].reshape(-1, one.group, one.length, one.length)
            for of, want in zip(mass, (p.sum((1, 2)), p.max((1, 2))), strict=True):
                assert off(received[key_of(of)][0, b, :, : one.length], want) < 3e-5


def test_pieces_of_a_prompt_are_refused_by_name():
    with pytest.raises(InputError, match="critiprefill picks .* chunk=16 would read 61 tokens in pieces"):
        kvjax.prefill(model(layers=3), ROWS, method="critiprefill(budget=0.5)", chunk=16)
    kvjax.prefill(model(layers=3), ROWS, method="critiprefill(budget=0.5)", chunk=61)


@pytest.mark.parametrize("words", ["homer", "streamingllm(budget=16)"])
def test_what_reads_prompts_in_its_own_way_is_refused(words):
    with pytest.raises((ValueError, InputError), match="attends to all earlier ones|rotated by its position"):
        kvjax.chain(kvjax.method("critiprefill(budget=0.5)"), kvjax.method(words))


@pytest.mark.rotating
def test_layers_with_a_window_attend_to_all_of_it():
    m, alone = tiny("windowed"), by_hand.critiprefill(third, 8, 4, 0.0)

    def hides(prompt, layer):
        full = alone(prompt, layer)
        return full if m.config.windows[layer] is None else np.zeros_like(full)

    read = SegmentScores(Budget(0.3), segment=8, block=4, below=0.0, skip_layers=0)
    logits, _ = kvjax.prefill(m, ROWS, method=Method(read_prompt=read))
    want = [Prompt(Decoder(m), tokens, hides=hides).all_logits[-1] for tokens in ROWS]
    assert off(logits, np.stack(want)) < 3e-5


@pytest.mark.rotating
@pytest.mark.parametrize(("tokens", "budget"), [(64, 0.3), (61, 8), (130, 1.0)])
def test_the_share_that_explain_tells_is_that_of_the_picks(tokens, budget):
    read = SegmentScores(Budget(budget), segment=8, block=4)
    longest = -(-tokens // 8) * 8
    q, k = (np.random.default_rng(n).normal(size=(1, n, longest, 8)).astype(np.float32) for n in (4, 2))
    at = np.arange(longest, dtype=np.int32)[None]
    pos = np.where(at < tokens, at, -1)
    asked = PromptQueries(*map(jnp.asarray, (q, k, pos, np.array([tokens], np.int32))), 1.0)
    seen = np.asarray(visible_blocks(asked.pos, 8, 4))[0, 0]
    picked = np.asarray(read.pick(asked)[0].blocks)[0]
    assert [float((one & seen).sum() / seen.sum()) for one in picked] == [
        pytest.approx(read.share(tokens))
    ] * 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (dict(windows=(8, 8)), "no layer of this model attends to a whole prompt"),
        (dict(mixers=(Attention(clip=(-0.1, 1.0)),) * 2), "parts of a clipped softmax do not merge"),
    ],
)
def test_models_whose_prompts_cannot_be_read_in_blocks_are_refused(config, said):
    sizes = dict(layers=2, vocab=64, d_model=32, heads=4, kv_heads=2, head_dim=8, d_ff=48)
    with pytest.raises(InputError, match=said):
        check_fit(kvjax.method("xattention"), Config(**sizes, **config))


def test_a_server_which_reads_prompts_in_pieces_refuses_by_name():
    with pytest.raises(InputError, match="xattention picks blocks .* a server reads prompts in pieces"):
        job_of(model(layers=3), 0, Request([1, 2, 3], 4, method="xattention"))


@pytest.mark.rotating
def test_a_fit_gives_every_head_the_pattern_of_the_least_error():
    m, first = model(layers=3), by_hand.vertical_slash(24, 4, 4, **SLASH)
    forms = first, by_hand.a_shape(8, 16, 4), by_hand.best_blocks(5, 4), BY_HAND[3]
    patterns = VerticalSlash(24, 4, **SLASH), AShape(8, 16), BestBlocks(5), PATTERNS[3]
    fitted = kvjax.fit(m, Method(read_prompt=HeadPatterns(patterns, 4)), ROWS[:2], batch=2)
    errors = np.zeros((3, len(forms), 4))
    for tokens in ROWS[:2]:
        prompt = Prompt(Decoder(m), tokens)
        for layer, head, i in np.ndindex(3, 4, len(forms)):
            seen = np.tril(forms[i](prompt, layer, head)) > 0
            scores = by_hand.logits(prompt, layer, head)
            v = prompt.v[layer][head // prompt.group]
            p = by_hand.softmax(np.where(seen, scores, -np.inf))
            errors[layer, i, head] += np.square(p @ v - prompt.p[layer][head] @ v).sum()
    np.testing.assert_array_equal(fitted.arrays["pattern"], errors.argmin(1))
    assert len({*fitted.arrays["pattern"].ravel().tolist()}) > 1


def test_a_head_of_a_pattern_that_the_method_does_not_have_is_refused():
    m = model(layers=3)
    chosen = np.zeros((3, 4), np.int32)
    chosen[1, 2] = 2
    fitted = Fitted({"pattern": chosen}, "HeadPatterns", m.signature)
    read = HeadPatterns((VerticalSlash(24, 4, **SLASH), AShape(8, 16), BestBlocks(5)), 4, fitted=fitted)
    check_fit(Method(read_prompt=read), m.config)
    fewer = dataclasses.replace(read, patterns=read.patterns[:2])
    with pytest.raises(InputError, match="fitted to pattern 2, counted from 0, and the method has 2: give"):
        check_fit(Method(read_prompt=fewer), m.config)


def test_texts_of_a_block_cannot_be_fitted():
    with pytest.raises(InputError, match="no text has more than a block of 64 tokens"):
        kvjax.fit(model(layers=3), "minference", ROWS)


def test_explain_says_what_share_of_a_prompt_is_computed():
    method = kvjax.method("critiprefill(budget=0.25, segment=32, block=8)")
    told = [one.text for one in at_prefill(method, 448)]
    assert "Every 32 tokens together attend to selected blocks of 8 tokens: 44.3% of full attention." in told
    assert "A prompt of up to 32 tokens is attended to as a whole." in [
        s.text for s in at_prefill(method, 32)
    ]
