"""Weights of GGUF files: every type is decoded as the package does, and what is wrong is one sentence."""

import sys

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io.load import load
from kvjax.models.gguf.pieces import ConcatenatedTensors, StackedExperts
from kvjax.models.gguf.reader import StoredTensor, decodes
from tests.models.gguf_files import CASES, checkpoint, write_case, write_gguf
from tests.sweep import sweep

SIZES = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)
WIDE = CASES["llama_tied"][1] | SIZES | {"num_hidden_layers": 1}
KINDS = [kind.name for kind in gguf.GGMLQuantizationType if decodes(kind.name)]
FLOATS = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Weights of a model whose rows hold whole blocks of every type."""
    folder = checkpoint(WIDE, tmp_path_factory.mktemp("wide"))
    return load_file(folder / "model.safetensors")


def blocks(shape, kind):
    """Random blocks of a type whose numbers are all finite."""
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(kind))
    out = rng.integers(0, 256, (int(np.prod(shape)) // size, width), dtype=np.uint8)
    with np.errstate(all="ignore"):
        while (wrong := ~np.isfinite(gguf.dequantize(out, gguf.GGMLQuantizationType[kind])).all(-1)).any():
            out[wrong] = rng.integers(0, 256, (int(wrong.sum()), width), dtype=np.uint8)
    return out.reshape(*shape[:-1], -1)


def of_kind(path, weights, kind):
    """Write (a GGUF file whose matrices are of a type, their decoded numbers by name)."""
    write_gguf(path, "llama", WIDE, weights, "F32")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(again := path.with_name(f"{kind}.gguf"), "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    expected = {}
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if data.ndim < 2:
            writer.add_tensor(tensor.name, data)
        elif kind in FLOATS:
            expected[tensor.name] = data.astype(FLOATS[kind])
            writer.add_tensor(tensor.name, expected[tensor.name])
        else:
            number, data = gguf.GGMLQuantizationType[kind], blocks(data.shape, kind)
            expected[tensor.name] = gguf.dequantize(data, number)
            writer.add_tensor(tensor.name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return again, expected


def unpaired(rows, heads):
    """Rows of q or k with the halves of a head one after the other."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", sweep(KINDS, "F64", "Q4_K", "Q6_K", "MXFP4"))
def test_every_type_is_decoded_as_the_package_does(kind, wide, tmp_path):
    file, expected = of_kind(tmp_path / "a.gguf", wide, kind)
    layer = load(file).params["layers"][0]
    wanted = {
        "q": unpaired(expected["blk.0.attn_q.weight"], 4),
        "k": unpaired(expected["blk.0.attn_k.weight"], 2),
    }
    wanted |= {"v": expected["blk.0.attn_v.weight"], "down": expected["blk.0.ffn_down.weight"]}
    for name, value in wanted.items():
        np.testing.assert_array_equal(layer[name][0], value.T.astype(np.float32), strict=True)


def test_weights_are_rounded_once_to_the_dtype(wide, tmp_path):
    file, expected = of_kind(tmp_path / "a.gguf", wide, "Q5_1")
    model = load(file, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    up = expected["blk.0.ffn_up.weight"].T.astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.params["layers"][0]["up"][0], up, strict=True)


@pytest.mark.rotating
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latents_in_two_tensors_are_those_in_one(name, tmp_path):
    directory, file = write_case(name, tmp_path, split_latents=True)
    jax.tree.map(np.testing.assert_array_equal, load(file).params, load(directory).params)


