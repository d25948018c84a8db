"""Which weights learn: frozen ones, adapters, and losses that read a teacher's layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.models.params import Group, init
from kvjax.models.placement import leaves
from kvjax.models.transformer import hidden
from kvjax.train import loop as loops
from kvjax.train.data.packing import PackedRows
from kvjax.train.loop import begin, in_parts, train
from kvjax.train.optimiser import optimiser
from kvjax.train.settings import training
from kvjax.train.step import BatchParts, Companions, Frozen, learned_loss, make_step
from kvjax.train.trained import groups_of, joined, kinds

MODEL = dict(layers=3, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=24, vocab=264)
LOOP = dict(steps=4, batch=4, length=16, compute="float32", log_every=1, evaluate_every=4)


def settings(tune=None, name="adamw", data=None, **loop):
    bound = {"model": MODEL, "train": LOOP | loop, "tune": tune or {}, "data": data or {}}
    return training(bound | {"optimiser": {"warmup": 0, "peak": 0.01, "name": name}})


def after_steps(run, count=2):
    """Return (the parameters before, behind some steps, the first loss, the state)."""
    steps, rng = optimiser(run.optimiser, run.loop), np.random.default_rng(0)
    params = init(run.config, jax.random.key(0))
    state, fixed = begin(jax.tree.map(jnp.copy, params), run, run.config, steps, None)
    step, losses = make_step(run.config, run.loop, steps), []
    for _ in range(count):
        rows = PackedRows(rng.integers(0, 264, (4, 17)).astype(np.int32), np.ones((4, 17), np.float32), None)
        state, found = step(state, in_parts(rows, 1), fixed=fixed)
        losses.append(float(found.loss))
    return params, joined(state.params, fixed), losses, state


def changed(before, after):
    """Names of the parameters that differ."""
    found = dict(leaves(after))
    return {name for name, x in leaves(before) if not np.array_equal(x, found[name])}


def test_what_is_frozen_stays_bit_for_bit_and_all_else_learns():
    before, after, _, state = after_steps(settings({"frozen": ["embed", "layers.0.*", "*.mlp_norm"]}))
    want = {name for name, _ in leaves(before) if name[:8] not in ("embed", "layers.0")}
    assert changed(before, after) == {name for name in want if not name.endswith("mlp_norm")}
    assert len(jax.tree.leaves(state.params)) == len(changed(before, after))


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.rotating)])
def test_adapters_add_a_low_rank_to_their_matrices_and_start_as_no_change(name):
    tune = {"lora": ["*.q", "*.down"], "trained": ["norm"], "rank": 3, "alpha": 6.0}
    before, after, losses, state = after_steps(settings(tune, name))
    assert losses[0] == pytest.approx(after_steps(settings(), 1)[2][0], rel=1e-6)
    assert changed(before, after) == {"norm", *(f"layers.{i}.{n}" for i in range(3) for n in ("q", "down"))}
    for i, (old, new) in enumerate(zip(before["layers"], after["layers"], strict=True)):
        adapter = state.params["layers"][i]["q"]
        product = np.asarray(adapter.down, np.float64) @ np.asarray(adapter.up, np.float64)
        np.testing.assert_allclose(new["q"], old["q"] + 2 * product, atol=1e-6)
        assert np.linalg.matrix_rank(product[0]) == 3


def test_names_choose_layers_and_stacked_layers_learn_alike(monkeypatch):
    config = settings().config
    of = kinds(config, settings({"trained": ["layers.2.*"]}).tune)
    assert {n for n, kind in of.items() if kind == "trained"} == {n for n in of if n.startswith("layers.2.")}
    deep = dataclasses.replace(config, layers=6)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    of = kinds(deep, settings({"lora": ["layers.[45].q"]}).tune)
    assert groups_of(deep, of) == (Group(0, 2), Group(2, 2), Group(4, 2))


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"frozen": ["layer.0.q"]}, "tune.frozen: no parameter is called 'layer.0.q': names read like"),
        ({"frozen": ["*"]}, "tune leaves nothing that learns"),
        ({"lora": ["*_norm"]}, "tune.lora names layers.0.*_norm, which is no matrix of a layer"),
        ({"lora": ["embed"]}, "tune.lora names embed"),
    ],
)
def test_names_that_choose_nothing_are_refused(tune, message):
    run = settings(tune)
    with pytest.raises(InputError, match=message):
        kinds(run.config, run.tune)


@pytest.mark.rotating
def test_a_run_of_adapters_goes_on_and_ends_as_an_ordinary_model(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text("".join(f"line {i} of a text about {i * i}\n" for i in range(200)))
    data = dict(kind="text", files=[str(text)], held_out=0.0)
    run = settings({"lora": ["*.v"]}, data=data, save_seconds=0.0)
    whole = train(run, tmp_path / "whole")

    def breaking(*args):
        step, done = make_step(*args), []

        def counted(state, parts, **given):
            done.append(1)
            if len(done) == 3:
                raise KeyboardInterrupt
            return step(state, parts, **given)

        return counted

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loops, "make_step", breaking)
        train(run, tmp_path / "cut")
    resumed = train(run, tmp_path / "cut", resume=True)
    a, b = (kvjax.load(str(path)).params for path in (whole, resumed))
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert changed(init(run.config, jax.random.key(0)), a) == {f"layers.{i}.v" for i in range(3)}


@pytest.mark.rotating
def test_a_run_learns_from_a_teachers_hidden_states_and_attention_outputs():
    run = settings()
    config = run.config
    deep = dataclasses.replace(config, layers=6)
    student, teacher = init(config, jax.random.key(1)), init(deep, jax.random.key(2))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 264, (2, 17)), jnp.int32)
    weights = jnp.asarray(rng.random((2, 17)), jnp.float32)

    def states(params, config):
        """Compute the hidden states before and after every layer, and after its attention alone."""
        behind, attended = [params["embed"][tokens[:, :-1]]], []
        for n in range(1, config.layers + 1):
            part, cut = {**params, "layers": params["layers"][:n]}, dataclasses.replace(config, layers=n)
            behind.append(hidden(part, tokens[:, :-1], cut))
            last = params["layers"][n - 1]
            still = {**last, "down": jnp.zeros_like(last["down"])}
            part = {**part, "layers": (*params["layers"][: n - 1], still)}
            attended.append(hidden(part, tokens[:, :-1], cut))
        added = [np.asarray(a, np.float64) - b for a, b in zip(attended, behind, strict=False)]
        return [np.asarray(x, np.float64) for x in behind[1:]], added

    (mine, my_added), (theirs, their_added) = states(student, config), states(teacher, deep)

    def apart(a, b):
        b = b[1::2]  # layer i of three learns from layer 2 i + 1 of six
        return np.mean(
            [(np.square(x - y).mean(-1) * weights[:, 1:]).sum() for x, y in zip(a, b, strict=True)]
        )

    part = BatchParts(tokens, weights, None)
    for names, want in (
        ({"distil_hidden": 2.0}, 2 * apart(mine, theirs)),
        ({"distil_attention": 0.5}, 0.5 * apart(my_added, their_added)),
    ):
        plain, asked = (dataclasses.replace(run.loop, distil=0.0, **more) for more in ({}, names))
        given = (part, config)
        base = learned_loss(student, *given, plain, Companions(Frozen(teacher, deep)))
        found = learned_loss(student, *given, asked, Companions(Frozen(teacher, deep)))
        assert float(found - base) == pytest.approx(want, rel=1e-4)


@pytest.mark.rotating
def test_a_teacher_of_another_width_teaches_no_hidden_states(tmp_path):
    first = train(settings(steps=1, length=96, data={"kind": "recall"}), tmp_path / "first")
    wide = training(
        {
            "model": MODEL | dict(d_model=32, teacher=str(first)),
            "data": {"kind": "recall"},
            "train": LOOP | dict(distil_hidden=1.0, length=96),
        }
    )
    with pytest.raises(InputError, match="has 16 channels and the model 32: set train.distil_hidden"):
        train(wide, tmp_path / "second")
    assert not (tmp_path / "second").exists()
