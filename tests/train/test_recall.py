"""The training of recall-tiny at a toy size: it resumes exactly, and each of its parts is right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.eval.recall_tasks import TASKS, training_batch
from kvjax.train import recall
from kvjax.train.recall import SCHEDULE, Stage, plan, save_weights, train
from kvjax.train.recall_init import RecallSize, circuit_init

SIZE = RecallSize(width=64, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=32)
SHORT = (Stage(20 * 256e-6, 128, 256),)


def log_without_times(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def arrays(path):
    with np.load(path) as saved:
        return {name: saved[name] for name in saved.files if name != "seconds"}


def test_a_run_that_was_cut_ends_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "LOG_EVERY", 4)
    whole = train(tmp_path / "whole", seed=3, schedule=SHORT, size=SIZE, checkpoint_seconds=1e9)
    assert len(plan(SHORT)) == 20

    def cut(rng, batch, length):
        if len(made) == 10:
            raise KeyboardInterrupt
        made.append(training_batch(rng, batch, length))
        return made[-1]

    made = []
    with monkeypatch.context() as patch:
        patch.setattr(recall, "training_batch", cut)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", seed=3, schedule=SHORT, size=SIZE, checkpoint_seconds=0.0)
    assert not (tmp_path / "cut" / "model.npz").exists()
    with open(tmp_path / "cut" / "log.jsonl", "a") as log:
        log.write(
            '{"step": 12, "loss": 0.1}\n{"step": 16, "lo'
        )  # written after the last checkpoint, then killed
    resumed = train(tmp_path / "cut", seed=3, schedule=SHORT, size=SIZE)

    for name in ("model.npz", "checkpoint.npz"):
        one, two = arrays(tmp_path / "whole" / name), arrays(tmp_path / "cut" / name)
        assert one.keys() == two.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], two[key], err_msg=key)
    assert log_without_times(tmp_path / "whole") == log_without_times(tmp_path / "cut")
    assert [line["step"] for line in log_without_times(tmp_path / "cut")] == [4, 8, 12, 16, 20]
    assert not list(tmp_path.glob("*/*.tmp"))
    assert (whole.name, resumed.name) == ("model.npz", "model.npz")


def test_a_finished_run_returns_at_once_and_another_is_refused(tmp_path, monkeypatch):
    once = (Stage(256e-6, 128, 256),)
    path = train(tmp_path, seed=0, schedule=once, size=SIZE)
    before = path.read_bytes()
    monkeypatch.setattr(recall, "training_batch", None)
    assert train(tmp_path, seed=0, schedule=once, size=SIZE).read_bytes() == before
    with pytest.raises(InputError, match=r"other settings: seed 0 \(asked: 1\)"):
        train(tmp_path, seed=1, schedule=once, size=SIZE)
    monkeypatch.undo()
    train(tmp_path, seed=1, schedule=once, size=SIZE, resume=False)
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 1


def test_saved_file_has_the_layout_of_the_recipe(tmp_path):
    params = circuit_init(jax.random.key(0))
    save_weights(tmp_path / "model.npz", params, RecallSize())
    with np.load(tmp_path / "model.npz") as saved:
        config = json.loads(str(saved["__config__"]))
        shapes = {
            name: saved[name].shape for name in saved.files if name.startswith(("emb", "nf", "blocks.3"))
        }
        wqkv, w13 = saved["blocks.1.wqkv"], saved["blocks.1.w13"]
        assert len(saved.files) == 1 + 2 + 4 * 6
        assert all(saved[name].dtype == np.float16 for name in saved.files if name != "__config__")
    assert config == {
        "vocab": 220,
        "d": 128,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "ffn": 384,
        "theta": 1e6,
        "qk_norm": False,
    }
    assert shapes == {
        "emb": (220, 128),
        "nf": (128,),
        "blocks.3.n1": (128,),
        "blocks.3.n2": (128,),
        "blocks.3.wqkv": (256, 128),
        "blocks.3.wo": (128, 128),
        "blocks.3.w13": (768, 128),
        "blocks.3.w2": (128, 384),
    }
    layer = params["layers"][1]
    np.testing.assert_array_equal(wqkv[128:192], np.asarray(layer["k"].T, np.float16))
    np.testing.assert_array_equal(w13[384:], np.asarray(layer["up"].T, np.float16))


def test_schedule_is_that_of_the_recipe():
    steps = plan(SCHEDULE)
    peak = recall.PEAK_LEARNING_RATE
    tokens = np.cumsum([step.length * step.batch for step in steps])
    assert tokens[-1] == pytest.approx(3.6e6, rel=5e-3)
    assert [steps[i].batch for i in (0, 300, 600, 800, -1)] == [16, 8, 8, 4, 4]
    assert steps[0].learning_rate == pytest.approx(peak / 100)
    assert {step.learning_rate for step, seen in zip(steps, tokens, strict=True) if 3e5 < seen < 2.15e6} == {
        peak
    }
    rates = [step.learning_rate for step in steps]
    assert 0.03 * peak <= rates[-1] < 0.04 * peak and rates[-1] == min(rates[100:])


def plain_attention(q, k, v):
    scores = np.einsum("gth,sh->gts", q, k)
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("gts,sh->gth", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("length", [100, 1100])
def test_strip_attention_is_attention(rng, length):
    q, k, v = (rng.normal(size=shape) for shape in ((2, length, 8), (length, 8), (length, 8)))
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    out = jax.jit(recall._attend)((q32, k32, v32))
    np.testing.assert_allclose(out, plain_attention(q, k, v), atol=2e-5)


def test_gradient_agrees_with_differences(rng):
    params = circuit_init(jax.random.key(0), SIZE)
    tokens, weights, kinds = (jnp.asarray(x) for x in training_batch(rng, 2, 128))
    loss = jax.jit(lambda p: recall._loss(p, tokens, weights, kinds, SIZE)[0])
    gradient = jax.jit(jax.grad(loss))(params)
    along = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    h = 1e-3
    ahead, behind = (float(loss(jax.tree.map(lambda p, d, s=s: p + s * d, params, along))) for s in (h, -h))
    slope = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, along)), strict=True))
    assert (ahead - behind) / (2 * h) == pytest.approx(slope, rel=0.02)


def test_loss_counts_right_tokens_per_task(rng):
    params = circuit_init(jax.random.key(0), SIZE)
    tokens, weights, kinds = training_batch(rng, 2, 128)
    counts = jax.jit(lambda *batch: recall._loss(params, *batch, size=SIZE)[1])(tokens, weights, kinds)
    assert counts.shape == (1 + len(TASKS), 2)
    np.testing.assert_array_equal(counts[:, 1], np.bincount(kinds[:, 1:].ravel(), minlength=1 + len(TASKS)))
    assert (counts[:, 0] <= counts[:, 1]).all()


def test_command_line(tmp_path, capsys, monkeypatch):
    asked = {}
    monkeypatch.setattr(recall, "train", lambda out, **settings: asked.update(settings) or out)
    recall.main(["--out", str(tmp_path), "--seed", "4", "--schedule", "0.5:128:2048,0.1:256:1024"])
    assert asked == {"seed": 4, "schedule": [(0.5, 128, 2048), (0.1, 256, 1024)], "resume": True}
    recall.main(["--out", str(tmp_path), "--no-resume"])
    assert asked == {"seed": 0, "schedule": list(SCHEDULE), "resume": False}
    assert str(tmp_path) in capsys.readouterr().out


def test_command_line_errors(tmp_path, capsys):
    train(tmp_path, seed=0, schedule=(), size=SIZE)
    for wrong, said in [
        (["--seed", "1"], "holds a run with other settings"),
        (["--schedule", "1:2"], "million tokens:length:tokens per step"),
        (["--no-resume", "--schedule", "0.1:64:128"], "88 tokens or more, got length=64"),
    ]:
        with pytest.raises(SystemExit) as exit:
            recall.main(["--out", str(tmp_path), *wrong])
        assert exit.value.code == 2 and said in capsys.readouterr().err
