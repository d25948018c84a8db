"""`kvjax inspect`: sizes are those of the real prefill, and need no weights."""

import dataclasses
import inspect
import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import kvjax
from kvjax import steps
from kvjax.commands.inspect_model import acts_on, find_config, model_rows
from kvjax.commands.main import main
from kvjax.grammar.fitted import fitted_words
from kvjax.io.checkpoint import save_checkpoint
from kvjax.io.load import SHIPPED
from kvjax.make.clustered_heads import ClusteredHeads
from kvjax.make.eigen_heads import EigenHeads
from kvjax.make.hidden_cache import HiddenStateCache
from kvjax.make.shared_layers import SharedLayers
from kvjax.methods import METHODS, method
from kvjax.models.config import Config
from kvjax.models.hf_config import config_from_hf
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.plan.cache_sizes import CacheSizes
from kvjax.plan.named import named
from kvjax.state.cache import nbytes
from kvjax.steps import Run
from tests.models import architectures
from tests.models.conversation import parameters
from tests.models.hf_cases import CASES

CONFIG = Config(
    vocab=32, d_model=16, layers=3, heads=4, kv_heads=2, head_dim=32, d_ff=32, windows=(None, 8, None)
)


# The others' caches are laid out as one of these.
LAYOUTS = ("full", "pyramidkv", "adakv", "keepkv", "kivi", "quest")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "id", [pytest.param(n, marks=[] if n in LAYOUTS else [pytest.mark.rotating]) for n in METHODS]
)
def test_sizes_are_those_of_the_prefill(id):
    small = {"window": 4, "page": 8, "residual": 8, "sinks": 1, "group": 32, "budget": 0.5, "part": 4}
    small |= {"prefix": (1, 2), "separators": (3,)}
    if id == "xquant-cl":
        small["group"] = 16
    known = inspect.signature(METHODS[id]).parameters
    made = method(id, **{name: value for name, value in small.items() if name in known})
    # What these share or add, and their ranks, are fitted; of other low ranks, only the weights are.
    sized = (SharedLayers, ClusteredHeads, HiddenStateCache, EigenHeads)
    shares = made.make if isinstance(made.make, sized) else None
    if any(word.fitted is None for word in fitted_words((made.keep, made.store, made.reread, shares))):
        pytest.skip("it has to be fitted to a model first")
    # What merges neighbours, or encodes one over the other, needs two without a window.
    neighbours = made.stack is not None or id == "xquant-cl"
    config = dataclasses.replace(CONFIG, windows=()) if neighbours else CONFIG
    own = config if made.make is None else made.make.config(config)
    params = jax.eval_shape(lambda key: init(own, key), jax.random.key(0))
    ids, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 64), (1,)))
    run = Run(own, dataclasses.replace(made, make=None))
    call = partial(steps.prefill, run, tokens_bound=64, room=3, compress=True)
    _, cache = jax.eval_shape(call, params, ids, length, None)
    assert CacheSizes(config, "float32", 60, [method("full"), made]).nbytes(made, room=3) == nbytes(cache)


