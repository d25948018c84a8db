"""`kvjax convert`: conversions by name, what they cost, and what is refused."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.models.config import Config
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.model import Model
from kvjax.models.params import init
from kvjax.models.transformer import hidden
from kvjax.train.conversion.conversions import CONVERSIONS, convert
from kvjax.train.conversion.difference import difference
from kvjax.train.conversion.linear import attention_changes

CONFIG = Config(vocab=32, d_model=16, layers=4, heads=4, kv_heads=4, head_dim=4, d_ff=24)
MODEL = Model(CONFIG, init(CONFIG, jax.random.key(0)))
TEXTS = np.random.default_rng(0).integers(0, 32, (2, 12)).tolist()


def test_difference_is_the_divergence_of_the_predictions_and_how_often_they_agree():
    other = convert(MODEL, "gqa:kv_heads=2")
    a, b = (np.asarray(m(jnp.asarray(TEXTS)), np.float64) for m in (MODEL, other))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    found = difference(MODEL, other, TEXTS)
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert found.agreement == pytest.approx((a.argmax(-1) == b.argmax(-1)).mean())


@pytest.mark.parametrize(
    ("spec", "sources"),
    [
        ("cla:every=2", [None, 0, None, 2]),
        ("mlkv:layers=1", [None, 0, 0, 0]),
        ("lckv", [None, 2, None, None]),
        ("lckv:own=0", [3, 3, 3, None]),
        ("yoco:window=3", [None, None, 1, 1]),
    ],
)
def test_layers_read_those_that_the_conversion_says(spec, sources):
    assert [m.source for m in convert(MODEL, spec).config.mixers] == sources


def test_a_decoder_that_ends_early_has_windows_below_and_reads_one_layer_above():
    config = convert(MODEL, "yoco:window=3").config
    assert [config.window(i) for i in range(4)] == [3, None, None, None]
    wide = convert(MODEL, "yoco:window=99")
    assert difference(wide, convert(MODEL, "mlkv:layers=2"), TEXTS).divergence > 0
    swift = convert(MODEL, "swiftkv:layer=2")
    assert [m.kv_input for m in swift.config.mixers] == [None, None, 2, 2]
    assert swift.params["layers"][3]["k"] is MODEL.params["layers"][3]["k"]


def test_blocks_that_queries_pick_change_nothing_where_they_are_all_and_no_weight_is_new():
    made = convert(MODEL, "moba:block=8,top=3")
    assert difference(MODEL, made, TEXTS).divergence == pytest.approx(0, abs=1e-6)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (MODEL.params, made.params)), strict=True))
    fewer = difference(MODEL, convert(MODEL, "moba:block=4,top=2"), TEXTS)
    assert fewer.divergence > 1e-4
    with pytest.raises(InputError, match="whose layers are all plain attention"):
        convert(made, "moba:block=8")


@pytest.mark.rotating
def test_what_loses_nothing_is_exact():
    """Heads that are equal, layers whose attention gives nothing, and latents of full rank."""
    params = init(CONFIG, jax.random.key(1))
    for layer in params["layers"]:
        for name in ("k", "v"):
            layer[name] = jnp.tile(layer[name][..., :4], (1, 1, 4))
    params["layers"][3]["o"] = jnp.zeros_like(params["layers"][3]["o"])
    model = Model(CONFIG, params)
    for spec in (
        "mqa",
        "gqa:kv_heads=2",
        "drop:layers=[3]",
        "low-rank:rank=1.0,heads=2",
        "swiftkv:layer=3",
        "eckvh:kv_heads=1",
        "mla:rank=4",
        "mla:rank=16,rotary=4",
    ):
        assert difference(model, convert(model, spec), TEXTS).divergence == pytest.approx(0, abs=1e-6)


def with_equal_heads():
    """Make key and value heads 0, 2 and 1, 3 of the model alike."""
    params = init(CONFIG, jax.random.key(1))
    for layer in params["layers"]:
        for name in ("k", "v"):
            heads = layer[name].reshape(1, 16, 4, 4)
            layer[name] = heads[:, :, jnp.asarray([0, 1, 0, 1])].reshape(1, 16, 16)
    return Model(CONFIG, params)


@pytest.mark.rotating
def test_searched_groups_of_equal_heads_lose_nothing_where_neighbours_would():
    model = with_equal_heads()
    for spec in ("asymgqa:kv_heads=2", "dha:heads=16,steps=0"):
        assert difference(model, convert(model, spec, TEXTS), TEXTS).divergence == pytest.approx(0, abs=1e-6)
    assert difference(model, convert(model, "gqa:kv_heads=2"), TEXTS).divergence > 1e-3
    read = convert(model, "kdgqa:kv_heads=2", TEXTS).config.mixers[0]
    assert len(read.k_of) == 4 and set(read.k_of) == {0, 1}


@pytest.mark.rotating
def test_kdgqa_loses_nothing_where_all_heads_are_equal_and_not_where_pairs_are():
    params, equal = (init(CONFIG, jax.random.key(1)) for _ in range(2))
    for layer, other in zip(params["layers"], equal["layers"], strict=True):
        for name in ("k", "v"):
            heads = layer[name].reshape(1, 16, 4, 4)
            layer[name] = heads[:, :, jnp.asarray([0, 0, 1, 1])].reshape(1, 16, 16)
            other[name] = heads[:, :, jnp.zeros(4, int)].reshape(1, 16, 16)
    made = {name: Model(CONFIG, p) for name, p in (("pairs", params), ("all", equal))}
    lost = {
        (name, spec): difference(model, convert(model, spec, TEXTS), TEXTS).divergence
        for name, model in made.items()
        for spec in ("gqa:kv_heads=2", "kdgqa:kv_heads=2")
    }
    assert lost["pairs", "gqa:kv_heads=2"] == pytest.approx(0, abs=1e-6)
    assert lost["all", "kdgqa:kv_heads=2"] == pytest.approx(0, abs=1e-6)
    # Query heads of one pair read the other: the method's own choice.
    assert lost["pairs", "kdgqa:kv_heads=2"] > 1e-3


@pytest.mark.rotating
@pytest.mark.parametrize("spec", ["dha:heads=16,steps=4", "qcqa:heads=8", "qcqa:heads=11"])
def test_fused_and_evolved_groups_of_equal_heads_lose_nothing(spec):
    model = with_equal_heads()
    made = convert(model, spec, TEXTS)
    assert difference(model, made, TEXTS).divergence == pytest.approx(0, abs=1e-6)
    if spec.startswith("qcqa"):
        # Once nothing is lost, more heads are not asked for.
        assert sum(len(set(m.k_of)) for m in made.config.mixers) == 8


@pytest.mark.rotating
def test_attention_is_dropped_where_it_turns_its_input_least():
    params = init(CONFIG, jax.random.key(1))
    for i, size in enumerate((1.0, 1e-3, 1.0, 1e-2)):
        params["layers"][i]["o"] = params["layers"][i]["o"] * size
    changes = attention_changes(params, CONFIG, TEXTS)
    # The first layer by hand.
    embedded = np.asarray(params["embed"], np.float64)[np.asarray(TEXTS)]
    alone = {**params, "layers": ({**params["layers"][0], "down": params["layers"][0]["down"] * 0},)}
    cut = dataclasses.replace(CONFIG, layers=1)
    after = np.asarray(hidden(alone, jnp.asarray(TEXTS, jnp.int32), cut), np.float64)
    sizes = np.linalg.norm(embedded, axis=-1) * np.linalg.norm(after, axis=-1)
    assert changes[0] == pytest.approx((1 - (embedded * after).sum(-1) / sizes).mean(), rel=1e-4)
    made = convert(Model(CONFIG, params), "drop:count=2", TEXTS)
    assert [isinstance(m, Dropped) for m in made.config.mixers] == [False, True, False, True]


@pytest.mark.rotating
def test_the_command_writes_a_model_and_says_what_it_costs(tmp_path, capsys):
    out = tmp_path / "mqa"
    assert main(["convert", "--to", "mqa", "recall-tiny", str(out), "--rows", "2", "--length", "64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "nats from the original's" in said
    assert f"kvjax uptrain {out} --teacher recall-tiny --set data.kind=recall" in said
    assert kvjax.load(str(out)).config.kv_heads == 1
    assert main(["convert", "--to", "mqa", "nowhere", str(out)]) == 2
    assert "holds a model, which is not replaced unasked" in capsys.readouterr().err
    assert main(["convert", "--to", "mqa", "nowhere", str(out), "--overwrite"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    # A folder that holds something else is refused before anything is read.
    (tmp_path / "other").write_text("mine")
    assert main(["convert", "--to", "mqa", "nowhere", str(tmp_path / "other")]) == 2
    assert "exists and holds no kvjax.json" in capsys.readouterr().err


@pytest.mark.rotating
def test_the_command_says_that_a_reader_of_contexts_needs_an_encoder(tmp_path, capsys):
    out = tmp_path / "cepe"
    words = ["convert", "--to", "cepe:width=8", "recall-tiny", str(out), "--rows", "1", "--length", "64"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"kvjax uptrain {out} --set model.encoder=ENCODER train.context=128 data.kind=recall" in said


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gqq:kv_heads=2", "unknown conversion 'gqq': did you mean gqa"),
        ("gqa", "gqa needs kv_heads: write gqa:kv_heads="),
        ("gqa:heads=2", "gqa has no option 'heads', it takes kv_heads"),
        ("gqa:kv_heads=3", "cannot be converted to gqa:kv_heads=3: .*3"),
        ("mlkv:layers=9", "layers is 9, expected 1 to 4"),
        ("gqa:kv_heads", "cannot be read: write it like gqa:kv_heads=2"),
        ("cla:every=0", "every is 0, expected"),
        ("lckv:own=3", "own is 3, expected 0 to 2"),
        ("yoco:window=0", "window is 0, expected"),
        ("swiftkv:layer=4", "layer is 4, expected 0 to 3"),
        ("mla:rank=99", "expected 1 to 4 and 1 to 16"),
        ("eckvh:kv_heads=3", "cannot become 3 equal groups"),
        ("eckvh:moments=3,kv_heads=1", "eckvh has no option 'moments', it takes kv_heads"),
        ("linear:layers=[0]", "its layers learn from texts"),
        ("drop", "give either the layers"),
        ("drop:count=1", "chosen by texts: give some"),
        ("kdgqa:kv_heads=2", "norms of keys are those of texts"),
        ("dha:heads=99", "cannot have 99 key and value heads"),
    ],
)
def test_what_cannot_be_converted_is_said_in_one_sentence(spec, message):
    with pytest.raises(InputError, match=message):
        convert(MODEL, spec)


OPTIONS = [
    (name, option)
    for name, made in CONVERSIONS.items()
    for option, given in inspect.signature(made).parameters.items()
    if given.kind == given.KEYWORD_ONLY and option not in ("texts", "moments")
]


# Options that take shares.
SHARES = {("low-rank", "rank"), ("lorc", "most"), ("lorc", "least")}


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_options_of_a_conversion_refuse_values_of_another_kind(name, option):
    # Numbers that are equal to whole ones, and are none, were saved to models that could not be loaded.
    wrong = ["-1", "True", "mine!", "[1.0]"]
    wrong += [] if (name, option) in SHARES else ["1.5", "1.0"]
    wrong += [] if option == "mixer" else ["nan"]
    wrong += [] if inspect.signature(CONVERSIONS[name]).parameters[option].default is None else ["None"]
    for value in wrong:
        with pytest.raises(InputError, match=f"{name}: {option} is .*, expected|cannot be read") as error:
            convert(MODEL, f"{name}:{option}={value}", TEXTS)
        assert "\n" not in str(error.value)