def test_gates_and_ups_of_experts_may_be_one_tensor(tmp_path):
    directory, file = write_case("mixtral", tmp_path)
    arch, config = CASES["mixtral"]
    weights = load_file(directory / "model.safetensors")
    extra = {}
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        both = [
            np.concatenate([weights.pop(f"{stem}.{expert}.{name}.weight") for name in ("w1", "w3")])
            for expert in range(config["num_local_experts"])
        ]
        extra[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.stack(both)
    fused = write_gguf(tmp_path / "fused.gguf", arch, config, weights, extra=extra)
    jax.tree.map(np.testing.assert_array_equal, load(fused).params, load(file).params)


def test_a_split_file_is_read_by_any_of_its_parts(tmp_path):
    directory, whole = write_case("llama_tied", tmp_path)
    parts = split(whole, tmp_path / "parts", 2)
    for part in (*parts, tmp_path / "parts"):
        jax.tree.map(np.testing.assert_array_equal, load(part).params, load(whole).params)
    parts[1].unlink()
    with pytest.raises(InputError, match=r"lacks tiny-00002-of-00002\.gguf beside tiny-00001"):
        load(parts[0])


def split(whole, folder, count):
    """Split the file in several, with the metadata in the first."""
    folder.mkdir()
    reader = gguf.GGUFReader(whole)
    paths = [folder / f"tiny-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for name, field in reader.fields.items():
            if name.startswith("llama.") and i == 0:
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


# --- what is wrong -----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    """Write a good file, to be spoiled."""
    return write_case("llama_tied", tmp_path)[1]


def rewritten(file, keep=lambda name: True, **options):
    """Write the file with some of its tensors, and with what else `write_gguf` takes."""
    arch, config = CASES["llama_tied"]
    weights = load_file(file.parent / "hub" / "model.safetensors")
    weights = {name: value for name, value in weights.items() if keep(name)}
    return write_gguf(file.with_name("b.gguf"), arch, config, weights, **options)


def test_no_gguf_is_said(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(
        InputError, match=r"a\.gguf is no GGUF file: it starts with b'<!DO', expected b'GGUF'"
    ):
        load(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match="is a Git LFS pointer"):
        load(tmp_path / "a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="is no GGUF file"):
        load(tmp_path / "a.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.9, 0.99])
def test_a_cut_file_is_said(share, file):
    data = file.read_bytes()
    file.write_bytes(data[: max(4, int(len(data) * share))])
    with pytest.raises(
        InputError, match=r"llama_tied\.gguf is cut short: it has \d+ bytes, its head names more"
    ):
        load(file)


@pytest.mark.rotating
def test_a_damaged_head_is_one_sentence(file):
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(200):
        spoiled = bytearray(data)
        for at in rng.integers(4, 1500, 3):
            spoiled[at] = rng.integers(0, 256)
        file.write_bytes(spoiled)
        try:
            load(file)
        except InputError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bert", "which is not supported: expected one of llama, llama4"),
        ("gemma", "which is not supported .the nearest is gemma4.: expected one of llama, llama4"),
        ("deepseek4", "which is DeepSeek-V4 and left out: its layers cache entries"),
        ("minimax-m3", "which is MiniMax-M3 and left out: each KV head picks blocks"),
    ],
)
def test_an_unknown_architecture_lists_those_that_are_read(name, said, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", name)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match=f"architecture '{name}', {said}"):
        load(tmp_path / "a.gguf")


def test_an_unread_type_lists_those_that_are_read(tmp_path, wide):
    path = write_gguf(tmp_path / "a.gguf", "llama", WIDE, wide, "Q4_0")
    spoil_type(path, "Q4_0", gguf.GGMLQuantizationType.Q8_K)
    with pytest.raises(
        InputError, match="of the type Q8_K .*which gguf does not decode: these are read: F32, F16"
    ):
        load(path)
    spoil_type(path, "Q8_K", 250)
    with pytest.raises(InputError, match="of an unknown type 250: these are read: F32, F16, .*MXFP4"):
        load(path)


def spoil_type(path, kind, number):
    """Give the tensors of a type another one in the head, with zeros at the end, that nothing is cut."""
    data = bytearray(path.read_bytes())
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name == kind:
            at = tensor.field.offset + sum(int(part.nbytes) for part in tensor.field.parts[:4])
            data[at : at + 4] = int(number).to_bytes(4, "little")
    path.write_bytes(data + bytes(2**21))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(keep=lambda name: "layers.1.mlp.up" not in name), r"1 missing: blk\.1\.ffn_up\.weight\. Fetch"),
        (
            dict(extra={"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}),
            r"1 not expected: blk\.0\.attn_q_norm\.weight",
        ),
        (
            dict(extra={"blk.0.attn_v.weight": np.ones((8, 24), np.float32)}),
            r"1 of another shape: blk\.0\.attn_v\.weight \(expected \[8, 20\], found \[8, 24\]\)",
        ),
        (
            dict(llama__rope__scaling__type="longest"),
            "scales its rotation by 'longest', expected one of none",
        ),
        (dict(general__type="adapter"), "is a GGUF of the type 'adapter', expected a whole model"),
        (dict(llama__expert_count="many"), "has metadata that make no sense|lacks llama.expert_used_count"),
        (dict(llama__rope__scaling__factor="2x"), "has metadata that make no sense"),
        (dict(llama__expert_count=4), "lacks llama.expert_used_count in its metadata"),
    ],
)
def test_what_does_not_fit_is_said(change, message, file):
    with pytest.raises(InputError, match=message):
        load(rewritten(file, **change))


def test_several_files_in_a_folder_are_named(file):
    (file.parent / "two.gguf").write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=r"has several GGUF files, llama_tied\.gguf, two\.gguf: name one"):
        load(file.parent)


def test_the_package_is_asked_for_where_it_is_missing(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"GGUF files need the package gguf: pip install 'kvjax\[gguf\]'"):
        load(file)


@pytest.mark.rotating
def test_commands_take_a_file(file, capsys):
    assert main(["inspect", str(file)]) == 0
    assert "llama" in capsys.readouterr().out
    assert main(["inspect", str(file.with_suffix(".nowhere"))]) == 2


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize("by_turns", [True, False])
def test_stacked_experts_are_decoded_and_joined(kind, by_turns):
    """Gate and up, quantised apart, as one tensor [experts, inputs, outputs], whole and in part."""
    rng = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[kind]
    codes = [gguf.quants.quantize(rng.standard_normal((3, 4, 64), np.float32), number) for _ in range(2)]
    gate, up = (gguf.quants.dequantize(x, number) for x in codes)
    parts = tuple(StoredTensor(x, kind, (3, 4, 64)) for x in codes)
    want = np.stack([gate, up], 2).reshape(3, 8, 64) if by_turns else np.concatenate([gate, up], 1)
    found = StackedExperts(parts, (3, 64, 8), by_turns)
    np.testing.assert_array_equal(found[()], want.swapaxes(1, 2))
    np.testing.assert_array_equal(found[1:3, :5], want.swapaxes(1, 2)[1:3, :5])


def test_tensors_joined_along_their_outputs_are_read_in_any_order():
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal((n, 6), np.float32) for n in (4, 3))
    parts = tuple(StoredTensor(x, "F32", x.shape) for x in (first, second))
    rows = np.array([6, 0, 4, 1, 5, 2, 3])
    found = ConcatenatedTensors(parts, (7, 6), rows)
    np.testing.assert_array_equal(found[1:6, 2:4], np.concatenate([first, second])[rows][1:6, 2:4])
