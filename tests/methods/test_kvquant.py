"""Keys stored before their rotation, first tokens as computed, and KVQuant, against float64 numpy."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.compat.model_fit import check_fit
from kvjax.grammar import Method, Store
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.store.affine import Affine
from tests.float64.reference import Decoder, Prompt, Row
from tests.methods.battery import MAIN, ROOM, VOCAB, model, off, positions, prompt_of, step
from tests.methods.expected import LEVELS
from tests.methods.table import BY_LABEL

KVQUANT = kvjax.method("kvquant", bits=4, fitted=LEVELS)
BARE_KEYS = Store(unrotated=True)
UNROTATED = Method(store=BARE_KEYS)


def whole(prompt):
    return Row(prompt, [np.ones((len(k), prompt.length), bool) for k in prompt.k])


# --- keys before their rotation ------------------------------------------------------------------------


def talk(method, chunk=None):
    """Logits of a prompt, two steps and a second turn, and the cache behind the prompt."""
    m, options = model("4/2"), {} if chunk is None else dict(chunk=chunk)
    logits, first = kvjax.prefill(m, MAIN.first, method=method, room=ROOM, **options)
    out, cache = [logits], first
    for tokens in MAIN.steps[:2]:
        logits, cache = step(m, cache, tokens, append=True)
        out.append(logits)
    return [*out, kvjax.prefill(m, MAIN.second, cache=cache)[0]], first


@pytest.mark.parametrize("chunk", [None, pytest.param(8, marks=pytest.mark.rotating)])
def test_unrotated_keys_give_the_logits_of_the_uncompressed_model(chunk):
    found, cache = talk(UNROTATED, chunk)
    for b, tokens in enumerate(MAIN.first):
        prompt = prompt_of("4/2", "main", b)
        row = whole(prompt)
        want = [prompt.all_logits[-1], *(row.step(t) for t in MAIN.steps[:2, b])]
        want.append([row.step(t) for t in MAIN.second[b]][-1])
        for logits, one in zip(found, want, strict=True):
            assert off(logits[b], one) < 1e-5
        for layer, group in enumerate(cache.groups):
            held = np.asarray(group.tail.k)[0, b, :, : len(tokens)]
            np.testing.assert_allclose(held, prompt.raw_k[layer], atol=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("label", ["snapkv", "h2o", "adakv", "lagkv", "kvzip"])
def test_keeps_choose_and_answer_as_they_do_over_rotated_keys(label):
    """Scores that look at keys see them turned, in prompts, in a token's own step and behind it."""
    method = BY_LABEL[label].method()
    (found, mine), (want, theirs) = (talk(m) for m in (dataclasses.replace(method, store=BARE_KEYS), method))
    assert positions(mine) == positions(theirs)
    for a, b in zip(found, want, strict=True):
        assert off(a, b) < 1e-5


# --- first tokens --------------------------------------------------------------------------------------


@pytest.mark.rotating
def test_first_tokens_stay_as_computed_whenever_they_arrive():
    """Rows of 2 and 5 tokens, of which the first 4 are first tokens: some come in steps and second turns."""
    config = Config(vocab=VOCAB, layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=16)
    m = Model(config, init(config, jax.random.key(1)))
    turns = [[5, 9], [7, 3, 1, 8, 2]], [4, 6], [[1, 2, 3], [4]]
    _, cache = kvjax.prefill(m, turns[0], method=Method(store=Store(Affine(8), Affine(8), sinks=4)), room=16)
    _, cache = kvjax.step(m, cache, turns[1])
    _, cache = kvjax.prefill(m, turns[2], cache=cache)
    texts = [[*a, b, *c] for a, b, c in zip(*turns, strict=True)]
    for row, text in enumerate(texts):
        first = cache.groups[0]
        assert np.asarray(first.sinks.pos)[0, row].tolist() == [[0, 1, 2, 3]]
        assert {int(p) for p in np.asarray(first.tail.pos)[0, row, 0] if p >= 0} == {*range(4, len(text))}
        prompt = Prompt(Decoder(m), text)
        np.testing.assert_allclose(first.sinks.k[0, row], prompt.k[0][:, :4], atol=1e-5)
        np.testing.assert_allclose(first.sinks.v[0, row], prompt.v[0][:, :4], atol=1e-5)
    assert positions(kvjax.rollback(cache, [3, 3])) == [[[{0, 1, 2}], [{0, 1, 2, 3}]]]


