"""Hugging Face directories: what is loaded computes what transformers computes, and survives the way back."""

import dataclasses
import functools
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from kvjax.base.errors import InputError
from kvjax.eval.tasks.recall_tasks import sample
from kvjax.io.checkpoint import load_checkpoint, save_checkpoint
from kvjax.io.load import load, shipped
from kvjax.models import hf, placement
from kvjax.models.config import Config
from kvjax.models.files import Stored, atomic_folder
from kvjax.models.hf import load_hf, save_hf
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_config_out import config_to_hf
from kvjax.models.model import Model
from kvjax.models.params import Group, init, plan
from kvjax.models.tokenizer import chat
from kvjax.ops.base.rope import Rope
from tests.models import hf_fixtures
from tests.models.hf_cases import CASES
from tests.models.hf_fixtures import BAR, NAMES, relative_error
from tests.sweep import sweep


def directory(name, tmp_path, **options):
    fixture = hf_fixtures.read(name)
    return hf_fixtures.write(fixture, tmp_path / name, **options), fixture


def assert_same_params(a: Model, b: Model):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a.params, b.params)


# --- loading -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(model, fixture) by name, loaded once."""

    @functools.cache
    def load_one(name):
        folder, fixture = directory(name, tmp_path_factory.mktemp(name))
        return load_hf(folder), fixture

    return load_one


# The hardest checkpoints of small families; those of the others take turns.
FAMILIES = (
    "llama_llama3", "mamba2_groups", "deepseek_v3", "mixtral_window", "gemma3_nested", "olmo2", "phi3",
    "gpt_oss", "smollm3_windows", "exaone4", "seed_oss", "ernie4_5", "glm4", "ministral3", "granite",
    "lfm2_bias", "cohere2", "lfm2_moe",
)  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize("name", sweep(NAMES, *FAMILIES))
def test_logits_equal_those_of_transformers(name, loaded):
    model, fixture = loaded(name)
    assert relative_error(model(fixture.tokens), fixture.logits) <= BAR


@pytest.mark.parametrize("index", [True, False])
def test_shards_load_like_one_file(index, tmp_path):
    one, fixture = directory("qwen3", tmp_path / "one")
    many, _ = directory("qwen3", tmp_path / "many", shards=3, index=index)
    assert_same_params(load_hf(one), load_hf(many))


@pytest.mark.parametrize("source", [np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", jnp.float16])
def test_every_dtype_is_converted_once(source, dtype, tmp_path):
    folder, fixture = directory("llama", tmp_path)
    weights = {name: w.astype(source) for name, w in fixture.weights.items()}
    save_file(weights, folder / "model.safetensors")
    model = load_hf(folder, dtype=dtype)
    expected = weights["model.layers.1.mlp.down_proj.weight"].T.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(model.params["layers"][1]["down"][0], expected, strict=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype(dtype)}


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["gemma3_text", "ministral3"])
def test_bfloat16_logits_stay_near_float32(name, tmp_path):
    folder, fixture = directory(name, tmp_path)
    out = load_hf(folder, dtype=jnp.bfloat16)(fixture.tokens)
    assert out.dtype == jnp.float32
    assert relative_error(out, fixture.logits) < 0.1


@pytest.mark.parametrize("name", sweep(["llama", "gemma2", "phi3"], "gemma2"))
def test_stacked_layers_compute_the_same(name, tmp_path):
    folder, fixture = directory(name, tmp_path)
    config = load_hf(folder).config
    groups = plan(config, stacked=True)
    model = load_hf(folder, groups=groups)
    assert [g["q"].shape[0] for g in model.params["layers"]] == [g.size for g in groups]
    assert relative_error(model(fixture.tokens), fixture.logits) <= BAR


def mesh_of_four() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("model",))


def tensor_parallel(path: str, shape: tuple[int, ...]) -> NamedSharding:
    """Matrices over their output dimension where it divides, all else replicated."""
    split = len(shape) == 3 and shape[-1] % 4 == 0
    return NamedSharding(mesh_of_four(), P(None, None, "model") if split else P())


