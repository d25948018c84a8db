"""Settings of training: each field of each section takes its own values, from Python, gin and the shell."""

import dataclasses
import math

import pytest

from kvjax.base.errors import InputError
from kvjax.io.gin_bindings import load_training
from kvjax.models.config import Config
from kvjax.models.mixers.recurrent import KimiDelta
from kvjax.train.settings import SECTIONS, check_changes, training

FLAGS = (1, 0, "no", "yes", None, [True])
COUNTS = (0, -1, 3.5, "x", True, None, math.nan)
WHOLE = (-1, 2.5, "x", True, math.inf)
WEIGHTS = (-0.1, math.nan, math.inf, "x", True)
SHARES = (*WEIGHTS, 1.1)
TEXTS = (3, True, ["x"])
LISTS = (3, [3], {"a": 1})
# What each field refuses.
WRONG = {
    "data": {
        "kind": ("jsno", 3), "files": LISTS, "field": TEXTS, "tokenizer": TEXTS, "held_out": (*WEIGHTS, 0.6),
        "segments": FLAGS, "seed": (*WHOLE, 2**32), "tasks": LISTS,
    },
    "optimiser": {
        "name": ("adam", None), "peak": WEIGHTS, "schedule": ("linear", 1), "warmup": WHOLE, "decay": SHARES,
        "floor": SHARES, "b1": (*SHARES, 1.0), "b2": (*SHARES, 1.0), "eps": (*WEIGHTS, 0, 1e-50),
        "weight_decay": (*WEIGHTS, -5), "clip": (*WEIGHTS, 0, -1),
    },
    "train": {
        "steps": COUNTS, "batch": COUNTS, "length": COUNTS, "accumulate": COUNTS,
        "stages": (3, [3], "x", [(1, 2)], [(1, 0, 2)], [(2.5, 8, 2)]),
        "compute": ("float16", None), "remat": FLAGS, "passes": (7, (7,), (7, 0), (-1, 2), "ab"),
        "context": WHOLE, "chunk": WHOLE, "method": TEXTS, "repeat": WEIGHTS, "balance": WEIGHTS,
        "codes": WEIGHTS, "distil": SHARES, "distil_hidden": WEIGHTS, "distil_attention": WEIGHTS,
        "seed": (*WHOLE, 2**32), "log_every": COUNTS, "evaluate_every": COUNTS, "evaluate_rows": COUNTS,
        "save_seconds": WEIGHTS,
    },
    "tune": {
        "trained": LISTS, "frozen": LISTS, "lora": LISTS, "rank": COUNTS, "alpha": WEIGHTS, "encoder": FLAGS,
    },
    "devices": {"mesh": TEXTS, "rules": TEXTS, "workers": WHOLE},
    "model": {
        "vocab": (*COUNTS, -3), "d_model": COUNTS, "layers": COUNTS, "heads": COUNTS, "kv_heads": COUNTS,
        "head_dim": (*COUNTS, 7), "d_ff": (-4, 0, 2.5, "x"), "rope": (7, "x"), "rope_local": (7, "x"),
        "windows": (-1, 4, [0] * 4, [-1] * 4, ["x"] * 4), "norm_eps": WEIGHTS,
        "norm_offset": (math.nan, "x", True), "norms": ("none", 1), "centred": FLAGS, "norm_bias": FLAGS,
        "embed_norm": FLAGS,
        "layer_embeddings": WHOLE, "layer_scales": FLAGS, "layer_vocab": WHOLE,
        "streams": COUNTS, "laurel": WHOLE, "qk_norm": ("all", 1),
        "qkv_bias": FLAGS, "o_bias": FLAGS, "mlp_bias": FLAGS, "activation": ("relu", 3),
        "embed_scale": (math.nan, "x"), "residual_scale": WEIGHTS, "logit_scale": WEIGHTS,
        "query_scale": WEIGHTS, "attention_softcap": WEIGHTS,
        "logit_softcap": WEIGHTS, "tied": FLAGS, "max_positions": COUNTS, "family": (3,),
        "mixers": (3, "x", [3] * 4), "mlps": (3, "x", [3] * 4), "inputs": (3, [-1] * 4, [0.5] * 4),
        "mixer": (3, {"word": "Attention", "gate": "no"}, {"word": "Attention", "kv_heads": 0}),
        "mlp": (3, {"word": "MoE", "experts": 0, "top": 1, "width": 8}),
        "start": (3,), "teacher": (3,), "encoder": (3, True), "init": ("zeros", 3),
    },
}  # fmt: skip
# Fields whose message is of more than the field itself.
BESIDE = {"rope", "rope_local", "mixers", "mlps", "mixer", "mlp", "stages", "activation"}


