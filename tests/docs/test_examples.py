"""The examples of docs/examples run, and compute what they say."""

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.keep.scores.geometry import KeyDistinctness
from kvjax.methods import keydiff
from kvjax.methods.parse import parse_method
from kvjax.methods.user import from_file
from kvjax.models.config import Config
from kvjax.models.config_json import config_from_json, config_to_json
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.state.cache import Slots
from kvjax.state.codes import encode
from tests.methods.battery import MAIN, model, positions

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "examples" / "keydiff.py"
KEYDIFF = f"{FILE}:keydiff"


def test_the_example_of_a_method_is_what_the_library_has():
    for piece in (KeyDistinctness, keydiff):
        assert inspect.getsource(piece) in FILE.read_text()


@pytest.mark.rotating
def test_keydiff_chains_with_a_store_from_one_text():
    label, build = parse_method(f"{KEYDIFF} + int8")
    assert label.endswith("keydiff.py:keydiff + int8")
    plain, chained = (
        kvjax.prefill(model("4/2"), MAIN.first, method=method, room=8)[1]
        for method in (from_file(KEYDIFF, budget=0.5), build(0.5))
    )
    assert positions(chained) == positions(plain)
    assert kvjax.nbytes(chained) < kvjax.nbytes(plain)


@pytest.mark.rotating
def test_a_codec_of_ones_own_halves_float32_and_answers_within_float16():
    own = ROOT / "docs" / "examples" / "codec_and_read.py"
    full, cache = kvjax.prefill(model("4/2"), MAIN.first, room=8)
    logits, coded = kvjax.prefill(model("4/2"), MAIN.first, method=f"{own}:float16", room=8)
    pos = sum(x.nbytes for x in jax.tree.leaves(cache) if x.dtype == np.int32)
    assert 2 * (kvjax.nbytes(coded) - pos) == kvjax.nbytes(cache) - pos
    token = np.ones(len(MAIN.first), np.int32)
    full, logits = (kvjax.step(model("4/2"), c, token)[0] for c in (cache, coded))
    np.testing.assert_allclose(logits, full, atol=5e-3)


def test_a_read_of_ones_own_attends_to_the_largest_products_of_decoded_keys(rng):
    own = str(ROOT / "docs" / "examples" / "codec_and_read.py")
    read = from_file(f"{own}:largest", budget=3).read
    codec = from_file(f"{own}:float16").store.keys
    q, k = rng.normal(size=(1, 4, 1, 8)), rng.normal(size=(2, 1, 2, 9, 8)).astype(np.float16)
    pos = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 1, 2, 9))
    body = Slots(encode(jnp.asarray(k, jnp.float32), codec), None, pos)
    slots, count = read.select(jnp.asarray(q, jnp.float32), body, 1, jnp.asarray([9]))
    scores = np.einsum("kgh,ksh->ks", q.reshape(2, 2, 8), k[1, 0].astype(np.float64))
    for head in range(2):
        assert set(slots[0, head, : count[0, head]].tolist()) == set(np.argsort(-scores[head])[:3].tolist())


@pytest.mark.rotating
def test_the_architecture_of_the_page_decodes_what_it_computes(rng):
    spec = importlib.util.spec_from_file_location("hgrn2_example", ROOT / "docs" / "examples" / "hgrn2.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    config = Config(40, 16, 2, 4, 2, 8, 24, mixers=(example.Hgrn2(2, 6, 5),) * 2)
    layered = Model(config, init(config, jax.random.key(0)))
    tokens = rng.integers(0, 40, (2, 9))
    whole = layered(tokens)
    logits, cache = kvjax.prefill(layered, tokens[:, :8], room=2)
    np.testing.assert_allclose(logits, whole[:, 7], atol=1e-5)
    np.testing.assert_allclose(kvjax.step(layered, cache, tokens[:, 8])[0], whole[:, 8], atol=1e-5)
    assert kvjax.nbytes(cache.groups) == 2 * 2 * (2 * 6 * 5) * 4
    assert config_from_json(config_to_json(config)) == config
    forget = kvjax.spread(layered, "model=2", "tensor").params["layers"][0]["forget"]
    assert forget.sharding.spec == jax.P(None, None, "model")


@pytest.mark.rotating
def test_the_page_of_many_devices_runs_and_draws_who_holds_what(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    page = (ROOT / "docs" / "tutorials" / "many-devices.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(compile(block, "many-devices.md", "exec"), {})
    drawn = capsys.readouterr().out
    assert "rows over data=4, KV heads over model=2" in drawn and "rows 3  device 6    device 7" in drawn
