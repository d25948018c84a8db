"""Training on a mesh: the losses of one device, on devices that hold what the rules say."""

import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import on_mesh
from kvjax.models.params import init
from kvjax.train import loop as loops
from kvjax.train.data.packing import PackedRows
from kvjax.train.loop import begin, in_parts, train
from kvjax.train.optimiser import optimiser
from kvjax.train.settings import training
from kvjax.train.step import make_step
from tests.sweep import sweep

MODEL = dict(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab=264, tied=False)
LOOP = dict(steps=4, batch=8, length=24, compute="float32", log_every=1, evaluate_every=4, evaluate_rows=3)
CASES = [
    ("batch", "data=8", "adamw", {}),
    ("fsdp", "data=8", "adamw", {}),
    ("fsdp", "data=4", "muon", {"mixer": {"word": "GatedDelta", "heads": 2, "key_dim": 8, "value_dim": 8}}),
    ("tensor", "data=2,model=2", "adamw", {}),
    ("expert", "data=2,expert=4", "adamw", {"mlp": {"word": "MoE", "experts": 4, "top": 2, "width": 8}}),
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i} of a text about {i * i}\n" for i in range(200)))
    return str(path)


def settings(text="", mesh=None, rules=None, model=None, name="adamw", tune=None, **more):
    data = dict(kind="text", files=[text], held_out=0.0) if text else {}
    bound = {"model": MODEL | (model or {}), "data": data, "train": LOOP | more, "tune": tune or {}}
    return training(
        bound | {"optimiser": {"warmup": 1, "name": name}, "devices": dict(mesh=mesh, rules=rules)}
    )


def two_steps(run):
    """Run two steps, the second in two parts; return their losses and the state behind them."""
    on, steps = on_mesh(run.devices.mesh, run.devices.rules), optimiser(run.optimiser, run.loop)
    state, fixed = begin(init(run.config, jax.random.key(0)), run, run.config, steps, on)
    step, losses, rng = make_step(run.config, run.loop, steps, on=on), [], np.random.default_rng(0)
    for parts in (1, 2):
        rows = PackedRows(
            rng.integers(0, 264, (16, 25)).astype(np.int32), np.ones((16, 25), np.float32), None
        )
        state, found = step(state, in_parts(rows, parts, on), fixed=fixed)
        losses.append(float(found.loss))
    return losses, state, on


@pytest.mark.parametrize(("rules", "mesh", "name", "model"), sweep(CASES, CASES[1]))
def test_a_step_on_a_mesh_is_that_of_one_device_and_holds_its_share(rules, mesh, name, model):
    want, alone, _ = two_steps(settings(model=model, name=name))
    got, state, on = two_steps(settings(mesh=mesh, rules=rules, model=model, name=name))
    np.testing.assert_allclose(got, want, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    if rules != "fsdp":
        return
    n = on.mesh.size
    for tree in (state.params, state.optimiser):
        # Short convolutions and norms are whole.
        split = [x for x in jax.tree.leaves(tree) if x.ndim > 2 and MODEL["d_model"] in x.shape]
        assert split and all(x.addressable_shards[0].data.size * n == x.size for x in split)


@pytest.mark.rotating
def test_adapters_learn_the_same_on_a_mesh():
    tune = {"lora": ["*.q"], "trained": ["layers.1.down"], "rank": 2}
    want, alone, _ = two_steps(settings(tune=tune))
    got, state, _ = two_steps(settings(mesh="data=8", rules="fsdp", tune=tune))
    np.testing.assert_allclose(got, want, rtol=2e-6)
    leaves = jax.tree.leaves(state.params)
    assert len(leaves) == 5
    for a, b in zip(leaves, jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.fixture
def cut_after(monkeypatch):
    """Cut runs behind so many steps."""

    def cut(count):
        def breaking(*args):
            step, done = make_step(*args), []

            def counted(state, parts, **given):
                done.append(1)
                if len(done) > count:
                    raise KeyboardInterrupt
                return step(state, parts, **given)

            return counted

        monkeypatch.setattr(loops, "make_step", breaking)

    yield cut
    monkeypatch.undo()


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.rotating
def test_a_run_goes_on_on_another_mesh(text, tmp_path, cut_after, monkeypatch):
    whole = train(settings(text), tmp_path / "whole")
    cut_after(2)
    with pytest.raises(KeyboardInterrupt):
        train(settings(text, "data=8", "fsdp", save_seconds=0.0), tmp_path / "cut")
    monkeypatch.undo()
    assert len(losses(tmp_path / "cut")) == 2
    moved = settings(text, "data=2,model=2", "tensor", save_seconds=0.0)
    resumed = train(moved, tmp_path / "cut", resume=True)
    np.testing.assert_allclose(losses(tmp_path / "cut"), losses(tmp_path / "whole"), rtol=1e-5)
    a, b = (kvjax.load(str(path)).params for path in (whole, resumed))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "rules", "message"),
    [
        ("data=3", "batch", "8 rows at a time, which do not divide over mesh axis data=3: give 9 rows"),
        ("data=16", "batch", "has 16 devices, and there are 8"),
        (None, "batch", "without a mesh"),
        ("data=2", "fspd", "no rules named 'fspd': did you mean fsdp"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_before_anything_is_written(text, tmp_path, mesh, rules, message):
    with pytest.raises(InputError, match=message):
        train(settings(text, mesh, rules), tmp_path / "run")
    assert not (tmp_path / "run").exists()