@pytest.mark.rotating
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.rotating), 3])
def test_each_device_reads_its_piece(shards, tmp_path):
    folder, fixture = directory("phi3", tmp_path, shards=shards)
    plain, model = load_hf(folder), load_hf(folder, sharding=tensor_parallel)
    assert_same_params(plain, model)
    up = model.params["layers"][0]["up"]
    assert {s.data.shape for s in up.addressable_shards} == {(1, 24, 7)}
    assert relative_error(model(fixture.tokens), fixture.logits) <= BAR


def test_a_split_tensor_is_read_once_and_in_blocks(tmp_path, monkeypatch):
    folder, _ = directory("olmo2", tmp_path)
    plain, read, pieces = load_hf(folder), Stored.read, []

    def count(stored, *index):
        pieces.append((stored.name, read(stored, *index)))
        return pieces[-1][1]

    monkeypatch.setattr(Stored, "read", count)
    monkeypatch.setattr(hf, "_BLOCK_ROWS", 5)
    assert_same_params(plain, load_hf(folder, sharding=tensor_parallel))
    name = "model.layers.0.mlp.up_proj.weight"
    assert sum(piece.size for n, piece in pieces if n == name) == plain.params["layers"][0]["up"].size
    assert max(len(piece) for _, piece in pieces) == 5


def test_sharding_may_be_a_tree_or_one_for_all(tmp_path):
    folder, _ = directory("olmo2", tmp_path)
    plain = load_hf(folder)
    everywhere = NamedSharding(mesh_of_four(), P())
    for sharding in (everywhere, jax.tree.map(lambda _: everywhere, plain.params)):
        model = load_hf(folder, sharding=sharding)
        assert {leaf.sharding for leaf in jax.tree.leaves(model.params)} == {everywhere}
        assert_same_params(plain, model)
    with pytest.raises(InputError, match="norm"):
        load_hf(folder, sharding={"embed": everywhere, "layers": ()})


def test_shardings_that_are_none_or_do_not_divide_a_parameter_are_refused(tmp_path):
    folder, mesh = directory("olmo2", tmp_path)[0], mesh_of_four()
    two = NamedSharding(mesh, P(None, mesh.axis_names))
    for wrong, message in (
        (mesh, "sharding is a Mesh, expected a jax.sharding.Sharding: write .*NamedSharding"),
        (P(), "sharding is a P, expected"),
        ("x", "sharding is a str, expected"),
        (lambda path, shape: P(), "the sharding of embed is P.*, expected"),
        (lambda path, shape: two if path == "norm" else None, "norm of shape .* cannot be divided as"),
        (two, "of shape .* cannot be divided as"),
    ):
        with pytest.raises(InputError, match=message):
            load_hf(folder, sharding=wrong)


def test_large_models_show_a_bar(tmp_path, monkeypatch, capsys):
    folder, _ = directory("llama", tmp_path)
    monkeypatch.setattr(hf, "LARGE_BYTES", 0)
    load_hf(folder)
    assert capsys.readouterr().err == ""  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    load_hf(folder)
    assert "loading weights" in capsys.readouterr().err
    load_hf(folder, progress=False)
    assert capsys.readouterr().err == ""


def test_a_multimodal_checkpoint_loads_its_language_model(tmp_path):
    text = hf_fixtures.read("gemma3_text")
    weights = {f"language_model.{name}": w for name, w in text.weights.items()}
    weights |= {
        "vision_tower.blocks.0.weight": np.zeros(3, np.float32),
        "multi_modal_projector.w": np.zeros(2),
    }
    config = {"model_type": "gemma3", "text_config": text.config, "vision_config": {}, "eos_token_id": [1, 6]}
    model = load_hf(hf_fixtures.write(text._replace(weights=weights, config=config), tmp_path))
    assert model.stop_ids == (1, 6)
    assert relative_error(model(text.tokens), text.logits) <= BAR


