"""Rules for a mesh: what they refuse and why, what they make of arrays, and what people are shown."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import AXES, PRESETS, Rules, as_rules
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=4, kv_heads=2, head_dim=4, d_ff=24)


def on(rules, **sizes):
    return OnMesh(AbstractMesh(tuple(sizes.values()), tuple(sizes)), as_rules(rules, tuple(sizes)))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Rules(batch="x", kv_heads="x"), "batch and kv_heads are both split over mesh axis 'x'"),
        (lambda: Rules(embed="x", mlp=("y", "x")), "embed and mlp are both split over mesh axis 'x'"),
        (lambda: Rules(experts="x", mlp="x"), "experts and mlp are both split"),
        (lambda: Rules(layers="x", vocab="x"), "layers and vocab are both split"),
        (lambda: Rules(heads=("x", "x")), "expected the name of a mesh axis, a tuple of different names"),
        (lambda: Rules(heads=4), "heads is 4, expected the name of a mesh axis"),
        (lambda: Rules().but(kvheads="x"), "no axis 'kvheads': did you mean kv_heads"),
        (lambda: Rules.named("tensr"), "no rules named 'tensr': did you mean tensor"),
        (lambda: as_rules("tensor", ("data",)), "the mesh has data: give the mesh an axis 'model'"),
        (lambda: as_rules(Rules(slots="z"), ("x", "y")), "over mesh axis 'z', and the mesh has x, y"),
        (lambda: as_rules(3, ("x",)), "rules is 3, expected a kvjax.Rules or one of single, batch"),
        (lambda: as_mesh("data=2,model"), "expected names and sizes as in data=2,model=4"),
        (lambda: as_mesh("data=2,data=4"), "each name once"),
        (lambda: as_mesh("data=16"), "has 16 devices, and there are 8"),
        (lambda: as_mesh(8), "mesh is 8, expected a jax.sharding.Mesh"),
        (lambda: kvjax.load("recall-tiny", mesh="data=2"), "mesh= was given without rules"),
        (lambda: kvjax.load("recall-tiny", rules="batch"), "rules='batch' was given without a mesh"),
    ],
)
def test_what_cannot_be_is_refused_with_the_axis_the_sizes_and_what_would_do(make, words):
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)


def test_fewer_kv_heads_than_devices_are_on_all_of_them():
    few = Model(CONFIG, init(CONFIG, jax.random.key(0)))
    params = kvjax.spread(few, "model=4", "tensor").params["layers"][0]
    assert params["k"].sharding.is_fully_replicated and not params["q"].sharding.is_fully_replicated


ODD = Config(**vars(CONFIG) | dict(vocab=33, heads=9, kv_heads=3))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "method",
    [
        None,
        kvjax.method("h2o", budget=8),
        pytest.param(kvjax.method("kivi", bits=4, group=4, residual=8), marks=pytest.mark.rotating),
        pytest.param(kvjax.method("adakv", budget=0.5, window=2), marks=pytest.mark.rotating),
    ],
)
@pytest.mark.parametrize("heads", [(9, 3), pytest.param((6, 3), marks=pytest.mark.rotating)])
def test_heads_and_vocabulary_that_do_not_divide_stay_whole_and_compute_the_same(method, heads):
    config = Config(**vars(ODD) | dict(heads=heads[0], kv_heads=heads[1]))
    model = Model(config, init(config, jax.random.key(0)))
    with pytest.warns(
        UserWarning, match="33 tokens of the vocabulary of embed and 1 more do not divide over"
    ):
        split = kvjax.spread(model, "model=2", "tensor")
    assert split.params["embed"].sharding.is_fully_replicated
    assert not split.params["layers"][0]["up"].sharding.is_fully_replicated
    tokens = np.random.default_rng(0).integers(0, 33, (2, 20))
    logits, cache = kvjax.prefill(model, tokens, method=method, room=4)
    apart, spread = kvjax.prefill(split, tokens, method=method, room=4)
    for token in ([1, 2], [3, 4]):
        np.testing.assert_allclose(apart, logits, rtol=1e-4, atol=1e-4)
        logits, cache = kvjax.step(model, cache, token)
        apart, spread = kvjax.step(split, spread, token)
    np.testing.assert_allclose(apart, logits, rtol=1e-4, atol=1e-4)


def test_what_stays_whole_is_named_with_the_devices_that_would_split_it(capsys):
    with pytest.warns(UserWarning) as caught:
        kvjax.load("recall-tiny", mesh="model=8", rules=Rules(heads="model", vocab="model"))
    (text,) = [str(one.message) for one in caught]
    assert "4 heads of layers.0.q and 7 more do not divide over mesh axis model=8" in text
    assert "every device holds them whole; 2 or 4 devices would split them" in text
    assert "220 tokens of the vocabulary of embed do not divide over mesh axis model=8" in text
    assert main(["inspect", "recall-tiny", "--mesh", "model=3", "--context", "64"]) == 0
    assert (
        "220 tokens of the vocabulary of embed do not divide over mesh axis model=3"
        in capsys.readouterr().out
    )


def test_rules_split_an_axis_where_it_divides_and_a_mesh_axis_splits_an_array_once():
    rules = Rules(batch=("a", "b"), kv_heads="c", slots="c")
    there = on(rules, a=2, b=3, c=4)
    axes = ("layers", "batch", "kv_heads", "slots", None)
    assert there.devices("batch") == 6 and there.devices("embed") == 1
    assert there.spec(axes, (1, 6, 4, 8, 5)) == jax.P(None, ("a", "b"), "c")
    assert there.spec(axes, (1, 6, 2, 8, 5)) == jax.P(None, ("a", "b"), None, "c")
    assert there.spec(axes, (1, 5, 2, 7, 5)) == jax.P()


def test_presets_split_rows_where_the_mesh_has_an_axis_for_them():
    assert (
        as_rules("tensor", ("model",)).batch is None and as_rules("tensor", ("data", "model")).batch == "data"
    )
    assert as_rules("single", ("data",)) == Rules()
    with pytest.raises(InputError, match="batch is split over mesh axis 'data'"):
        as_rules("batch", ("model",))
    assert {axis for rules in PRESETS.values() for axis, _ in rules.used()} == {*AXES} - {"pages", "layers"}


def test_a_mesh_of_explicit_axes_is_taken_with_automatic_ones():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,))
    assert as_mesh(mesh).axis_types == (AxisType.Auto,) and as_mesh(mesh) == as_mesh("data=8")


@pytest.mark.rotating
def test_shardings_say_who_holds_what_in_bytes_that_add_up(capsys):
    model = kvjax.spread(Model(CONFIG, init(CONFIG, jax.random.key(0))), "data=2,model=2", "tensor")
    _, cache = kvjax.prefill(
        model, [[1] * 20, [2] * 9], room=4, method=kvjax.method("adakv", budget=0.5, window=2)
    )
    held = kvjax.shardings(cache)
    assert sum(part.nbytes for part in held.parts) == kvjax.nbytes(cache)
    for device in as_mesh("data=2,model=2").devices.flat:
        mine = [
            s.data.nbytes for x in jax.tree.leaves(cache) for s in x.addressable_shards if s.device == device
        ]
        assert sum(mine) == held.per_device
    text = str(held)
    assert "one pool for KV heads of unequal lengths: every device holds it" in text
    assert "rows over data=2, KV heads over model=2" in text


def test_inspect_draws_a_mesh_whose_devices_are_not_there(capsys):
    assert main(["inspect", "recall-tiny", "--mesh", "data=16,model=4", "--context", "4096"]) == 2
    assert "--context is 4096" in capsys.readouterr().err
    assert main(["inspect", "recall-tiny", "--mesh", "data=16,model=2", "--context", "64"]) == 0
    text = capsys.readouterr().out
    assert "32 devices: data=16, model=2" in text and "16 rows of 64 tokens" in text
    # 4 layers x 64 slots x (32 + 32 + 1) numbers of 4 bytes, and the next position: of one row and head.
    assert f"{(4 * 64 * (2 * 32 + 1) * 4 + 4) / 1024:.1f} KiB" in text
    assert "rows 15  device 30   device 31" in text
    assert main(["inspect", "recall-tiny", "--mesh", "model=8", "--rules", "expert"]) == 2


def test_rows_that_do_not_divide_are_refused_before_anything_runs():
    model = kvjax.spread(Model(CONFIG, init(CONFIG, jax.random.key(0))), "data=4", "batch")
    with pytest.raises(
        InputError, match="3 rows do not divide over mesh axis data=4: give 4 rows or another"
    ):
        kvjax.prefill(model, np.zeros((3, 5), np.int32))
