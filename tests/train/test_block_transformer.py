"""Training a Block Transformer: its loss, its restart, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.block_transformer import BlockTransformer
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.block_transformer import BlockConfig, block_inputs, forward, init
from kvjax.models.config import Config
from kvjax.models.mixers.attention import Attention
from kvjax.models.model import Model
from kvjax.models.params import init as init_one
from kvjax.models.transformer import forward as decoder
from kvjax.train.conversion.conversions import convert
from kvjax.train.conversion.difference import difference
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer
from kvjax.train.loop import train
from kvjax.train.settings import training
from kvjax.train.step import BatchParts, total_loss

SIZES = dict(layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=24)
MODEL = {"blocks": SIZES, "tokens": SIZES, "length": 4, "prefix": 2}
LOOP = dict(steps=4, batch=2, length=24, compute="float32", log_every=1, evaluate_rows=2, save_seconds=0.0)


def settings(text, **change):
    data = {"kind": "text", "files": [str(text)], "held_out": 0.0}
    return training({"model": MODEL, "data": data, "train": LOOP} | change, vocab=257)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("a text about nothing at all. " * 60)
    return tmp_path / "a.txt"


@pytest.mark.rotating
def test_its_loss_is_that_of_its_logits(text):
    run = settings(text)
    assert isinstance(run.config, BlockConfig) and run.config.blocks.vocab == 32 and run.config.vocab == 257
    params = init(run.config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 257, (2, 25)).astype(np.int32)
    part = BatchParts(jnp.asarray(tokens), jnp.ones((2, 25), jnp.float32), None)
    logits = np.asarray(forward(params, part.tokens[:, :-1], run.config), np.float64)
    picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    want = (np.log(np.exp(logits).sum(-1)) - picked).sum()
    assert float(total_loss(params, part, run.config, run.loop)) == pytest.approx(want, rel=1e-5)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_learns_goes_on_and_its_model_answers(text, tmp_path, name):
    run = settings(text, optimiser={"name": name, "peak": 1e-2, "warmup": 1}, train=LOOP | {"steps": 12})
    model = kvjax.load(train(run, tmp_path / "run"))
    assert isinstance(model, BlockTransformer)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 0.5
    assert kvjax.generate(model, [[5, 6, 7]], max_new_tokens=3).tokens.shape == (1, 3)
    on = settings(text, model={"start": str(tmp_path / "run" / "model")})
    train(on, tmp_path / "on")
    first = json.loads((tmp_path / "on" / "log.jsonl").read_text().splitlines()[0])
    assert first["loss"] < log[1]["loss"]


def test_what_two_decoders_cannot_is_said(text, tmp_path):
    for change, message in (
        ({"tune": {"frozen": ["embed"]}}, "trains whole and on one device"),
        ({"model": MODEL | {"init": "circuit"}}, "which is of one decoder"),
    ):
        with pytest.raises(InputError, match=message):
            train(settings(text, **change), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="unknown setting of a model of two decoders 'layers'"):
        settings(text, model=MODEL | {"layers": 2})
    with pytest.raises(InputError, match="no concatenation of 3 tokens"):
        settings(text, model=MODEL | {"length": 3})


def trained(**change):
    config = Config(vocab=40, d_model=16, layers=4, heads=2, kv_heads=1, head_dim=8, d_ff=24, **change)
    return Model(config, init_one(config, jax.random.key(2)), name="trained")


@pytest.mark.rotating
def test_a_decoder_becomes_two_of_its_own_layers():
    model = trained()
    made = convert(model, "block:length=4,prefix=1,layers=3")
    assert isinstance(made, BlockTransformer)
    config, params = made.config, made.params
    assert (config.blocks.layers, config.tokens.layers, config.length, config.prefix) == (3, 1, 4, 1)
    ours = [*params["blocks"]["layers"], *params["tokens"]["layers"]]
    for new, old in zip(ours, model.params["layers"], strict=True):
        for name, w in old.items():
            np.testing.assert_array_equal(new[name], w)
    # Principal components: distances between tokens are those of the best table of 4 channels.
    table = np.asarray(model.params["embed"], np.float64)
    sizes = np.linalg.svd(table, compute_uv=False)
    narrow = np.asarray(params["embed"], np.float64)
    scale = (sizes**2).sum() / (sizes[:4] ** 2).sum()
    np.testing.assert_allclose(np.linalg.eigvalsh(narrow.T @ narrow)[::-1], sizes[:4] ** 2 * scale, rtol=1e-4)
    # What the blocks say is their output behind the norm, which is what the upper layers are given.
    tokens = jnp.arange(8)[None]
    said = decoder(params["blocks"], block_inputs(params, tokens, config), config.blocks)
    assert np.allclose(np.square(said).mean(-1), 1, atol=1e-3)
    assert 0 < difference(model, made, [list(range(12))]).divergence < 20


def test_what_cannot_become_two_decoders_is_said():
    for spec, message in (
        ("block:layers=4", "layers is 4, expected 1 to 3"),
        ("block:length=3", "a divisor of the 16 channels"),
    ):
        with pytest.raises(InputError, match=message):
            convert(trained(), spec)
    shared = trained(mixers=(Attention(), Attention(source=0), Attention(), Attention()))
    with pytest.raises(InputError, match="exchange slots or states"):
        convert(shared, "block")


@pytest.mark.rotating
def test_two_decoders_of_a_trained_one_learn_on_from_it(text, tmp_path):
    config = Config(vocab=257, d_model=16, layers=4, heads=2, kv_heads=1, head_dim=8, d_ff=24)
    special = dict(tokenizer=byte_tokenizer(), special_tokens={"eos_token": END})
    model = Model(config, init_one(config, jax.random.key(2)), **special)
    save_checkpoint(model, tmp_path / "plain")
    save_checkpoint(convert(model, "block:length=4"), tmp_path / "block")
    both = {"start": str(tmp_path / "block"), "teacher": str(tmp_path / "plain")}
    run = settings(text, model=both, optimiser={"peak": 1e-2, "warmup": 1}, train=LOOP | {"steps": 12})
    out = kvjax.load(train(run, tmp_path / "run"))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert isinstance(out, BlockTransformer) and log[-1]["loss"] < log[0]["loss"] - 0.3