def test_an_output_matrix_beside_tied_embeddings_counts_if_it_differs(tmp_path):
    fixture = hf_fixtures.read("llama_mqa_tied")
    embed = fixture.weights["model.embed_tokens.weight"]
    for name, lm_head in (("copy", embed), ("other", 2 * embed)):
        weights = fixture.weights | {"lm_head.weight": lm_head}
        model = load_hf(hf_fixtures.write(fixture._replace(weights=weights), tmp_path / name))
        assert model.config.tied == (name == "copy")
        assert relative_error(model(fixture.tokens), fixture.logits * (1 if name == "copy" else 2)) <= BAR


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["norm.weight", "embed_tokens.weight", "layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_tensor_under_two_prefixes_is_read_once_or_refused(name, prefix, tmp_path):
    fixture = hf_fixtures.read("llama")
    given = fixture.weights[f"model.{name}"]
    same = fixture._replace(weights=fixture.weights | {prefix + name: given})
    assert (
        relative_error(load_hf(hf_fixtures.write(same, tmp_path / "a"))(fixture.tokens), fixture.logits)
        <= BAR
    )
    for other in (given + (np.arange(given.size) == given.size - 1).reshape(given.shape), given[:-1]):
        double = fixture._replace(weights=fixture.weights | {prefix + name: other.copy()})
        with pytest.raises(InputError, match="under two prefixes, and hold different numbers"):
            load_hf(hf_fixtures.write(double, tmp_path / "b"))


@pytest.mark.parametrize("where", ["config", "rope_parameters"])
def test_llama_rotates_whole_heads_whatever_the_file_says(where, tmp_path):
    fixture = hf_fixtures.read("llama")
    given = {"partial_rotary_factor": 0.5}
    if where == "rope_parameters":
        scaling = fixture.config.get("rope_parameters") or {"rope_type": "default"}
        given = {"rope_parameters": {**scaling, **given}}
    folder = hf_fixtures.write(fixture._replace(config=fixture.config | given), tmp_path)
    assert relative_error(load_hf(folder)(fixture.tokens), fixture.logits) <= BAR


def test_buffers_that_are_no_parameters_are_passed_over(tmp_path):
    fixture = hf_fixtures.read("llama")
    weights = fixture.weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    folder = hf_fixtures.write(fixture._replace(weights=weights), tmp_path)
    assert relative_error(load_hf(folder)(fixture.tokens), fixture.logits) <= BAR


# --- config.json -------------------------------------------------------------------------------------


def test_a_depth_that_no_decoder_has_is_refused_also_without_tensors():
    sizes = dict(model_type="llama", vocab_size=32, hidden_size=16, num_hidden_layers=10**7)
    with pytest.raises(InputError, match="num_hidden_layers = 10000000, expected at most 10000"):
        config_from_hf(sizes)


def test_the_old_and_the_new_spelling_of_rotary_scaling_agree():
    sizes = dict(
        model_type="llama", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    sizes |= dict(intermediate_size=8, max_position_embeddings=4096)
    params = dict(factor=4.0, original_max_position_embeddings=1024)
    old = config_from_hf({**sizes, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **params}})
    new = config_from_hf({**sizes, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **params}})
    assert old == new
    assert old.rope == Rope(theta=5e5, kind="yarn", factor=4.0, original_max=1024)


def test_a_sparse_gemma_3_config_is_filled_from_its_class():
    text = dict(model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)
    text |= dict(rope_scaling={"factor": 8.0, "rope_type": "linear"}, sliding_window=1024)
    config = config_from_hf({"model_type": "gemma3", "text_config": text})
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.rope == Rope(theta=1e6, kind="linear", factor=8.0)
    assert config.rope_local == Rope(theta=1e4)
    assert config.tied and config.max_positions == 131072


def test_a_window_of_null_is_no_window_and_a_missing_one_the_class_default():
    sizes = dict(
        model_type="mistral", vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=8
    )
    sizes |= dict(intermediate_size=8)
    assert config_from_hf({**sizes, "sliding_window": None}).windows == ()
    assert config_from_hf(sizes).windows == (4096, 4096)


