"""The Block Transformer: against float64 numpy block by block, cache against forward pass, and its files."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.block_transformer import BlockConfig, BlockTransformer, init, parts
from kvjax.api.contexts import encode_context
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import MARKER, load_checkpoint, save_checkpoint
from kvjax.models.block_transformer import Groups, plan
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json, config_to_json
from kvjax.models.hf import save_hf
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.params import Group
from kvjax.ops.base.rope import Rope
from tests.float64.reference import Decoder, rope, softmax

L, P, T = 4, 2, 14
SIZES = dict(heads=4, kv_heads=2, head_dim=8, d_ff=24, rope=Rope(theta=100.0))
BLOCKS = Config(vocab=P * 20, d_model=24, layers=2, **SIZES)
TOKENS = Config(vocab=30, d_model=20, layers=1, **SIZES)
CONTEXT = (Attention(), CrossAttention(width=20))


@pytest.fixture(scope="module")
def model():
    config = BlockConfig(BLOCKS, TOKENS, length=L, prefix=P)
    params = init(config, jax.random.key(0))
    noise = np.random.default_rng(1)
    return BlockTransformer(
        config, jax.tree.map(lambda x: x + jnp.asarray(0.1 * noise.standard_normal(x.shape), x.dtype), params)
    )


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 30, (2, T + 10))


@pytest.fixture(scope="module")
def whole(model, tokens):
    return np.asarray(model(tokens))


def halves(model, cache):
    return parts(model.params, cache, model.config)


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5 * np.abs(want).max(), rtol=0)


class Numpy(Decoder):
    """A decoder over vectors, one sequence at a time."""

    def __init__(self, config, params):
        self.config = config
        self.layers = [{n: np.asarray(w[0], np.float64) for n, w in p.items()} for p in params["layers"]]
        self.rest = {n: np.asarray(w, np.float64) for n, w in params.items() if n != "layers"}

    def __call__(self, x):
        c, at = self.config, np.arange(len(x))
        for layer in self.layers:
            q, k, v = self.project(layer, x)
            k, v = (np.repeat(y, c.heads // c.kv_heads, 0) for y in (rope(k, at, c.rope.theta), v))
            s = rope(q, at, c.rope.theta) @ k.swapaxes(1, 2) / np.sqrt(c.head_dim)
            x = self.finish(layer, x, softmax(np.where(at[None] > at[:, None], -np.inf, s)) @ v)
        return self.logits(x)


@pytest.mark.rotating
def test_logits_are_those_of_a_loop_over_blocks_in_float64(model, tokens, whole):
    blocks, inside = (Numpy(c, model.params[n]) for c, n in ((BLOCKS, "blocks"), (TOKENS, "tokens")))
    narrow, table = np.asarray(model.params["embed"], np.float64), inside.rest["embed"]
    row, want = tokens[0], []
    for start in range(0, len(row) + 1, L):
        prefix = np.asarray(model.params["start"], np.float64)
        if start:
            prefix = blocks(narrow[row[:start]].reshape(start // L, -1))[-1].reshape(P, -1)
        own = row[start : start + L]
        said = inside(np.concatenate([prefix, table[own]]))[P - 1 :]
        want += list(said[:L])
    # What is said of token i + 1 are the logits of token i.
    close(whole[0], np.stack(want)[1 : len(row) + 1])


@pytest.mark.rotating
@pytest.mark.parametrize(
    "lengths",
    [pytest.param(x, marks=[pytest.mark.rotating] * (x != (T, 3))) for x in [(T, T), (T, 3), (12, 5)]],
)
def test_decoding_gives_the_logits_of_the_forward_pass(model, tokens, whole, lengths):
    lengths = np.array(lengths)
    logits, cache = model.prefill(tokens[:, :T], lengths=lengths, room=10)
    close(logits, whole[[0, 1], lengths - 1])
    for i in range(10):
        logits, cache = model.step(cache, tokens[[0, 1], lengths + i])
        close(logits, whole[[0, 1], lengths + i])
    assert cache.next.tolist() == (lengths + 10).tolist()
    assert halves(model, cache).blocks.next.tolist() == ((lengths + 10) // L).tolist()


@pytest.mark.rotating
def test_a_full_cache_is_refused_when_the_next_block_would_not_fit(model, tokens, whole):
    _, cache = model.prefill(tokens[:, :16], room=0)
    for i in range(L - 1):
        logits, cache = model.step(cache, tokens[:, 16 + i])
        close(logits, whole[:, 16 + i])
    with pytest.raises(InputError, match="the cache is full"):
        model.step(cache, tokens[:, 0])


def test_a_cache_holds_one_slot_per_block_and_one_block(model):
    _, cache = model.prefill(np.zeros((1, 16), np.int32), room=0)
    slot = 2 * 8 * 2 + 2  # keys and values of one layer with two heads, and positions
    assert kvjax.nbytes(halves(model, cache).blocks.groups) == 4 * (16 // L) * 2 * slot
    assert kvjax.nbytes(halves(model, cache).tokens.groups) == 4 * (P + L - 1) * slot
    # The ids of the open block, and the position of the next token.
    assert kvjax.nbytes(cache) == 4 * (16 // L * 2 + P + L - 1) * slot + 4 * L + 4
    longer = jax.eval_shape(lambda: model.prefill(np.zeros((1, 64), np.int32), room=0)[1])
    assert kvjax.nbytes(longer) - kvjax.nbytes(cache) == 4 * (48 // L) * 2 * slot


@pytest.mark.rotating
def test_rows_can_be_copied_and_emptied(model, tokens, whole):
    _, cache = model.prefill(tokens[:, :T], room=10)
    cache = kvjax.fork(cache, 2)
    logits, cache = model.step(cache, tokens[[0, 0, 1, 1], T])
    close(logits, whole[[0, 0, 1, 1], T])
    cache = model.reset(cache, np.array([False, True, False, True]))
    rows, at = np.array([0, 0, 1, 1]), np.array([T + 1, 0, T + 1, 0])
    for i in range(6):
        logits, cache = model.step(cache, tokens[rows, at + i])
        close(logits, whole[rows, at + i])


@pytest.mark.rotating
def test_methods_compress_the_blocks(model, tokens, whole):
    snapkv = kvjax.method("snapkv", budget=2, window=1, kernel=1, variant="kvpress")
    logits, cache = model.prefill(tokens[:, :T], method=snapkv, room=10)
    close(logits, whole[:, T - 1])  # attention was whole when the prompt was read
    assert all((p >= 0).sum(-1).max() == 2 for p in kvjax.kept_positions(halves(model, cache).blocks))
    for i in range(5):
        logits, cache = model.step(cache, tokens[:, T + i])
    assert np.isfinite(np.asarray(logits)).all()
    _, full = model.prefill(tokens[:, :T], room=10)
    logits, cache = model.prefill(tokens[:, :T], method=kvjax.method("int8"), room=10)
    assert kvjax.nbytes(cache) < kvjax.nbytes(full)
    for i in range(5):
        logits, cache = model.step(cache, tokens[:, T + i])
        assert np.abs(np.asarray(logits) - whole[:, T + i]).max() < 0.05 * np.abs(whole).max()


@pytest.mark.rotating
def test_methods_that_evict_at_every_step_act_on_the_blocks(model, tokens):
    ends = kvjax.method("sink-recent", budget=3, sinks=1)
    logits, cache = kvjax.prefill(model, tokens[:, :T], method=ends, room=10)
    for i in range(10):
        logits, cache = kvjax.step(model, cache, tokens[:, T + i])
    assert np.isfinite(np.asarray(logits)).all()
    newest = (T + 10) // L - 1
    for layer in kvjax.kept_positions(halves(model, cache).blocks):
        kept = np.sort(layer, axis=-1)[..., -3:]
        np.testing.assert_array_equal(kept, np.broadcast_to([0, newest - 1, newest], kept.shape))


@pytest.mark.rotating
def test_generated_tokens_are_the_likeliest_of_the_forward_pass(model, tokens):
    free = kvjax.generate(model, tokens[:, :T], max_new_tokens=6)
    text = np.concatenate([tokens[:, :T], free.tokens], 1)
    np.testing.assert_array_equal(np.asarray(model(text)).argmax(-1)[:, T - 1 : -1], free.tokens)
    # A row that ended is left alone: what it goes on with later is what its own tokens say.
    first, second = np.asarray(free.tokens).tolist()
    at = next(i for i in range(1, 5) if first[i] not in first[:i] + second)
    out = kvjax.generate(model, tokens[:, :T], max_new_tokens=6, stop=[first[at]])
    assert out.tokens[0, at].tolist() == first[at] and out.lengths[0] == at + 1
    assert out.cache.next.tolist() == [T + at + 1, T + 6]
    logits, _ = kvjax.step(model, out.cache, [5, 5])
    for row, written in ((0, at + 1), (1, 6)):
        past = [*tokens[row, :T], *out.tokens[row, :written].tolist(), 5]
        padded = np.zeros((2, T + 7), int)
        padded[row, : len(past)] = past
        close(logits[row], np.asarray(model(padded))[row, len(past) - 1])


@pytest.mark.rotating
def test_what_its_verbs_cannot_do_is_refused(model, tokens):
    _, cache = kvjax.prefill(model, tokens[:, :T])
    for options, name in (
        (dict(cache=cache), "cache="),
        (dict(chunk=4), "chunk="),
        (dict(compress=False), "compress=False"),
    ):
        with pytest.raises(InputError, match=f"reads whole prompts and single tokens, got {name}: prefill"):
            kvjax.prefill(model, tokens, **options)
    with pytest.raises(InputError, match="a BlockTransformer reads .* single tokens, got append=False"):
        kvjax.step(model, cache, [1, 2], append=False)
    with pytest.raises(
        InputError, match=r"3 of 3 blocks must stay \(Recent\(tokens=64\)\).* budget of 1 slots"
    ):
        kvjax.prefill(model, tokens[:, :T], method=kvjax.method("snapkv", budget=0.5))
    with pytest.raises(InputError, match="reaches position 40, this model's last is 32"):
        config = dataclasses.replace(model.config, blocks=dataclasses.replace(BLOCKS, max_positions=8))
        dataclasses.replace(model, config=config).prefill(np.zeros((1, 40), int))


def test_what_takes_one_decoder_says_so(model, tmp_path):
    for call in (
        lambda: kvjax.compare(model=model, out=tmp_path / "out"),
        lambda: save_hf(model, tmp_path / "out"),
        lambda: encode_context(model, model, [[1]]),
    ):
        with pytest.raises(InputError, match="a model of two decoders, expected one decoder: "):
            call()
    assert not os.listdir(tmp_path)


# --- files -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "two"
    save_checkpoint(model, path)
    return path


@pytest.mark.rotating
def test_a_checkpoint_comes_back_with_the_same_logits(model, tokens, whole, saved):
    again = kvjax.load(saved)
    assert isinstance(again, BlockTransformer) and again.name == "two"
    assert again.config == model.config and again.fingerprint == model.fingerprint
    np.testing.assert_array_equal(again(tokens), whole)
    assert os.listdir(saved.parent) == ["two"]
    with pytest.raises(InputError, match="is not replaced unasked"):
        save_checkpoint(again, saved)
    save_checkpoint(again, saved, overwrite=True)


@pytest.mark.rotating
def test_a_checkpoint_keeps_its_dtype_and_loads_in_any_stacking_and_place(model, tmp_path):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    save_checkpoint(dataclasses.replace(model, params=low, stop_ids=(3,)), tmp_path / "low")
    again = load_checkpoint(tmp_path / "low")
    assert again.stop_ids == (3,)
    jax.tree.map(np.testing.assert_array_equal, again.params, low)
    assert {x.dtype.name for x in jax.tree.leaves(again.params)} == {"bfloat16"}
    there = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    stacked = load_checkpoint(
        tmp_path / "low",
        groups=Groups((Group(0, 2),), plan(model.config, stacked=False).tokens),
        sharding=lambda path, shape: there if path.startswith("blocks.layers.0.") else here,
    )
    for one, name in enumerate(("q", "up")):
        want = np.stack([np.asarray(layer[name][0]) for layer in low["blocks"]["layers"]])
        np.testing.assert_array_equal(stacked.params["blocks"]["layers"][0][name], want, str(one))
        assert stacked.params["blocks"]["layers"][0][name].sharding == there
    assert stacked.params["tokens"]["embed"].sharding == here
    with pytest.raises(ValueError, match="groups must be Groups"):
        load_checkpoint(tmp_path / "low", groups=(Group(0, 2),))


def edited(saved, tmp_path, edit):
    folder = shutil.copytree(saved, tmp_path / "edited")
    head = json.loads((folder / MARKER).read_text())
    edit(head)
    (folder / MARKER).write_text(json.dumps(head))
    return folder


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda head: head["config"].update(surprise=1), "does not describe a model .*surprise"),
        (lambda head: head["config"].pop("blocks"), "does not describe a model .*blocks"),
        (lambda head: head["config"].update(prefix=3), "does not describe a model .*3 inputs of the token"),
        (lambda head: head["config"]["tokens"].pop("vocab"), "does not describe a model .*vocab"),
        (lambda head: head["groups"].pop("tokens"), "does not describe a model"),
        (
            lambda head: head["config"]["blocks"].update(d_ff=12),
            r"blocks.layers.0.down \(expected \(1, 12, 24\), found \(1, 24, 24\)\)",
        ),
        (lambda head: head.update(format=9), "format 9, this kvjax reads 1"),
    ],
)
def test_a_broken_checkpoint_says_what_is_wrong(saved, tmp_path, edit, why):
    with pytest.raises(InputError, match=why):
        kvjax.load(edited(saved, tmp_path, edit))


def test_a_config_comes_back_from_json(model):
    data = json.loads(json.dumps(config_to_json(model.config)))
    assert config_from_json(data) == model.config


@pytest.mark.rotating
def test_a_saved_cache_comes_back_and_continues(model, tokens, whole, tmp_path):
    _, cache = kvjax.prefill(model, tokens[:, :T], room=10)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    again = kvjax.load_cache(tmp_path / "a.cache")
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    assert kvjax.nbytes(again) == kvjax.nbytes(cache)
    jax.tree.map(np.testing.assert_array_equal, again, cache)
    for i in range(10):
        logits, again = kvjax.step(model, again, tokens[:, T + i])
        close(logits, whole[:, T + i])
    moved = dict(model.params, start=model.params["start"] + 1)
    other = dataclasses.replace(model, params=moved)
    for call in (kvjax.step, lambda *given: other.reset(given[1], np.array([True, False]))):
        with pytest.raises(InputError, match="filled by another model"):
            call(other, kvjax.load_cache(tmp_path / "a.cache"), [1, 2])


@pytest.mark.rotating
def test_gradients_are_finite_and_reach_every_parameter(model, tokens):
    def loss(params):
        return jax.nn.log_softmax(dataclasses.replace(model, params=params)(tokens))[..., 0].mean()

    gradient = jax.jit(jax.grad(loss))(model.params)
    gradient["tokens"].pop("embed"), gradient["tokens"].pop("unembed")
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(length=5), "is no concatenation of 5 tokens"),
        (dict(prefix=3), "but 3 inputs of the token decoder are 60"),
        (dict(length=0), "length is 0, expected a whole number >= 1"),
        (dict(blocks=dataclasses.replace(BLOCKS, tied=True)), "has no embedding to tie"),
        (dict(tokens=dataclasses.replace(TOKENS, max_positions=4)), "takes 5 positions of the token decoder"),
        (
            dict(tokens=dataclasses.replace(TOKENS, layers=2, mixers=CONTEXT)),
            "layer 1 of the tokens decoder .* a context",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        BlockConfig(**(dict(blocks=BLOCKS, tokens=TOKENS, length=L, prefix=P) | options))


def test_bad_input_is_refused_before_anything_runs(model, tokens):
    with pytest.raises(InputError, match="outside the vocabulary"):
        model.prefill(tokens + 30)
    with pytest.raises(InputError, match="lengths must be"):
        model.prefill(tokens, lengths=[1, 99])
    with pytest.raises(InputError, match="kvzip does not fit this model: it repeats the prompt's tokens"):
        model.prefill(tokens, method=kvjax.method("kvzip", budget=0.5))