def sections():
    fields = {name: {f.name for f in dataclasses.fields(kind)} for name, kind in SECTIONS.items()}
    own = {f.name for f in dataclasses.fields(Config)} | {"mixer", "mlp"}
    return fields | {"model": own | {"start", "teacher", "encoder", "init"}}


def test_every_setting_is_in_the_table_of_wrong_values():
    assert {name: set(fields) for name, fields in WRONG.items()} == sections()


@pytest.mark.parametrize(
    ("section", "field"), [(section, field) for section, fields in WRONG.items() for field in fields]
)
def test_values_outside_a_field_are_refused_by_its_name(section, field):
    for value in WRONG[section][field]:
        if value is None and field in ("start", "teacher", "encoder"):
            continue
        bound = {section: {field: value}}
        message = rf"{section}\..* is .*expected|of {section}\.|settings of model|(mixer|feed-forward) is"
        message = message if field in BESIDE else rf"^{section}\.{field} is .*, expected"
        with pytest.raises(InputError, match=message) as error:
            training(bound)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (section, field)
        for section, fields in WRONG.items()
        for field, wrong in fields.items()
        if wrong is FLAGS
    ],
)
@pytest.mark.parametrize("written", ["false", "False", "FALSE"])
def test_false_on_the_command_line_is_false(section, field, written):
    run = training(load_training("bytes", [f"{section}.{field}={written}"]))
    part = {"model": "config", "train": "loop"}.get(section, section)
    assert getattr(getattr(run, part), field) is False


def test_true_on_the_command_line_is_true():
    run = training(load_training("bytes", ["train.remat=true", "model.tied=true"]))
    assert run.loop.remat is True and run.config.tied is True


def test_steps_beside_stages_are_refused_and_apply_without_them():
    for change in ("train.steps=3", "train.length=64", "train.batch=2"):
        bound = load_training("recall-tiny", [change])
        with pytest.raises(InputError, match=rf"{change} changes nothing, because train.stages is \[\(245"):
            check_changes(bound, [change])
    changes = ["train.stages=()", "train.steps=3", "train.length=64", "train.batch=2"]
    bound = load_training("recall-tiny", changes)
    check_changes(bound, changes)
    loop = training(bound).loop
    assert (loop.steps, loop.length, loop.batch, loop.stages) == (3, 64, 2, ())
    # A file that includes one with steps may bind stages.
    check_changes(load_training("bytes-tiny", ["train.seed=1"]), ["train.seed=1"])


def test_sizes_beside_a_model_to_start_from_are_refused():
    for change in ("model.kv_heads=1", "model.init=circuit", "model.mixer={'word': 'Attention'}"):
        changes = ["model.start=mine", change]
        with pytest.raises(InputError, match=r"model\..* changes nothing, because the run goes on from mine"):
            check_changes(load_training("bytes", changes), changes)
    changes = ["model.start=mine", "model.teacher=other", "train.steps=3"]
    check_changes(load_training("bytes", changes), changes)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_a_config_of_python_names_its_field(name):
    sizes = dict(vocab=8, d_model=8, layers=4, heads=1, kv_heads=1, head_dim=8, d_ff=8)
    for value in WRONG["model"][name]:
        message = rf"^{name}(\[0\])? is .*, expected|^{name} must be one of"
        with pytest.raises((InputError, ValueError), match=message) as error:
            Config(**sizes | {name: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["mixers", "mlps"])
def test_a_class_in_place_of_a_layer_s_word_is_named(name):
    sizes = dict(vocab=8, d_model=8, layers=1, heads=1, kv_heads=1, head_dim=8, d_ff=8)
    for value in (int, KimiDelta, None):
        with pytest.raises(
            InputError, match=rf"^{name}\[0\] is .*, expected a word of kvjax.models.* such as"
        ):
            Config(**sizes | {name: (value,)})


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "mine.gin"
    path.write_bytes(b"\xef\xbb\xbf" + b"include 'bytes.gin'\r\ntrain.steps = 3\r\n")
    assert training(load_training(path)).loop.steps == 3


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"rope": {"thta": 1e6}}, "Rope has no 'thta': did you mean theta"),
        ({"blocks": {"layers": -1}}, "model.blocks.layers is -1"),
        ({"blocks": 3}, "model.blocks is 3, expected a dict of settings"),
        ({"tokens": {"d_ff": -4}}, "model.tokens.d_ff is -4"),
        ({"blocks": {}, "length": 0}, "model.length is 0, expected a whole number >= 1"),
        ({"blocks": {}, "prefix": 2.5}, "model.prefix is 2.5, expected a whole number >= 1"),
        ({"encoder": {"layers": 0}}, "model.encoder.layers is 0"),
    ],
)
def test_settings_inside_of_others_are_named(model, message):
    with pytest.raises(InputError, match=message):
        training({"model": model})
