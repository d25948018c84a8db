"""The training loop: what a step computes, what a restart goes on from, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import save_checkpoint
from kvjax.io.gin_bindings import load_training
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import forward
from kvjax.train import loop as loops
from kvjax.train.data.packing import PackedRows, StreamPosition
from kvjax.train.data.sources import RecallSource, source_of, words_of
from kvjax.train.loop import in_parts, train
from kvjax.train.optimiser import optimiser, rate_of
from kvjax.train.recall_init import CONFIG
from kvjax.train.settings import Data, Loop, training
from kvjax.train.step import BatchParts, Companions, Frozen, TrainState, fault, learned_loss, make_step
from kvjax.train.trained import check_finite

MODEL = dict(layers=2, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=24)
CIRCUIT = dict(d_model=64, mixer={"word": "Attention", "gate": True})
LOOP = dict(steps=5, batch=4, length=24, compute="float32", log_every=1, evaluate_every=5, evaluate_rows=4)


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for i in range(12):
        paths.append(tmp_path / f"{i}.txt")
        words = rng.choice(["the cat ", "sat on ", "a mat, ", "é ", "and ran.\n"], 40)
        paths[-1].write_text("".join(words), encoding="utf-8")
    return [str(p) for p in paths]


def settings(texts, data=None, model=None, **loop):
    data = dict(kind="text", files=texts, held_out=0.3) | (data or {})
    bound = {"model": MODEL | (model or {}), "data": data, "train": LOOP | loop}
    return training(bound | {"optimiser": {"warmup": 2}}, vocab=257)


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [record["loss"] for record in log_of(folder)]


@pytest.mark.rotating
def test_a_run_that_was_cut_goes_on_to_the_same_losses_and_weights(texts, tmp_path, monkeypatch):
    run = settings(texts, save_seconds=0.0)
    whole = train(run, tmp_path / "whole")
    made, steps = loops.make_step, []

    def breaking(*args):
        step = made(*args)

        def cut(state, parts, **given):
            steps.append(1)
            if len(steps) == 4:
                raise KeyboardInterrupt
            return step(state, parts, **given)

        return cut

    with monkeypatch.context() as patch:
        patch.setattr(loops, "make_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path / "cut")
    assert not (tmp_path / "cut" / "model").exists() and len(losses(tmp_path / "cut")) == 3
    resumed = train(run, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    a, b = (kvjax.load(str(path)).params for path in (whole, resumed))
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    last = log_of(tmp_path / "whole")[-1]
    assert last["bits_per_byte"] == pytest.approx(last["held_out_loss"] / np.log(2), rel=1e-4)
    assert (tmp_path / "whole" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.rotating
def test_stages_read_longer_rows_one_after_the_other_and_go_on_from_any_step(texts, tmp_path, monkeypatch):
    run = settings(texts, stages=[(2, 12, 4), (3, 24, 2)], save_seconds=0.0)
    assert (run.loop.steps, run.loop.length, run.loop.batch) == (5, 24, 4)
    whole = train(run, tmp_path / "whole")
    assert [record["tokens"] for record in log_of(tmp_path / "whole")] == [48, 96, 144, 192, 240]
    made, sizes = loops.make_step, []

    def breaking(*args):
        step = made(*args)

        def cut(state, parts, **given):
            sizes.append(parts.tokens.shape)
            if len(sizes) == 4:
                raise KeyboardInterrupt
            return step(state, parts, **given)

        return cut

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loops, "make_step", breaking)
        train(run, tmp_path / "cut")
    assert sizes == [(1, 4, 13), (1, 4, 13), (1, 2, 25), (1, 2, 25)]
    resumed = train(run, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    a, b = (kvjax.load(str(path)).params["embed"] for path in (whole, resumed))
    assert np.array_equal(a, b)


def test_the_shipped_models_settings_are_its_recipe():
    run = training(load_training("recall-tiny"), vocab=220)
    assert run.config == CONFIG and run.init == "circuit"
    assert run.loop.tokens(run.loop.steps) == pytest.approx(3.6e6, rel=5e-3)
    rates = np.asarray(jax.jit(jax.vmap(rate_of(run.optimiser, run.loop)))(jnp.arange(1040)))
    found = rates[[0, 99, 100, 700, 1039]] / 1.5e-3
    assert found == pytest.approx([0, 0.99, 1, 1, 0.03], abs=1e-3)
    # Three fifths of all tokens are read before the rate falls.
    first = next(step for step in range(101, 1039) if rates[step] < 1.49e-3)
    assert run.loop.tokens(first) / run.loop.tokens(1039) == pytest.approx(0.6, abs=0.01)
    rows = RecallSource(seed=3).next(2, 96)
    assert rows.tokens.shape == rows.weights.shape == (2, 97)


def test_rows_of_pairs_go_on_from_a_place():
    data, loop = Data(kind="pairs"), Loop(length=16)
    words = words_of(data)
    source, held = source_of(data, words, loop, segments=True)
    first, second = source.next(2, 16), source.next(2, 16)
    assert held is None and first.segments is None and (first.tokens != second.tokens).any()
    other, _ = source_of(data, words, loop, segments=True, place=StreamPosition(reading=1))
    np.testing.assert_array_equal(other.next(2, 16).tokens, second.tokens)
    assert first.tokens.max() < words.vocab and set(np.unique(first.weights)) == {0.0, 1.0}


@pytest.mark.rotating
def test_a_step_in_parts_is_the_step_of_all_rows_by_their_weighted_mean(texts):
    run = settings(texts)
    config, rng = run.config, np.random.default_rng(0)
    tokens = rng.integers(0, 256, (4, 25)).astype(np.int32)
    # Parts of unequal weight: a mean of means would differ.
    weights = (rng.random((4, 25)) < np.asarray([[0.9], [0.9], [0.1], [0.1]])).astype(np.float32)
    params, steps = init(config, jax.random.key(0)), optimiser(run.optimiser, run.loop)
    found = []
    for parts in (1, 2):
        state = TrainState(jax.tree.map(jnp.copy, params), steps.init(params), jnp.zeros((), jnp.int32))
        step = make_step(config, run.loop, steps)
        found.append(step(state, in_parts(PackedRows(tokens, weights, None), parts)))
    (one, of_one), (two, of_two) = found
    logits = np.asarray(forward(params, jnp.asarray(tokens[:, :-1]), config), np.float64)
    picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    each = np.log(np.exp(logits).sum(-1)) - picked
    assert float(of_one.loss) == pytest.approx((each * weights[:, 1:]).sum() / weights[:, 1:].sum(), rel=1e-5)
    assert float(of_two.loss) == pytest.approx(float(of_one.loss), rel=1e-6)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.rotating
def test_a_loss_that_is_no_number_changes_no_weight_and_the_layer_is_named(texts, tmp_path, monkeypatch):
    run = settings(texts, save_seconds=0.0)
    params = init(run.config, jax.random.key(0))
    params["layers"][1]["v"] = params["layers"][1]["v"].at[0, 0, 0].set(jnp.inf)
    rows = PackedRows(np.zeros((4, 25), np.int32), np.ones((4, 25), np.float32), None)
    steps = optimiser(run.optimiser, run.loop)
    state = TrainState(jax.tree.map(jnp.copy, params), steps.init(params), jnp.zeros((), jnp.int32))
    new, found = make_step(run.config, run.loop, steps)(state, in_parts(rows, 1))
    assert not bool(found.finite) and int(new.step) == 0
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(params), strict=True)
    )
    assert fault(new.params, in_parts(rows, 1), run.config, run.loop) == "the output of layer 1"
    monkeypatch.setattr(loops, "init", lambda *_: params)
    with pytest.raises(InputError, match="step 1: the output of layer 1 is not a number"):
        train(run, tmp_path / "run")


@pytest.mark.rotating
def test_weights_that_are_no_numbers_are_never_taken_or_saved(texts, tmp_path):
    run = settings(texts)
    params, rule = init(run.config, jax.random.key(0)), optax.adam(1e-3, b1=1.0)  # its mean is 0 / 0
    state = TrainState(jax.tree.map(jnp.copy, params), rule.init(params), jnp.zeros((), jnp.int32))
    rows = in_parts(PackedRows(np.zeros((4, 25), np.int32), np.ones((4, 25), np.float32), None), 1)
    new, found = make_step(run.config, run.loop, rule)(state, rows)
    assert np.isfinite([found.loss, found.norm]).all() and not bool(found.finite) and int(new.step) == 0
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), new.params, params)
    assert all(jax.tree.leaves(same))
    assert "a weight that the optimiser made" in fault(params, rows, run.config, run.loop)
    # A table of which the texts use a part alone.
    params = init(run.config, jax.random.key(0))
    params["embed"] = params["embed"].at[255].set(jnp.nan)
    with pytest.raises(InputError, match="^mine has weights that are NaN or infinite: embed$"):
        check_finite(params, "mine")
    check_finite(init(run.config, jax.random.key(0)), "mine")
    save_checkpoint(Model(run.config, params, tokenizer=words_of(run.data).tokenizer), tmp_path / "nan")
    bound = {
        "model": {"start": str(tmp_path / "nan")},
        "data": {"kind": "text", "files": texts},
        "train": LOOP,
    }
    with pytest.raises(InputError, match="to start from has weights that are NaN or infinite: embed"):
        train(training(bound), tmp_path / "more")
    assert not (tmp_path / "more").exists()


@pytest.mark.rotating
def test_a_run_starts_from_a_model_and_ends_as_one_that_answers(texts, tmp_path):
    first = train(settings(texts, steps=1), tmp_path / "first")
    bound = {
        "model": {"start": str(first)},
        "data": {"kind": "text", "files": texts},
        "train": LOOP | {"steps": 1},
    }
    second = train(training(bound), tmp_path / "second")
    model = kvjax.load(str(second))
    ids = model.tokenizer.encode("the é").ids
    assert ids == list("the é".encode())
    out = kvjax.generate(model, [ids], max_new_tokens=2)
    assert out.tokens.shape == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model={"laeyrs": 2}), "unknown setting of model 'laeyrs': did you mean layers"),
        (dict(stesp=3), "unknown setting of train 'stesp': did you mean steps"),
        (dict(batch=3, accumulate=2), "train.batch is 3 rows and train.accumulate 2 parts"),
        (dict(compute="float16"), "train.compute is 'float16', expected one of .bfloat16., .float32."),
        (dict(data={"kind": "jsno"}), "data.kind is 'jsno'.*did you mean 'json'"),
        (dict(data={"files": []}), "data.files names no file"),
        (dict(model={"mixer": {"word": "Atention"}}), "'Atention' is no mixer.*nearest is Attention"),
        (dict(stages=[(1, 2)]), "expected a list of .steps, length, batch"),
        (dict(stages=[(1, 0, 2)]), "length of train.stages is 0"),
        (dict(model={"init": "circiut"}), "model.init is 'circiut'.*did you mean 'circuit'"),
        (dict(steps=0), "train.steps is 0, expected a whole number >= 1"),
        (dict(seed=-1), "train.seed is -1, expected a whole number from 0 to"),
        (dict(data={"seed": -1}), "data.seed is -1, expected a whole number from 0 to"),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(texts, change, message):
    with pytest.raises(InputError, match=message):
        settings(texts, **change)


@pytest.mark.rotating
def test_what_does_not_fit_is_refused_before_anything_is_written(texts, tmp_path):
    out = tmp_path / "run"
    missing, empty, broken = (tmp_path / name for name in ("missing.txt", "empty.txt", "broken.txt"))
    empty.write_bytes(b"")
    broken.write_bytes(b"good\n" + "caf\xe9".encode("latin-1") + b"\n")
    pairs = {"kind": "pairs", "files": []}
    cases = [
        (settings([str(missing)]), "there is no file"),
        (settings([str(empty)]), "is empty"),
        (settings([str(tmp_path / "*.text")]), "the pattern .*text', which matches no file"),
        (settings([str(broken)]), "broken.txt, line 2 is not UTF-8"),
        (settings(texts, length=9000), "train.length is 9000, and the model has 8192 positions"),
        (settings(texts, data=pairs, stages=[(1, 16, 2), (1, 30, 2)]), "1 to 64 pairs, got length=30"),
        (settings(texts, model={"vocab": 100}), "the tokenizer has 257 ids and the model 100"),
        (settings(texts, data={"held_out": 0.3}, length=5000), "fewer than one row of 5000"),
        (settings(texts, model={"init": "circuit", "tied": True}), "model.init is 'circuit'.*head_dim"),
        (settings(texts, model={"init": "circuit", **CIRCUIT}), "plain attention.*tied embeddings"),
    ]
    for run, message in cases:
        with pytest.raises(InputError, match=message):
            train(run, out)
        assert not out.exists()
    train(settings(texts, steps=1), out)
    with pytest.raises(InputError, match="holds a run: go on with it by --resume"):
        train(settings(texts, steps=1), out)
    with pytest.raises(InputError, match="other settings"):
        train(settings(texts, steps=2), out, resume=True)


@pytest.mark.rotating
def test_a_run_learns_from_a_teacher_as_much_as_it_is_told(texts, tmp_path):
    run = settings(texts)
    teacher, student = (init(run.config, jax.random.key(i)) for i in (1, 2))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 25)).astype(np.int32)
    part = BatchParts(jnp.asarray(tokens), jnp.ones((2, 25), jnp.float32), None)
    a, b = (np.asarray(forward(p, part.tokens[:, :-1], run.config), np.float64) for p in (teacher, student))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    divergence = (p * np.log(p / q)).sum()
    of_text = -np.log(np.take_along_axis(q, tokens[:, 1:, None], -1)).sum()
    for share in (0.0, 0.3, 1.0):
        loop = dataclasses.replace(run.loop, distil=share)
        found = learned_loss(student, part, run.config, loop, Companions(Frozen(teacher, run.config)))
        assert float(found) == pytest.approx((1 - share) * of_text + share * divergence, rel=1e-5)
    other = settings(texts, model={"vocab": 300}, steps=1)
    first = train(settings(texts, steps=1), tmp_path / "first")
    with pytest.raises(InputError, match="is no decoder of 300 ids"):
        train(dataclasses.replace(other, teacher=str(first)), tmp_path / "other")
    taught = dataclasses.replace(settings(texts, steps=1), teacher=str(first))
    train(taught, tmp_path / "taught")
    assert losses(tmp_path / "taught") != losses(tmp_path / "first")
