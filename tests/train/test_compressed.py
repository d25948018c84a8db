"""Training under a method: what is said behind compressed contexts, what learns from it, what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.grammar.fitted import load_fitted
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.train.compressed import compressor, read_and_said
from kvjax.train.data.byte_tokenizer import END, byte_tokenizer
from kvjax.train.loop import train
from kvjax.train.settings import Loop, training
from kvjax.train.step import BatchParts, Companions, learned_loss, parted

CONFIG = Config(vocab=257, d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24)
LOOP = dict(batch=2, length=24, context=12, compute="float32", log_every=1, evaluate_rows=2)
MEMORY = ("gisting:tokens=2", "loma:tokens=2,ratio=2", "ccm:tokens=2,chunk=4")
RESTORE = "restorekv:budget=0.5,tokens=2,sinks=1"


@pytest.fixture(scope="module")
def model():
    special = dict(tokenizer=byte_tokenizer(), special_tokens={"eos_token": END})
    return Model(CONFIG, init(CONFIG, jax.random.key(0)), **special)


def tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (2, 25)), jnp.int32)


def said(model, method, ids):
    return read_and_said(compressor(method, model, 0), CONFIG, model.params, ids[:, :12], ids[:, 12:])


@pytest.mark.rotating
def test_a_method_that_keeps_all_changes_nothing(model):
    ids = tokens()
    found, again = said(model, "full", ids)
    np.testing.assert_allclose(found, model(ids)[:, 12:], atol=1e-4)
    assert again == 0


@pytest.mark.rotating
@pytest.mark.parametrize(
    "method",
    [
        "streaming-llm:budget=0.5",
        *(
            pytest.param(method, marks=pytest.mark.rotating)
            for method in (
                "snapkv:budget=0.5,window=2",
                "ada-kv:budget=0.5,window=2",
                "cam:budget=0.5",
                "kvzip:budget=0.5,sinks=1",
                RESTORE,
            )
        ),
    ],
)
def test_what_is_said_is_what_a_cache_says(model, method):
    ids = tokens()
    found, _ = said(model, method, ids)
    _, cache = kvjax.prefill(model, ids[:, :12], method=compressor(method, model, 0).method, room=13)
    last, _ = kvjax.prefill(model, ids[:, 12:], cache=cache, compress=False)
    np.testing.assert_allclose(found[:, -1], last, atol=1e-4)
    assert np.abs(found[:, -1] - model(ids)[:, -1]).max() > 1e-2


@pytest.mark.rotating
@pytest.mark.parametrize("method", [*MEMORY, RESTORE])
def test_slopes_are_those_of_differences(model, method):
    """Of the whole loss, along a random direction, through what memory tokens leave."""
    by, ids, loop = compressor(method, model, 0), tokens(), Loop(method=method, **LOOP)
    part = BatchParts(ids, jnp.ones((2, 25), jnp.float32), None)

    @jax.jit
    def loss(params, arrays):
        return learned_loss(params, part, CONFIG, loop, Companions(compressor=by.with_learned(arrays)))

    at = (model.params, by.learns)
    keys = iter(jax.random.split(jax.random.key(5), 64))
    way = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape) * x.std(), at)
    slope = jax.jit(jax.grad(loss, argnums=(0, 1)))(*at)
    want = sum(float(jnp.vdot(a, b)) for a, b in zip(*map(jax.tree.leaves, (slope, way)), strict=True))
    moved = [jax.tree.map(lambda x, d, e=e: x + e * d, at, way) for e in (1e-3, -1e-3)]
    found = (float(loss(*moved[0])) - float(loss(*moved[1]))) / 2e-3
    assert found == pytest.approx(want, rel=2e-2)
    assert all(
        np.abs(slope[1][name]).max() > 0 for name in ("memory", *(["repeat"] if "loma" in method else []))
    )
    # What tokens of the context are reaches the loss through memory alone, and does.
    assert np.abs(slope[0]["embed"][np.asarray(ids[:, :8])]).max() > 0


def bound(folder, model, method, **loop):
    save_checkpoint(model, folder / "start")
    text = folder / "a.txt"
    text.write_text("a text about nothing at all. " * 60)
    return {
        "model": {"start": str(folder / "start")},
        "data": {"kind": "text", "files": [str(text)], "held_out": 0.0},
        "optimiser": {"peak": 1e-2, "warmup": 1},
        "train": LOOP | {"steps": 20, "method": method} | loop,
    }


@pytest.mark.rotating
@pytest.mark.parametrize("method", [*MEMORY[:2], RESTORE])
def test_a_model_learns_with_its_memory_tokens_is_saved_and_goes_on(model, method, tmp_path):
    run, id = training(bound(tmp_path, model, method, save_seconds=0.0)), method.partition(":")[0]
    out = kvjax.load(train(run, tmp_path / "run"))
    log = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1] < log[0] - 1
    file = tmp_path / "run" / f"{id}.safetensors"
    # It is used as any fit, on the model that learned with it and on no other.
    fitted = f"{method},fitted={file}"
    _, cache = kvjax.prefill(out, tokens()[:, :12], method=compressor(fitted, out, 0).method, room=1)
    assert cache.groups[0].tail.capacity < 12
    with pytest.raises(InputError, match="fitted to another model"):
        compressor(fitted, model, 0)
    # A run that was cut ends alike.
    folder = tmp_path / "cut"
    shutil.copytree(tmp_path / "run", folder)
    for name in ("model", "checkpoints/20"):
        shutil.rmtree(folder / name)
    (folder / file.name).unlink()
    assert kvjax.load(train(run, folder, resume=True)).fingerprint == out.fingerprint
    assert load_fitted(folder / file.name) == load_fitted(file)


@pytest.mark.rotating
def test_numbers_that_are_none_end_a_run_and_say_where(model, tmp_path):
    settings = bound(tmp_path, model, "streaming-llm:budget=0.5", steps=4)
    settings["optimiser"]["peak"] = 1e30
    with pytest.raises(InputError, match="step 3: .*(streaming-llm read|gradient of).* is not a number"):
        train(training(settings), tmp_path / "run")


def test_words_that_were_fitted_before_go_on_from_there(model):
    first = compressor(MEMORY[0], model, 3)
    trained, beside = first.learns, Companions(compressor=first)
    moved = jax.tree.map(lambda x: x + 1, trained)
    assert parted((None, moved), beside)[1] is beside
    assert np.array_equal(first.with_learned(moved).learns["memory"], trained["memory"] + 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train": {"method": "kivi"}}, "'kivi', whose store is not for training"),
        ({"train": {"method": "quest:budget=0.5"}}, "whose read is not for training"),
        ({"train": {"method": "snapkv"}}, "needs a budget: write snapkv"),
        ({"train": {"method": "gistin"}}, "did you mean 'gisting'"),
        ({"train": {"method": 3}}, "train.method is .*, expected text, or None"),
        ({"train": {"context": 0}}, "reads the first train.context tokens of every row, and that is 0 of 24"),
        ({"train": {"context": 24}}, "that is 24 of 24"),
        ({"train": {"method": "locret:budget=0.5"}}, "run `kvjax fit locret:budget=0.5`"),
        ({"train": {"chunk": 4}}, "leave one of them out"),
        ({"devices": {"mesh": "data=1"}}, "trains on one device"),
    ],
)
def test_what_cannot_be_trained_under_is_refused_before_a_folder_is_made(model, change, message, tmp_path):
    settings = bound(tmp_path, model, "gisting")
    for section, values in change.items():
        settings[section] = settings.get(section, {}) | values
    with pytest.raises(InputError, match=message):
        train(training(settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