def test_scaling_that_stretches_the_context_raises_the_longest_prompt():
    sizes = dict(
        model_type="qwen2", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    sizes |= dict(intermediate_size=8, max_position_embeddings=32768)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config_from_hf({**sizes, "rope_scaling": scaling}).max_positions == 131072
    assert (
        config_from_hf({**sizes, "rope_scaling": {"type": "dynamic", "factor": 2.0}}).max_positions == 65536
    )


@pytest.mark.parametrize("name", NAMES)
def test_configs_survive_the_way_to_json_and_back(name):
    config = config_from_hf(hf_fixtures.read(name).config)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_written_in_the_types_that_transformers_declares(name):
    """transformers 5.24 refuses an int in a field of floats, and a float in one of whole numbers."""
    softcaps = {"attn_logit_softcapping": 50, "final_logit_softcapping": 30}
    written = config_to_hf(config_from_hf(CASES[name] | (softcaps if name == "gemma2" else {})))
    floats = "rms_norm_eps layer_norm_epsilon rope_theta rope_local_base_freq partial_rotary_factor "
    floats = {*floats.split(), *softcaps, "routed_scaling_factor", "swiglu_limit"}
    floats |= {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    floats |= {"norm_eps", "layer_norm_eps", "logit_scale", "attn_scale", "time_step_min"}
    floats |= {key for key in written if key.endswith("_multiplier")}
    kinds = {key: type(x) for key, x in written.items() if type(x) in (int, float)}
    assert kinds == {key: float if key in floats else int for key in kinds}


def test_mamba2_normalised_over_all_channels_is_no_model_of_transformers():
    config = config_from_hf(CASES["mamba2_groups"])
    other = tuple(dataclasses.replace(mixer, norm_groups=1) for mixer in config.mixers)
    with pytest.raises(InputError, match="family mamba2 of transformers has no mixers"):
        config_to_hf(dataclasses.replace(config, mixers=other))


def test_olmo3_windowed_layers_rotate_unscaled():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = config_from_hf(CASES["olmo3"] | {"rope_scaling": scaling})
    assert config.windows == (6, 6, 6, None, 6)
    assert config.rope.kind == "yarn" and config.rope_local == Rope(theta=5e5)
    assert config_from_hf(config_to_hf(config)) == config
    each = {"full_attention": scaling | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert config_from_hf(CASES["olmo3"] | {"rope_parameters": each}) == config


def test_flat_parameters_beside_those_of_layer_types_do_not_hide_them():
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    flat = {"full_attention": linear, "rope_type": "default", "rope_theta": None}
    data = CASES["gemma3_text"] | {"layer_types": ["full_attention"] * 4, "rope_scaling": None}
    assert config_from_hf(data | {"rope_parameters": flat}).rope == Rope(theta=1e6, kind="linear", factor=8.0)


@pytest.mark.parametrize("channels", [15 * 2, 31 * 2])
def test_a_partial_rotation_survives_rounding(channels):
    config = Config(16, 8, 1, 1, 1, 78, 8, rope=Rope(rotary_dim=channels), family="phi3", norm_eps=1e-5)
    assert config_from_hf(config_to_hf(config) | {"head_dim": 78}).rope.rotary_dim == channels


# --- saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sweep(NAMES, *FAMILIES[:7]))
def test_saved_tensors_are_those_that_were_loaded(name, loaded, tmp_path):
    model, fixture = loaded(name)
    save_hf(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == fixture.weights.keys()
    for tensor, value in fixture.weights.items():
        np.testing.assert_array_equal(saved[tensor], value, strict=True)
    again = load_hf(tmp_path / "saved")
    assert again.config == model.config
    assert_same_params(again, model)


@pytest.mark.rotating
def test_large_models_are_saved_in_shards(tmp_path):
    folder, fixture = directory("llama", tmp_path)
    model = load_hf(folder, dtype=jnp.bfloat16, groups=(Group(0, 3),))
    save_hf(model, tmp_path / "saved", shard_bytes=8000)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    files = sorted(f.name for f in (tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    assert max((tmp_path / "saved" / f).stat().st_size for f in files) < 8000 + 4000  # and their headers
    assert index["metadata"]["total_size"] == 2 * sum(w.size for w in fixture.weights.values())
    assert_same_params(load_hf(tmp_path / "saved", dtype=jnp.bfloat16, groups=(Group(0, 3),)), model)


def test_a_save_replaces_an_older_one_and_nothing_else(tmp_path):
    model = load_hf(directory("llama", tmp_path)[0])
    other = load_hf(directory("olmo2", tmp_path)[0])
    save_hf(model, tmp_path / "out")
    with pytest.raises(InputError, match="out holds a model, which is not replaced unasked"):
        save_hf(other, tmp_path / "out")
    assert load_hf(tmp_path / "out").config == model.config
    save_hf(other, tmp_path / "out", overwrite=True)
    assert load_hf(tmp_path / "out").config == other.config
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama", "olmo2", "out"]
    (tmp_path / "out" / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match="holds notes.txt beside a model, which would be lost"):
        save_hf(other, tmp_path / "out", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(InputError, match="holds no config.json"):
        save_hf(model, tmp_path / "mine")


def test_threads_that_save_to_one_folder_do_not_meet(tmp_path):
    def save(number):
        with atomic_folder(tmp_path / "out", "config.json", overwrite=True) as folder:
            for name in ("config.json", "model.safetensors"):
                (folder / name).write_text(str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(120)))
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert len({f.read_text() for f in (tmp_path / "out").iterdir()}) == 1


def test_an_older_save_stays_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    def save(text):
        with atomic_folder(tmp_path / "out", "config.json", overwrite=True) as folder:
            (folder / "config.json").write_text(text)

    save("old")
    rename = Path.rename

    def refused(self, target):
        if (self / "config.json").read_text() == "new" and Path(target).name == "out":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(InputError, match=r"could not be written to .*out \(No space left on device\)"):
        save("new")
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    model = load_hf(directory("llama", tmp_path)[0])

    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf, "save_safetensors", full)
    with pytest.raises(InputError, match=r"could not be written to .*out \(No space left on device\): free"):
        save_hf(model, tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama"]


def test_a_failed_save_leaves_the_older_one(tmp_path, monkeypatch):
    model = load_hf(directory("llama", tmp_path)[0])
    save_hf(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(*_, **__):
        raise RuntimeError("disk full")

    monkeypatch.setattr(hf, "save_safetensors", fail)
    with pytest.raises(RuntimeError):
        save_hf(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert sorted(f.name for f in tmp_path.iterdir()) == ["llama", "out"]


def test_what_no_class_of_transformers_computes_is_refused():
    config = Config(vocab=16, d_model=8, layers=1, heads=1, kv_heads=1, head_dim=8, d_ff=8, qk_norm="head")
    with pytest.raises(InputError, match="qk_norm = 'head'"):
        config_to_hf(config)


# --- tokenizer and chat ------------------------------------------------------------------------------

TEMPLATE = """{{ bos_token }} {% for message in messages %}
<{{ message['role'] }}> {% generation %}{{ message['content'] }}{% endgeneration %} {{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def chatty(tmp_path, **files):
    """Write a small Llama with a tokenizer; `files` overrides tokenizer_config and generation_config."""
    folder, _ = directory("llama_mqa_tied", tmp_path)
    words = ["<s>", "</s>", "<user>", "<assistant>", "hello", "world", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | files.pop("tokenizer_config", {})))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


def test_chat_renders_the_template_of_the_checkpoint(tmp_path):
    model = load_hf(chatty(tmp_path))
    messages = [{"role": "user", "content": "hello world"}]
    text = "<s> <user> hello world </s> <assistant>"
    assert [model.tokenizer.id_to_token(i) for i in chat(model, messages)] == text.split()
    assert chat(model, messages, add_generation_prompt=False) == [0, 2, 4, 5, 1]


def test_stop_ids_come_from_every_file_that_names_them(tmp_path):
    model = load_hf(chatty(tmp_path, generation_config={"eos_token_id": [6, 3]}))
    assert model.stop_ids == (1, 3, 6)


def test_the_default_of_several_named_templates_is_used(tmp_path):
    named = {"tools": "no", "default": "hello"}
    for i, form in enumerate(([{"name": n, "template": t} for n, t in named.items()], named)):
        model = load_hf(chatty(tmp_path / str(i), tokenizer_config={"chat_template": form}))
        assert chat(model, []) == [4]
    model = load_hf(chatty(tmp_path / "none", tokenizer_config={"chat_template": {"tools": "no"}}))
    with pytest.raises(InputError, match="no chat template, or none named default"):
        chat(model, [])


def test_a_template_file_wins_over_the_tokenizer_config(tmp_path):
    folder = chatty(tmp_path)
    (folder / "chat_template.jinja").write_text("world")
    assert chat(load_hf(folder), []) == [5]


def test_text_files_survive_saving(tmp_path):
    model = load_hf(chatty(tmp_path, generation_config={"eos_token_id": 6}))
    save_hf(model, tmp_path / "saved")
    save_checkpoint(model, tmp_path / "checkpoint")
    for again in (load_hf(tmp_path / "saved"), load_checkpoint(tmp_path / "checkpoint")):
        assert (again.stop_ids, again.chat_template) == (model.stop_ids, model.chat_template)
        assert again.special_tokens == model.special_tokens
        assert again.tokenizer.to_str() == model.tokenizer.to_str()


def test_chat_says_what_it_lacks(tmp_path):
    folder = chatty(
        tmp_path, tokenizer_config={"chat_template": "{{ raise_exception('roles must alternate') }}"}
    )
    model = load_hf(folder)
    with pytest.raises(InputError, match="roles must alternate"):
        chat(model, [])
    with pytest.raises(InputError, match="no chat template"):
        chat(dataclasses.replace(model, chat_template=None), [])
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        chat(dataclasses.replace(model, tokenizer=None), [])


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    model = load_hf(chatty(tmp_path, tokenizer_config={"chat_template": attack}))
    with pytest.raises(InputError, match="unsafe"):
        chat(model, [])


# --- one door ----------------------------------------------------------------------------------------


def test_the_shipped_model_loads_by_name():
    assert shipped() == ["bytes-tiny", "recall-small", "recall-tiny"]
    model = load("recall-tiny", dtype=jnp.bfloat16)
    assert (model.name, model.config.vocab) == ("recall-tiny", 220)
    assert model.tokenizer.encode("<get> brave otter").ids == [3, 12, 64]


@pytest.mark.rotating
def test_the_larger_shipped_model_finds_records_behind_thousands_of_tokens():
    model, asked = load("recall-small"), sample("get", seed=0, index=0, tokens=2048)
    row = [*asked.context, *asked.question, *asked.answer]
    assert model.config.max_positions > 4096 and len(row) > 2000
    said = model(jnp.asarray([row[:-1]]))[0].argmax(-1)
    assert said[-len(asked.answer) :].tolist() == list(asked.answer)


@pytest.mark.rotating
def test_the_shipped_model_of_bytes_reads_python():
    model = load("bytes-tiny")
    source = (
        "    def __init__(self, name, value=None):\n        self.name = name\n        self.value = value\n"
    )
    ids = model.tokenizer.encode(source).ids
    logp = jax.nn.log_softmax(model(jnp.asarray([ids]))[0, :-1])
    nats = -float(jnp.take_along_axis(logp, jnp.asarray(ids[1:])[:, None], 1).mean())
    # Bytes that are all alike would have 8 bits each.
    assert nats / math.log(2) < 1.5


def test_who_reads_other_new_files_reads_the_weights(tmp_path):
    save_hf(load("recall-tiny"), tmp_path / "model")
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "model").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_load_takes_directories_of_both_kinds(tmp_path):
    folder, _ = directory("gemma2", tmp_path)
    model = load(folder)
    save_checkpoint(model, tmp_path / "checkpoint")
    again = load(str(tmp_path / "checkpoint"))
    assert again.config == model.config and again.fingerprint == model.fingerprint
    assert_same_params(again, model)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.rotating), "bfloat16"])
def test_checkpoints_load_in_any_stacking_dtype_and_sharding(dtype, tmp_path):
    folder, fixture = directory("gemma3_text", tmp_path)
    config = load_hf(folder).config
    save_checkpoint(load_hf(folder, groups=plan(config, stacked=True)), tmp_path / "checkpoint")
    for groups in (plan(config, stacked=True), plan(config, stacked=False)):
        for sharding in (None, SingleDeviceSharding(jax.devices()[1]), tensor_parallel):
            model = load_checkpoint(tmp_path / "checkpoint", dtype=dtype, sharding=sharding, groups=groups)
            assert_same_params(model, load_hf(folder, dtype=dtype, groups=groups))
            place = tensor_parallel if callable(sharding) else lambda path, shape, s=sharding: s
            if sharding is not None:
                assert model.params["norm"].sharding == place("norm", model.params["norm"].shape)


@pytest.mark.rotating
@pytest.mark.parametrize("sharding", [None, tensor_parallel], ids=["one device", "four"])
def test_weights_lie_as_their_device_multiplies_them_and_stay_so(sharding, tmp_path, monkeypatch):
    """Other tiles are a TPU's; a CPU can only swap axes."""
    folder, fixture = directory("olmo2", tmp_path)
    plain = load_hf(folder)
    save_checkpoint(plain, tmp_path / "checkpoint")
    turned = Layout((0, 2, 1))
    monkeypatch.setattr(placement, "weight_layout", lambda generation, x: turned if x.ndim == 3 else None)
    for model in (
        load_hf(folder, sharding=sharding),
        load_checkpoint(tmp_path / "checkpoint", sharding=sharding),
        load_checkpoint(tmp_path / "checkpoint", sharding=sharding, groups=plan(plain.config, stacked=True)),
    ):
        for leaf in jax.tree.leaves(model.params["layers"]):
            order = turned.major_to_minor if leaf.ndim == 3 else tuple(range(leaf.ndim))
            assert leaf.format.layout.major_to_minor == order
        assert relative_error(model(fixture.tokens), fixture.logits) <= BAR


def test_stacked_matrices_of_tpu7x_lie_in_tiles_of_16_rows():
    shape = jax.ShapeDtypeStruct
    layout = placement.weight_layout("tpu7x", shape((4, 256, 512), jnp.bfloat16))
    assert layout == Layout((0, 1, 2), tiling=((16, 128), (2, 1)))
    for generation, x in {
        "v6e": shape((4, 256, 512), jnp.bfloat16),
        "": shape((4, 256, 512), jnp.bfloat16),
        "tpu7x": shape((256, 512), jnp.bfloat16),
    }.items():
        assert placement.weight_layout(generation, x) is None
    assert placement.weight_layout("tpu7x", shape((4, 256, 512), jnp.float32)) is None
    assert placement.weight_layout("tpu7x", shape((4, 4, 512), jnp.bfloat16)) is None


def test_checkpoints_hold_what_no_class_of_transformers_computes(tmp_path):
    config = Config(
        32, 16, 2, 2, 1, 8, 16, qk_norm="head", windows=(4, None), rope_local=Rope(kind="yarn", factor=2.0)
    )
    model = Model(config, init(config, jax.random.key(0)))
    save_checkpoint(model, tmp_path / "checkpoint")
    assert load(tmp_path / "checkpoint").config == config
    assert load_checkpoint(tmp_path / "checkpoint").params["embed"].dtype == jnp.float32
