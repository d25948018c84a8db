"""A user says the mesh once: every verb takes it from the model, and answers as on one device."""

from io import StringIO

import jax
import numpy as np
import pytest
from rich.console import Console

import kvjax
from kvjax.io.checkpoint import save_checkpoint
from kvjax.models.params import Group
from tests.mesh.test_sharded import check_places, spread
from tests.methods.battery import BY_LABEL, MAIN, ROOM, model, off, positions


def same_weights(got, want):
    for mine, its in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))


@pytest.mark.rotating
def test_weights_are_read_where_their_axes_say_and_are_the_same(tmp_path):
    want = kvjax.load("recall-tiny")
    got = kvjax.load("recall-tiny", mesh="data=2,model=2", rules="tensor")
    same_weights(got, want)
    assert got.fingerprint == want.fingerprint
    layer = got.params["layers"][0]
    split = {name: x.sharding.spec for name, x in layer.items()}
    assert split["q"] == split["k"] == split["up"] == jax.P(None, None, "model")
    assert split["o"] == split["down"] == jax.P(None, "model") and split["attn_norm"] == jax.P()
    assert got.params["embed"].sharding.spec == jax.P("model")
    save_checkpoint(got, tmp_path / "mine")
    stacked = (Group(0, 2), Group(2, 2))
    again = kvjax.load(tmp_path / "mine", mesh="data=8", rules="fsdp", groups=stacked)
    assert again.params["layers"][1]["q"].sharding.spec == jax.P(None, "data")
    same_weights(again, kvjax.load(tmp_path / "mine", groups=stacked))
    with pytest.raises(kvjax.InputError, match="sharding= and mesh= both say where the weights go"):
        kvjax.load("recall-tiny", mesh="data=8", rules="fsdp", sharding=layer["q"].sharding)


@pytest.mark.rotating
def test_tokens_are_verified_and_taken_back_where_the_cache_lies():
    here, there = model("4/2"), spread("4/2", "tensor")
    tokens = np.random.default_rng(3).integers(0, here.config.vocab, (4, 3))
    (_, mine), (_, its) = (kvjax.prefill(m, MAIN.first, room=ROOM) for m in (here, there))
    (want, mine), (got, its) = kvjax.verify(here, mine, tokens), kvjax.verify(there, its, tokens)
    assert off(got, want) < 1e-5 and positions(its) == positions(mine)
    check_places(its)
    its, mine = kvjax.rollback(its, [2, 1, 0, 3]), kvjax.rollback(mine, [2, 1, 0, 3])
    assert positions(its) == positions(mine)
    check_places(its)
    check_places(kvjax.api.rows.reset_rows(its, [True, False, False, True]))


@pytest.mark.rotating
@pytest.mark.parametrize("layout", ["tensor", "batch"])
@pytest.mark.parametrize("label", ["quest", "adakv + quest", "reattention"])
def test_every_token_of_a_pass_picks_on_a_mesh_what_it_picks_on_one_device(label, layout):
    here, there, method = model("4/2"), spread("4/2", layout), BY_LABEL[label].method()
    tokens = np.random.default_rng(3).integers(0, here.config.vocab, (4, 3))
    each = [(m, kvjax.prefill(m, MAIN.first, method=method, room=ROOM)[1]) for m in (here, there)]
    (want, mine), (got, its) = (kvjax.verify(m, cache, tokens) for m, cache in each)
    assert off(got, want) < 1e-5 and positions(its) == positions(mine)
    check_places(its)


@pytest.mark.rotating
def test_weights_that_a_method_makes_lie_on_the_mesh_of_the_model():
    here, there = model("4/2"), spread("4/2", "tensor")
    method = kvjax.method("palu", rank=0.5, heads=1)
    want, mine = kvjax.prefill(here, MAIN.first, method=method, room=ROOM)
    got, its = kvjax.prefill(there, MAIN.first, method=method, room=ROOM)
    assert off(got, want) < 1e-5 and positions(its) == positions(mine)
    check_places(its)
    layer = kvjax.prepare(there, method).params["layers"][0]
    assert layer["k_down"].sharding.spec == jax.P(None, None, "model")


@pytest.mark.rotating
def test_a_comparison_on_a_mesh_is_that_on_one_device(tmp_path):
    asked = dict(methods=["h2o", "int8"], budgets=[0.5], tasks=["get"], samples=2, protocols=("agnostic",))
    quiet = dict(console=Console(file=StringIO(), width=140))
    models = kvjax.load("recall-tiny"), kvjax.load("recall-tiny", mesh="model=2", rules="tensor")
    runs = [kvjax.compare(model=m, **asked, **quiet, out=tmp_path / str(i)) for i, m in enumerate(models)]
    mine, its = ([{k: v for k, v in row.items() if k != "seconds"} for row in run.rows] for run in runs)
    by = lambda row: (row["method"], row["id"])  # noqa: E731
    assert sorted(mine, key=by) == sorted(its, key=by)