# --- KVQuant -------------------------------------------------------------------------------------------


def nearest(y, levels):
    return levels[np.abs(y[..., None] - levels).argmin(-1)]


def key_by_hand(k, layer, head):
    """Unrotated keys [T, H]: levels of every channel's range, but for the outermost number of a token."""
    a = {n: x[layer].astype(np.float64) for n, x in LEVELS.arrays.items()}
    centre, size = a["key centre"][head], a["key range"][head]
    y = (k - centre) / size
    outer = np.abs(y) == np.abs(y).max(-1, keepdims=True)
    return np.where(outer, k, nearest(y, a["key levels"]) * size + centre)


def value_by_hand(v, layer):
    """Values [T, H]: levels of every token's range without its smallest and largest number, which stay."""
    ends = (v == v.max(-1, keepdims=True)) | (v == v.min(-1, keepdims=True))
    low, high = np.where(ends, np.inf, v).min(-1), np.where(ends, -np.inf, v).max(-1)
    size, centre = ((x / 2).astype(np.float16).astype(float)[:, None] for x in (high - low, high + low))
    levels = LEVELS.arrays["value levels"][layer].astype(np.float64)
    return np.where(ends, v, nearest((v - centre) / size, levels) * size + centre)


@pytest.mark.rotating
def test_the_last_token_asked_again_attends_to_what_comes_back_of_keys_before_rotation():
    _, cache = kvjax.prefill(model("4/2"), MAIN.first, method=KVQUANT, room=ROOM)
    asked, _ = step(model("4/2"), cache, [row[-1] for row in MAIN.first], append=False)
    prompts, want = [prompt_of("4/2", "main", b) for b in range(len(MAIN.first))], []
    for prompt in prompts:
        row = whole(prompt)
        for layer, lists in enumerate(row.slots):
            for head, slots in enumerate(lists):
                k = key_by_hand(prompt.raw_k[layer][head], layer, head)
                v = value_by_hand(prompt.v[layer][head], layer)
                for slot, one_k, one_v in list(zip(slots, k, v, strict=True))[1:]:
                    slot |= dict(k=one_k, v=one_v)
        want.append(row.step(prompt.tokens[-1], append=False))
    # In float32, a number between two levels may become the other one.
    assert off(asked, np.stack(want)) < 2e-3
    assert off(asked, np.stack([prompt.all_logits[-1] for prompt in prompts])) > 1e-2


# --- what does not go together -------------------------------------------------------------------------


def test_a_second_tier_and_first_tokens_as_computed_are_refused():
    other = dataclasses.replace(kvjax.method("snapkv", budget=0.5).keep, lower=Store(Affine(4)))
    message = "this store stores the first 1 tokens as computed: use int8 for this store"
    with pytest.raises(ValueError, match=message):
        kvjax.chain(other, KVQUANT)


def test_levels_of_other_bits_are_refused_with_the_command_that_fits_these():
    with pytest.raises(InputError, match="with 16 levels, and 2 bits have 4: run `kvjax fit kvquant"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("kvquant", bits=2, fitted=LEVELS))
    with pytest.raises(InputError, match=r"another model: the \(layers, KV heads, channels\)"):
        kvjax.prefill(model("6/3"), MAIN.first, method=KVQUANT)


def test_levels_of_kv_heads_are_not_for_slots_of_query_heads():
    each = kvjax.method("snapkv", budget=0.5, window=4, variant="paper")
    with pytest.raises(InputError, match="fitted to KV heads, .* query heads. Use variant=.grouped. of such"):
        check_fit(kvjax.chain(each, KVQUANT), model("4/2").config)
