"""What people are told of a cache: the numbers of its arrays, and the words of the tokens that it keeps."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.state.cache import host_nbytes, kept_positions, nbytes
from tests.models import conversation
from tests.sweep import sweep

TEXTS = (
    "<bos> along the river <set> brave otter 17 4 52 <.> when the rain turned to snow <get> brave otter",
    "<bos> the <set> calm fox 8 30 11 <.> a hill",
)
METHODS = {
    "full": {}, "streamingllm": {"budget": 0.5}, "adakv": {"budget": 0.5, "window": 2, "page": 4},
    "kivi": {"bits": 2}, "h2o": {"budget": 8}, "pyramidkv": {"budget": 0.5, "window": 2},
}  # fmt: skip

CORM = "corm(budget=0.5, newest=4)"


@pytest.fixture(scope="module")
def recall():
    return kvjax.load("recall-tiny")


@pytest.fixture(scope="module")
def prompt(recall):
    return [recall.tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(METHODS, "adakv"))
def test_numbers_are_those_of_the_arrays(name, recall, prompt):
    _, cache = kvjax.prefill(recall, prompt, method=kvjax.method(name, **METHODS[name]), room=4)
    found = kvjax.summary(cache, recall)
    assert found.nbytes == nbytes(cache) and found.host_nbytes == host_nbytes(cache)
    apart = nbytes((cache.pools, cache.next))
    assert sum(layer.nbytes for layer in found.layers) + apart == found.nbytes
    kept = kept_positions(cache)
    assert [i for x in found.layers for i in range(x.first, x.last + 1)] == list(range(recall.config.layers))
    for layer in found.layers:
        counts = np.concatenate([(kept[i] >= 0).sum(-1).ravel() for i in range(layer.first, layer.last + 1)])
        assert layer.slots == (counts.min(), pytest.approx(counts.mean()), counts.max())
        assert layer.fit == kept[layer.first].shape[-1]
    assert found.tokens == tuple(len(row) for row in prompt)
    assert found.method.startswith(name)


@pytest.mark.rotating
def test_the_full_cache_weighs_what_it_weighs(recall, prompt):
    _, full = kvjax.prefill(recall, prompt, room=4)
    assert kvjax.summary(full, recall).full_nbytes == nbytes(full)
    _, half = kvjax.prefill(recall, prompt, method=kvjax.method("streamingllm", budget=0.5), room=4)
    said = str(kvjax.summary(half, recall))
    assert "of the full cache's" in said and "full" not in str(kvjax.summary(half))
    assert (
        said.splitlines()[0]
        == f"{kvjax.summary(half).method}: 2 rows, {len(prompt[0])}, {len(prompt[1])} tokens"
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("text", "heavy"),
    sweep([(CORM, True), ("h2o(budget=0.5)", False)], (CORM, True)),
)
def test_a_cache_that_weighs_more_than_the_full_one_says_so(text, heavy, recall):
    """CORM's votes need the last 256 queries, which weigh more than 33 tokens."""
    _, cache = kvjax.prefill(recall, [[*range(1, 34)]], method=kvjax.method(text), room=0)
    found = kvjax.summary(cache, recall)
    assert (found.nbytes > found.full_nbytes) == heavy
    assert ("it weighs more than the full cache" in str(found)) == heavy


@pytest.mark.parametrize("name", sweep(["mamba", "yoco", "mla"], "mamba"))
def test_states_are_no_slots(name):
    model, batch = conversation.model(name), conversation.BATCHES["main"]
    texts = conversation.TEXTS[list(batch.texts)][:, :8]
    _, cache = kvjax.prefill(model, texts, room=2)
    found = kvjax.summary(cache, model)
    assert sum(layer.nbytes for layer in found.layers) + nbytes((cache.pools, cache.next)) == found.nbytes
    assert ("states, no slots" in str(found)) == any(layer.fit == 0 for layer in found.layers)
    assert name != "mamba" or "states" in str(found)


@pytest.mark.rotating
def test_kept_tokens_are_read_as_text(recall, prompt):
    _, cache = kvjax.prefill(recall, prompt, method=kvjax.method("h2o", budget=8), room=4)
    texts, word = kvjax.kept_texts(recall, cache, prompt), recall.tokenizer.id_to_token
    for layer, pos in enumerate(kept_positions(cache)):
        for row, head in np.ndindex(*pos.shape[:2]):
            at = sorted(p for p in pos[row, head].tolist() if p >= 0)
            assert texts[layer][row][head].replace(" … ", " ").split() == [word(prompt[row][p]) for p in at]
            gaps = sum(b - a > 1 for a, b in zip(at, at[1:], strict=False))
            assert texts[layer][row][head].count(" … ") == gaps
    _, full = kvjax.prefill(recall, prompt[:1])
    assert kvjax.kept_texts(recall, full, prompt[:1]) == [[[TEXTS[0]] * 2]] * 4


@pytest.mark.rotating
def test_tokens_that_were_written_have_text_where_they_are_given(recall, prompt):
    out = kvjax.generate(recall, prompt[:1], max_new_tokens=3)
    assert kvjax.kept_texts(recall, out.cache, prompt[:1])[0][0][0] == TEXTS[0]
    whole = [[*prompt[0], *out.tokens[0].tolist()]]
    assert kvjax.kept_texts(recall, out.cache, whole)[0][0][0] == f"{TEXTS[0]} {out.texts[0]}"


def test_what_has_no_text_or_is_no_cache_is_refused(recall, prompt):
    _, cache = kvjax.prefill(recall, prompt)
    with pytest.raises(InputError, match="the tokens have 1 rows, the cache 2, expected the same"):
        kvjax.kept_texts(recall, cache, prompt[:1])
    mute = kvjax.Model(recall.config, recall.params)
    with pytest.raises(InputError, match="has no tokenizer, so its tokens have no text"):
        kvjax.kept_texts(mute, cache, prompt)
    _, gone = kvjax.prefill(recall, prompt)
    jax.tree.map(lambda x: x.delete(), gone)
    for verb in (lambda x: kvjax.summary(x), lambda x: kvjax.kept_texts(recall, x, prompt)):
        with pytest.raises(InputError, match="this cache was consumed"):
            verb(gone)


def test_a_cache_and_a_model_are_shown_in_a_line_of_their_sizes(recall, prompt):
    _, cache = kvjax.prefill(recall, prompt, method=kvjax.method("adakv", budget=0.5, window=2), room=4)
    shown = repr(cache)
    assert "2 rows" in shown and f"{nbytes(cache):,} bytes" in shown and repr(cache.method) in shown
    assert repr(jax.eval_shape(lambda x: x, cache)) == shown
    kvjax.step(recall, cache, np.array([1, 2]))
    assert repr(cache) == shown  # a consumed one, too
    numbers = sum(x.size for x in jax.tree.leaves(recall.params))
    sizes = "4 layers, 4 heads and 2 KV heads of 32 channels, d_model 128, vocab 220"
    assert repr(recall).startswith(f"<Model recall-tiny: {sizes}; ") and f"{numbers:,} numbers" in repr(
        recall
    )
    for text in (shown, repr(recall)):
        assert len(text) < 300