@pytest.mark.rotating
@pytest.mark.parametrize("width", [80, pytest.param(140, marks=pytest.mark.rotating)])
def test_inspect_shows_a_model_and_its_caches(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["inspect", "recall-tiny", "--context", "512"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert re.search(r"parameters +815\.74 k, 3\.1 MiB in float32 \(1\.6 MiB on disk\)", out)
    assert re.search(r"KV per token +2\.0 KiB in float32", out)
    assert re.search(r"^full +1\.0 MiB +100\.0%", out, re.MULTILINE)
    assert re.search(r"^random +520\.0 KiB +50\.0% +260\.0 KiB +25\.0%", out, re.MULTILINE)


@pytest.mark.rotating
def test_a_read_that_leaves_a_layer_alone_has_the_bytes_of_layers_one_by_one():
    made = method("magicpig", budget=0.5, skip_layers=1, newest=8, sinks=2)
    config = dataclasses.replace(CONFIG, layers=4, windows=(None,) * 4)
    sizes = CacheSizes(config, "float32", 64, [method("full"), made])
    _, cache = kvjax.prefill(Model(config, init(config, jax.random.key(0))), [[1] * 64], method=made, room=0)
    assert sizes.nbytes(made) == nbytes(cache)
    # What leaves most slots unread reads less than there is, and the tables of hashes are read.
    quest = method("quest", budget=0.25, skip_layers=0)
    assert sizes.read_bytes(quest) < sizes.nbytes(quest) and sizes.read_bytes(made) <= nbytes(cache)
    assert sizes.read_bytes(method("full")) == sizes.nbytes(method("full"))


def test_inspect_needs_no_weights_and_names_windows(tmp_path, capsys):
    config = json.loads((SHIPPED / "recall-tiny" / "config.json").read_text())
    config |= {"model_type": "mistral", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = dict(model_rows(*find_config(str(tmp_path)), "bfloat16"))
    assert rows["windows"] == "4 layers of the newest 64 tokens only, 256 B each"
    assert rows["KV per token"] == "0 B in bfloat16: no layer keeps every token"
    assert rows["parameters"] == "815.74 k, 1.6 MiB in bfloat16"


def test_a_model_of_states_alone_has_no_heads_and_no_rotation():
    rows = dict(model_rows(config_from_hf(CASES["mamba2"]), None, "float32"))
    assert rows["layers"] == "3 of width 20" and rows["positions"] == "1048576" and "heads" not in rows
    rows = dict(model_rows(named("rwkv-7-2.9b").config, None, "float32"))
    assert rows["layers"] == "64 of width 2560, MLP 10240" and "heads" not in rows


@pytest.mark.rotating
def test_a_config_alone_is_inspected_as_its_directory_is(tmp_path, capsys):
    text = (SHIPPED / "recall-tiny" / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    assert main(["inspect", str(tmp_path), "--context", "64"]) == 0
    whole = capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "config.json"), "--context", "64"]) == 0
    assert capsys.readouterr().out == whole != ""
    (tmp_path / "mine.json").write_text(text)
    assert main(["inspect", str(tmp_path / "mine.json"), "--context", "64"]) == 0
    assert capsys.readouterr().out.split()[2:] == whole.split()[2:]
    (tmp_path / "list.json").write_text("[1]")
    for name, error in (("list.json", "expected an object"), ("none.json", "does not exist")):
        assert main(["inspect", str(tmp_path / name)]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.rotating
def test_inspect_says_which_method_cannot_run_on_a_model(tmp_path, capsys):
    config = json.loads((SHIPPED / "recall-tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 24}))
    assert main(["inspect", str(tmp_path), "--context", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "int4: cannot store keys of 24 channels: group=32 must divide the 24 channels of a head" in out


def test_inspect_shows_what_a_cache_file_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    model = kvjax.load("recall-tiny")
    _, cache = kvjax.prefill(model, [[1, 2, 3, 4], [5, 6]], method="int8", room=2)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert main(["inspect", str(tmp_path / "a.cache")]) == 0
    out = capsys.readouterr().out
    for pattern in (
        r"method +int8",
        model.fingerprint,
        r"2, tokens seen: 4, 2",
        r"3\.0 per head and layer, from 2 to 4",
    ):
        assert re.search(pattern, out)
    total = re.search(r"^all +([\d.]+) KiB +100\.0", out, re.MULTILINE)
    assert total is not None and float(total[1]) == round(nbytes(cache) / 1024, 1)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "lisa",
            [r"2\s+layers\s+x\s+2\s+heads\s+x\s+10\s+channels\s+.in\s+one\s+array"],
            marks=pytest.mark.rotating,
        ),
        ("mla", [r"KV per token +128 B in float32: 2 layers x 16 channels .latents. x 4 B"]),
        pytest.param(
            "yoco",
            [r"shared +2 layers without own slots, reading those of 1"],
            marks=pytest.mark.rotating,
        ),
        pytest.param(
            "cepe",
            [
                r"context +per token of a context 12 channels, 48 B in float32",
                r"KV per token +256 B in float32: 2 x 2 layers x 2 heads x 8 channels x 4 B",
            ],
            marks=pytest.mark.rotating,
        ),
        ("kda", [r"state +1 layer with 196 numbers per row"]),
    ],
    ids=["lisa", "mla", "yoco", "cepe", "kda"],
)
def test_inspect_says_what_an_architecture_keeps(tmp_path, capsys, name, words):
    config = architectures.TABLE[name].config
    model = Model(config, parameters(config))
    save_checkpoint(model, tmp_path / "model")
    assert main(["inspect", str(tmp_path / "model"), "--context", "64"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(pattern, out) for pattern in words)
    assert ("no layer of this model keeps slots" in " ".join(out.split())) == (name == "kda")
    _, cache = kvjax.prefill(model, [[1, 2, 3]], room=2)
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert main(["inspect", str(tmp_path / "a.cache")]) == 0
    assert ("none: no layer keeps slots" in capsys.readouterr().out) == (name == "kda")


def test_what_quantised_a_checkpoint_is_said(tmp_path):
    (tmp_path / "config.json").write_text((SHIPPED / "recall-tiny" / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    (tmp_path / "model.safetensors").write_bytes(bytes(2048))
    rows = dict(model_rows(*find_config(str(tmp_path)), "bfloat16"))
    assert rows["parameters"].endswith("(2.0 KiB on disk, quantised by gptq)")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt_oss", "what 1 of 3 layers keep, which have every token; the windows of 2 stay as they are"),
        ("qwen3_next", "what 1 of 4 layers keep, which have every token; the states of 3 stay as they are"),
        ("llama", None),
        ("mistral", "No layer keeps every token, so a budget changes nothing here"),
    ],
)
def test_a_budget_is_said_to_concern_the_layers_that_keep_every_token(name, says):
    note = acts_on(config_from_hf(CASES[name]))
    assert note == "" if says is None else says in note


def test_layers_that_do_not_rotate_are_counted():
    rows = dict(model_rows(config_from_hf(CASES["smollm3"]), None, "float32"))
    assert rows["positions"] == "64, rope default, theta 5000, none in 1 layer"
