"""Fits of reads of blocks: the loss by hand, what a fit is worth, pages of unequal heads, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.prefill import padded
from kvjax.base.errors import InputError
from kvjax.commands.texts import read_texts
from kvjax.fitting.gates.blocks import Asked, SpreadQueries, divergence, first_asked
from kvjax.fitting.gates.blocks import _read as read_batch
from kvjax.grammar import Budget, Method
from kvjax.grammar.fitted import Fitted
from kvjax.read.pages import PageMeans
from kvjax.read.pooled_blocks import CompressedBlocks
from kvjax.steps import Run
from tests.float64.block_reads import weighted_mean
from tests.float64.reference import softmax
from tests.methods import golden
from tests.methods.battery import MAIN, ROOM, model
from tests.methods.table_reads import BLOCKS, COMPRESSED, WEIGHED

KV_HEADS, GROUP, WIDTH, TOKENS, SCALE = 2, 2, 8, 24, 0.3
MEANS = PageMeans(Budget(0.5), page=4)
PARTS = CompressedBlocks(Budget(0.5), page=4, newest=3, sinks=2, compress=2, stride=1)
FIT = dict(batch=1, epochs=1)
HYPER = {"moba": dict(page=16), "nsa": dict(page=16, compress=8, stride=4, newest=32, sinks=16)}


def by_hand(read, q, at, k, arrays):
    """Compute the mean KL over the lists and queries of a layer and a row, block by block."""
    found = []
    for head, t in np.ndindex(KV_HEADS, len(at)):
        direction = arrays["direction"][head]
        p = np.mean([softmax(k[head, : at[t] + 1] @ q[head * GROUP + g, t] * SCALE) for g in range(GROUP)], 0)
        told, said = {}, {}
        for j in range(TOKENS // 4):
            if j < -(-read.sinks // 4) or (j + 1) * 4 > at[t] + 1 - read.newest:
                continue
            keys = k[head, j * 4 : (j + 1) * 4]
            told[j] = p[j * 4 : (j + 1) * 4].sum()
            if isinstance(read, PageMeans):
                asked = np.mean([q[head * GROUP + g, t] for g in range(GROUP)], 0)
                said[j] = [np.exp(asked @ weighted_mean(keys, direction, 0.0) * SCALE)]
            else:
                parts = [weighted_mean(keys[i : i + 2], direction, arrays["place"][head]) for i in range(3)]
                said[j] = [
                    sum(np.exp(q[head * GROUP + g, t] @ c * SCALE) for c in parts) for g in range(GROUP)
                ]
        heads = np.array([said[j] for j in said])
        s = (heads / heads.sum(0)).mean(1)
        p = np.array([*told.values()]) / sum(told.values())
        found.append((p * np.log(p / s)).sum())
    return np.mean(found)


@pytest.mark.parametrize("read", [MEANS, PARTS], ids=["moba", "nsa"])
def test_the_loss_is_the_divergence_of_shares_of_attention_over_the_blocks_to_choose_from(rng, read):
    q, k = rng.normal(size=(KV_HEADS * GROUP, 3, WIDTH)), rng.normal(size=(KV_HEADS, TOKENS, WIDTH))
    at = np.array([14, 19, 23])
    shapes = {"direction": (KV_HEADS, WIDTH)} | ({} if read is MEANS else {"place": (KV_HEADS, 2)})
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    batch = Asked(*(jnp.asarray(x, jnp.float32)[None, None] for x in (q, at, k)))
    batch = batch._replace(at=batch.at.astype(jnp.int32))
    got = divergence(read, SCALE, {n: jnp.asarray(x, jnp.float32)[None] for n, x in arrays.items()}, batch)
    np.testing.assert_allclose(got, by_hand(read, q, at, k, arrays), rtol=1e-4)


def test_the_shortest_text_is_one_whose_last_token_picks_among_two_blocks():
    assert first_asked(MEANS) == 9 and first_asked(PARTS) == 16


@pytest.mark.rotating
@pytest.mark.parametrize("id", ["moba", "nsa"])
def test_a_fit_says_better_what_blocks_get_in_texts_that_it_was_not_fitted_to(id):
    m = kvjax.load("recall-tiny")
    # Texts come task by task.
    texts = read_texts(m, text=None, tasks=None, rows=40, length=256, seed=3, questions=False)
    method = kvjax.method(id, budget=0.2, **HYPER[id])
    found = kvjax.fit(m, method, [t for i, t in enumerate(texts) if i % 4], batch=10, epochs=2)
    none = {name: np.zeros_like(x) for name, x in found.arrays.items()}
    apart = [missed(m, method.read, texts[::4], arrays) for arrays in (none, found.arrays)]
    assert apart[1] < 0.98 * apart[0]


def missed(m, read, texts, arrays):
    """Return the loss of a fit on other texts."""
    run, given = Run(m.config, Method()), padded(m, texts, None)
    asked = SpreadQueries(16, first_asked(read))
    batch = read_batch(run, asked, m.params, jnp.asarray(given.tokens), jnp.asarray(given.lengths))
    return float(divergence(read, run.attention_spec(0).scale, jax.tree.map(jnp.asarray, arrays), batch))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "id, hyper", [("moba", dict(page=4, fitted=WEIGHED)), ("nsa", BLOCKS | dict(fitted=COMPRESSED))]
)
def test_blocks_in_pages_of_unequal_heads_are_summarised_with_their_layers_own_arrays(id, hyper):
    """A keep of everything in pages reads the blocks that are read without it."""
    read = kvjax.method(id, budget=0.5, **hyper)
    both = kvjax.chain(kvjax.method("adakv", budget=1.0, window=4, kernel=3, page=4), read)
    rows = [row[: len(row) // 4 * 4] for row in MAIN.first]
    said = []
    for method in (read, both):
        _, cache = kvjax.prefill(model("4/2"), rows, method=method, room=ROOM)
        for token in range(6):
            logits, cache = kvjax.step(model("4/2"), cache, np.full(len(rows), token, np.int32))
            said.append(np.asarray(logits))
    np.testing.assert_allclose(np.stack(said[:6]), np.stack(said[6:]), atol=3e-5)


def test_bad_input_is_refused_with_what_was_expected():
    m = model("4/2")
    with pytest.raises(InputError, match=r"page must be at least compress, .* got page=6 and compress=4"):
        kvjax.method("nsa", budget=0.5, page=6, compress=4, stride=4)
    with pytest.raises(InputError, match="fitted to texts of at least 1025 tokens, which hold two"):
        kvjax.fit(m, "moba", MAIN.first, **FIT)
    fitted = kvjax.fit(m, "moba:page=4", MAIN.first[:1], **FIT)
    latents = golden.model("latents")
    many = Fitted({"direction": np.ones((3, 4, 16), np.float32)}, "PageMeans", "")
    for wrong, given, why in (
        (model("deep"), fitted, "moba: it was fitted to another model"),
        (m, COMPRESSED, "fitted for CompressedBlocks, expected those for PageMeans"),
        (model("deep"), WEIGHED, r"\(layers, KV heads, channels\) of its array direction are"),
        (latents, many, "it was fitted to KV heads, and the model stores other lists"),
    ):
        method = kvjax.method("moba", budget=0.5, page=4, fitted=given)
        with pytest.raises(InputError, match=why):
            kvjax.prefill(wrong, [[1, 2, 3]], method=method, room=4)
    wider = kvjax.method("nsa", budget=0.5, **(BLOCKS | dict(page=8, compress=4, fitted=COMPRESSED)))
    with pytest.raises(InputError, match="nsa: it was fitted with compress=2, and has compress=4"):
        kvjax.prefill(m, MAIN.first, method=wider, room=ROOM)
