"""Training on contexts that an encoder reads (XC-Cache): what is lost, what learns, what is refused."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.config import Config
from kvjax.models.encoder import encode
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import forward
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.difference import difference
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer
from kvjax.train.loop import train
from kvjax.train.settings import Loop, training
from kvjax.train.step import BatchParts, Companions, Frozen, learned_loss, total_loss

CONFIG = Config(vocab=257, d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24)
LOOP = dict(steps=3, batch=2, length=24, context=8, compute="float32", log_every=1, evaluate_rows=2)


def models():
    special = dict(tokenizer=byte_tokenizer(), special_tokens={"eos_token": END})
    plain = Model(CONFIG, init(CONFIG, jax.random.key(0)), **special)
    return plain, convert(plain, "xc-cache:before=[1]")


def test_new_layers_change_nothing_at_first():
    plain, made = models()
    assert difference(plain, made, [list(range(12))]).divergence == pytest.approx(0, abs=1e-6)


@pytest.mark.rotating
def test_what_is_lost_is_the_loss_behind_the_context_and_the_new_layers_learn():
    plain, made = models()
    for name in ("o", "down"):
        layer = made.params["layers"][1]
        layer[name] = jax.random.normal(jax.random.key(3), layer[name].shape) * 0.3
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, 25)), jnp.int32)
    part = BatchParts(tokens, jnp.ones((2, 25), jnp.float32), None)
    loop, beside = Loop(**LOOP), Companions(encoder=Frozen(plain.params, plain.config))
    context = encode(plain.params, tokens[:, :8], CONFIG)
    logits = np.asarray(forward(made.params, tokens[:, 8:-1], made.config, context=context), np.float64)
    picked = np.take_along_axis(logits, np.asarray(tokens)[:, 9:, None], -1)[..., 0]
    want = (np.log(np.exp(logits).sum(-1)) - picked).sum()
    found = float(total_loss(made.params, part, made.config, loop, beside=beside))
    assert found == pytest.approx(want, rel=1e-5)
    # The context matters: another one is another loss.
    other = part._replace(tokens=tokens.at[:, :8].set(7))
    assert abs(float(total_loss(made.params, other, made.config, loop, beside=beside)) - found) > 1e-2
    gradient = jax.grad(learned_loss)(made.params, part, made.config, loop, beside)
    assert all(np.abs(g).max() > 0 for g in gradient["layers"][1].values())


@pytest.mark.rotating
def test_a_run_trains_the_new_layers_of_a_frozen_decoder(tmp_path):
    plain, made = models()
    save_checkpoint(plain, tmp_path / "plain")
    save_checkpoint(made, tmp_path / "made")
    text = tmp_path / "a.txt"
    text.write_text("a text about nothing at all. " * 60)
    bound = {
        "model": {"start": str(tmp_path / "made"), "encoder": str(tmp_path / "plain")},
        "data": {"kind": "text", "files": [str(text)], "held_out": 0.0},
        "tune": {"trained": ["layers.1.*"]},
        "train": LOOP,
    }
    out = kvjax.load(train(training(bound), tmp_path / "run"))
    for i, same in ((0, True), (1, False), (2, True)):
        for name, w in out.params["layers"][i].items():
            if same:
                assert np.array_equal(w, made.params["layers"][i][name])
    assert np.abs(out.params["layers"][1]["o"]).max() > 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    # A mean over the 16 tokens behind the context, about that of 257 equal ones.
    assert abs(log[0]["loss"] - math.log(257)) < 1.5
    for change, message in (
        ({"model": {"start": str(tmp_path / "made")}}, "model.encoder is None, train.context 8 of 24"),
        ({"train": LOOP | {"context": 0}}, "train.context 0 of 24"),
        ({"model": bound["model"] | {"start": str(tmp_path / "plain")}, "tune": {}}, "has no such layers"),
        ({"model": bound["model"] | {"teacher": str(tmp_path / "plain")}}, "a context is apart"),
    ):
        with pytest.raises(InputError, match=message):
            train(training(bound | change), tmp_path / "other")
        assert not (tmp_path / "other").exists()


@pytest.mark.rotating
def test_cepe_reads_contexts_behind_every_attention_and_changes_nothing_at_first():
    plain, _ = models()
    made = convert(plain, "cepe:width=8")
    assert difference(plain, made, [list(range(12))]).divergence == pytest.approx(0, abs=1e-6)
    assert [type(m).__name__ for m in made.config.mixers] == ["Attention", "CrossAttention"] * 2
    # What it has besides, a context changes it as soon as an output map is not zero.
    layer = made.params["layers"][3]
    layer["o"] = jax.random.normal(jax.random.key(3), layer["o"].shape)
    encoder = Config(vocab=257, d_model=8, layers=1, heads=2, kv_heads=2, head_dim=4, d_ff=8)
    context = encode(init(encoder, jax.random.key(1)), jnp.arange(8)[None], encoder)
    tokens = jnp.arange(12)[None]
    apart = forward(made.params, tokens, made.config, context=context) - plain(tokens)
    assert np.abs(apart).max() > 1e-2
    with pytest.raises(InputError, match="width is 0"):
        convert(plain, "cepe:width=0")
    with pytest.raises(InputError, match="some of this model's are others"):
        convert(made, "cepe:width=8")


@pytest.mark.rotating
def test_an_encoder_learns_beside_a_frozen_decoder_is_saved_and_goes_on(tmp_path):
    plain, _ = models()
    save_checkpoint(convert(plain, "cepe:width=8"), tmp_path / "made")
    text = tmp_path / "a.txt"
    text.write_text("a text about nothing at all. " * 60)
    encoder = {
        "d_model": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4, "d_ff": 8,
        "mixer": {"word": "Bidirectional"},
    }  # fmt: skip
    bound = {
        "model": {"start": str(tmp_path / "made"), "encoder": encoder},
        "data": {"kind": "text", "files": [str(text)], "held_out": 0.0},
        "optimiser": {"peak": 1e-2, "warmup": 1},
        "tune": {"trained": ["layers.[13].[qkvo]"], "encoder": True},
        "train": LOOP | {"steps": 12, "chunk": 4, "save_seconds": 0.0},
    }
    run = training(bound, vocab=257)
    made, first = kvjax.load(tmp_path / "made"), init(run.encoder, jax.random.key(1))
    out = kvjax.load(train(run, tmp_path / "run"))
    learned = kvjax.load(tmp_path / "run" / "encoder")
    assert learned.config == run.encoder
    for i, layer in enumerate(out.params["layers"]):
        for name, w in layer.items():
            same = np.array_equal(w, made.params["layers"][i][name])
            assert same == (i % 2 == 0 or name not in "qkvo")
    for a, b in zip(jax.tree.leaves(learned.params["layers"]), jax.tree.leaves(first["layers"]), strict=True):
        assert not np.array_equal(a, b)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]
    # The same from a checkpoint in the middle.
    folder = tmp_path / "cut"
    shutil.copytree(tmp_path / "run", folder)
    for name in ("model", "encoder", "checkpoints/12"):
        shutil.rmtree(folder / name)
    again = kvjax.load(train(run, folder, resume=True))
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(out.params), strict=True):
        assert np.array_equal(a, b)
    # A frozen one, by its directory, stands beside a run, too.
    on = bound["model"] | {"encoder": str(tmp_path / "run" / "encoder")}
    still = training(bound | {"model": on, "tune": {"trained": ["layers.[13].o"]}})
    train(still, tmp_path / "on")
    assert not (tmp_path / "on" / "encoder").exists()
    for change, message in (
        ({"tune": {}}, "starts at random, and it does not learn"),
        ({"train": LOOP | {"context": 0}}, "model.encoder is sizes, train.context 0 of 24"),
        ({"model": bound["model"] | {"encoder": encoder | {"d_model": 16}}}, "the encoder has 16 channels"),
        ({"model": bound["model"] | {"encoder": encoder | {"max_positions": 3}}}, "lower train.chunk"),
    ):
        with pytest.raises(InputError, match=message):
            train(training(bound | change, vocab=257), tmp_path / "other")
        assert not (tmp_path / "other").exists()
