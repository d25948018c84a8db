"""The shipped files of `kvjax train`, what a file may bind, and the command."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.block_transformer import BlockConfig, BlockTransformer
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io.gin_bindings import load_training, training_files
from kvjax.models.block_transformer import layout_of
from kvjax.models.model import Model
from kvjax.train.loop import begin
from kvjax.train.optimiser import optimiser
from kvjax.train.settings import training
from kvjax.train.step import BatchParts, TrainState, make_step
from tests.sweep import sweep

SMALL = ("train.steps=2", "train.batch=2", "train.length=16", "train.evaluate_rows=2", "train.log_every=1")
TINY = ("model.layers=1", "model.d_model=16", "model.heads=2", "model.kv_heads=1", "model.head_dim=8")


# gisting's file binds no sizes: it goes on from a model (tests/train/test_compressed.py).
@pytest.mark.parametrize("name", sweep(sorted(training_files().keys() - {"gisting"}), "bytes"))
def test_every_shipped_file_is_a_run_of_a_few_million_parameters(name):
    run = training(load_training(name), vocab=257)
    params = jax.eval_shape(lambda: layout_of(run.config).init(run.config, jax.random.key(0)))
    about = 4.8e6 if name == "recall-small" else 1e6  # the others are compared with each other
    assert 0.5 * about < sum(x.size for x in jax.tree.leaves(params)) < 1.5 * about
    steps = optimiser(run.optimiser, run.loop)
    state = jax.eval_shape(lambda p: TrainState(p, steps.init(p), jnp.zeros((), jnp.int32)), params)
    parts = BatchParts(*(jax.ShapeDtypeStruct((1, 2, 33), dtype) for dtype in ("int32", "float32")), None)
    new, found = jax.eval_shape(make_step(run.config, run.loop, steps), state, parts)
    assert jax.tree.map(lambda x: x.shape, new) == jax.tree.map(lambda x: x.shape, state)
    assert found.loss.shape == ()


@pytest.mark.rotating
@pytest.mark.parametrize("name", sorted(training_files().keys() - {"uptrain", "recall-tiny", "gisting"}))
def test_every_shipped_architecture_learns_and_its_steps_say_what_its_forward_pass_says(name):
    sizes = {"d_model": 32, "d_ff": 32}
    bound = load_training(name, ["optimiser.warmup=2", "train.compute=float32"])
    model = bound["model"]
    if "blocks" in model:
        model = {n: x | sizes if isinstance(x, dict) else x for n, x in model.items()}
    run = training(bound | {"model": model | ({} if "blocks" in model else sizes)}, vocab=257)
    blocks = isinstance(run.config, BlockConfig)
    params = layout_of(run.config).init(run.config, jax.random.key(0))
    rule = optimiser(run.optimiser, run.loop)
    text = (b"a text about nothing at all. " * 5)[:129]
    tokens = jnp.asarray([list(text)] * 2, jnp.int32)
    parts = BatchParts(tokens[None], jnp.ones((1, 2, 129), jnp.float32), None)
    state, _ = begin(params, run, run.config, rule, None)
    step, losses = make_step(run.config, run.loop, rule), []
    for _ in range(6):
        state, found = step(state, parts)
        losses.append(float(found.loss))
    assert losses[-1] < losses[0] - 0.3
    made = (BlockTransformer if blocks else Model)(run.config, state.params)
    whole = np.asarray(made(tokens[:1, :80]))[0]
    logits, cache = kvjax.prefill(made, tokens[:1, :70], room=16)
    for at in range(70, 80):
        np.testing.assert_allclose(logits[0], whole[at - 1], atol=2e-3 * np.abs(whole).max())
        logits, cache = kvjax.step(made, cache, tokens[:1, at])


@pytest.mark.rotating
def test_the_command_trains_and_goes_on_and_says_what_to_do_next(tmp_path, capsys):
    text, out = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("a text about nothing at all. " * 40)
    words = ["train", "--gin", "bytes", "--out", str(out), "--set", *SMALL, *TINY]
    words += ["data.kind=text", f"data.files=['{text}']", "data.held_out=0.0"]
    assert main(words) == 0
    assert f"kvjax compare --model {out}/model" in capsys.readouterr().out.replace("\n", "")
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2] and log[-1]["tokens"] == 2 * 2 * 16
    assert main(words) == 2 and "--resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0


def test_a_model_to_start_from_takes_the_place_of_the_sizes_that_a_file_binds():
    run = training(load_training("bytes-mla", ["model.start=runs/mine"]), vocab=257)
    assert run.start == "runs/mine" and run.config is None
    # A wrong name is refused all the same.
    with pytest.raises(InputError, match="unknown setting of model 'laeyrs'"):
        training(load_training("bytes", ["model.start=runs/mine", "model.laeyrs=2"]), vocab=257)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bites", [], "no training file 'bites': did you mean bytes"),
        ("novel", [], "no training file 'novel': give one of bytes"),
        ("bytes", ["train.steps"], "'train.steps' binds nothing: write SECTION.NAME=VALUE"),
        ("bytes", ["trian.steps=3"], "unknown section 'trian': did you mean train"),
    ],
)
def test_what_binds_nothing_is_refused(name, changes, message):
    with pytest.raises(InputError, match=message):
        load_training(name, changes)


def test_a_file_that_gin_cannot_read_is_named_with_its_line(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("train.steps = 3\ntrian.batch = 4\n")
    with pytest.raises(InputError, match=r"mine.gin.*trian.*did you mean train"):
        load_training(file)
    file.write_text("train.steps = 3\ntrain.batch = = 4\n")
    with pytest.raises(InputError, match=r"mine.gin, line 2"):
        load_training(file)


def test_a_file_names_no_python_file_as_its_method(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("train.method = 'mine.py:acts'\n")
    with pytest.raises(InputError, match=r"mine.gin, line 1: train.method is .* would run Python code"):
        load_training(file)
    assert load_training("bytes", ["train.method=a.py:b"])["train"]["method"] == "a.py:b"


ACTS = (
    "import acts",
    "from __gin__ import dynamic_registration\nimport os\ntrain.steps = @os.getpid()",
    "train.steps = @acts.f()",
    "X = [@acts.f]\ntrain.steps = 3",
    "include 'other.gin'",
)


@pytest.mark.parametrize("text", ACTS, ids=range(len(ACTS)))
def test_a_training_file_runs_no_module_and_calls_no_function(text, tmp_path, monkeypatch):
    (tmp_path / "acts.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')\ndef f(): return 3\n")
    (tmp_path / "other.gin").write_text("import acts\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.gin"
    file.write_text(f"include 'bytes.gin'\n{text}\n")
    with pytest.raises(InputError, match="would run Python code") as error:
        load_training(file)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "done").exists() and "acts" not in sys.modules


def test_a_macro_that_nothing_binds_is_named_with_the_nearest(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text("train.steps = %STEPS\n")
    with pytest.raises(InputError, match=r"mine.gin: it uses the macro %STEPS.*write STEPS = VALUE"):
        load_training(file)
    file.write_text("STEP = 3\ntrain.steps = %STEPS\n")
    with pytest.raises(InputError, match=r"%STEPS, which nothing binds: did you mean %STEP\?"):
        load_training(file)
    file.write_text("include 'uptrain.gin'\nSTEPS = 3\ntrain.steps = %STEPS\n")
    bound = load_training(file)  # a shipped file may be included from anywhere
    assert bound["train"]["steps"] == 3 and bound["data"] == {"kind": "python"}
