"""Quantised checkpoints in the published layouts, packed number by number, and what they stand for.

Each writer takes a weight [out, in] and gives (tensors of the module by the last part of their names, the
float64 weight that they stand for).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Parts = dict[str, np.ndarray]
Written = tuple[Parts, np.ndarray]
E4M3 = ml_dtypes.float8_e4m3fn
FLOAT_4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


class Format(NamedTuple):
    """quantization_config, and the writer of one weight."""

    config: dict[str, Any]
    write: Callable[[np.ndarray], Written]


# --- bits --------------------------------------------------------------------------------------------


def stream(codes, bits, width=32):
    """Unsigned numbers [rows, count] as words, number i of a row at bit i * bits, the lowest bit first."""
    words = -(-codes.shape[1] * bits // width)
    rows = [sum(int(code) << i * bits for i, code in enumerate(row)) for row in codes]
    data = b"".join(row.to_bytes(words * width // 8, "little") for row in rows)
    return np.frombuffer(data, f"<i{width // 8}" if width > 8 else "u1").reshape(len(codes), words).copy()


def awq_words(codes):
    """Eight 4-bit numbers a word, of which place i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for row, column in np.ndindex(*out.shape):
        for place, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[row, column] |= np.uint32(int(codes[row, 8 * column + which]) << 4 * place)
    return out.view(np.int32)


def groups_of(columns, size):
    return [column // size for column in range(columns)]


def quantised(weight, groups, bits, symmetric=False, dtype=np.float16):
    """(codes from 0 to 2 ** bits - 1, scales and zeros [out, groups], the weight they stand for)."""
    top, count = 2**bits - 1, max(groups) + 1
    codes = np.zeros(weight.shape, np.int64)
    scales, zeros = np.zeros((len(weight), count), dtype), np.zeros((len(weight), count), np.int64)
    exact = np.zeros(weight.shape)
    members = [[c for c, g in enumerate(groups) if g == group] for group in range(count)]
    for row in range(len(weight)):
        for group, columns in enumerate(members):
            values = weight[row, columns].astype(np.float64)
            low, high = min(values.min(), 0), max(values.max(), 0)
            if symmetric:
                low, high = -max(-low, high), max(-low, high)
            scales[row, group] = max(high - low, 1e-4) / top
            scale = float(scales[row, group])
            zeros[row, group] = (top + 1) // 2 if symmetric else min(round(-low / scale), top)
            for column, value in zip(columns, values, strict=True):
                code = min(max(round(value / scale) + int(zeros[row, group]), 0), top)
                codes[row, column] = code
                exact[row, column] = (code - int(zeros[row, group])) * scale
    return codes, scales, zeros, exact


# --- float8 ------------------------------------------------------------------------------------------


def float8(weight, block, scale_dtype=np.float32):
    """(weight in float8, scales by blocks, the weight they stand for)."""
    (n, k), (rows, columns) = weight.shape, block
    scales = np.zeros((-(-n // rows), -(-k // columns)), scale_dtype)
    codes, exact = np.zeros((n, k), E4M3), np.zeros((n, k))
    for i, j in np.ndindex(*scales.shape):
        piece = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        most = float(abs(weight[piece]).max()) / 448
        scales[i, j] = 2.0 ** np.ceil(np.log2(most)) if scale_dtype != np.float32 else most
        scale = float(scales[i, j])
        codes[piece] = (weight[piece] / scale).astype(E4M3)
        exact[piece] = codes[piece].astype(np.float64) * scale
    return codes, scales, exact


def fp8_blocks(weight, dtype=np.float32):
    codes, scales, exact = float8(weight, (16, 8), dtype)
    return {"weight": codes, "weight_scale_inv": scales}, exact


def fp8_whole(weight):
    codes, scales, exact = float8(weight, weight.shape)
    parts = {"weight": codes, "weight_scale_inv": scales.reshape(()), "activation_scale": np.float32(0.3)}
    return parts, exact


def fp8_rows(weight):
    codes, scales, exact = float8(weight, (1, weight.shape[1]))
    return {"weight": codes, "weight_scale": scales}, exact


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}

# --- compressed-tensors ------------------------------------------------------------------------------


def compressed(form, strategy, bits=4, kind="int", symmetric=True, **more):
    args = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def ct_float(block):
    def write(weight):
        codes, scales, exact = float8(weight, (block[0] or len(weight), block[1] or weight.shape[1]))
        whole = block == (0, 0)
        return {"weight": codes, "weight_scale": scales.reshape(1) if whole else scales}, exact

    return write


def ct_int8(symmetric, size=0):
    def write(weight):
        groups = groups_of(weight.shape[1], size or weight.shape[1])
        codes, scales, zeros, exact = quantised(weight, groups, 8, symmetric, np.float32)
        parts = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
        return parts | ({} if symmetric else {"weight_zero_point": (zeros - 128).astype(np.int8)}), exact

    return write


def ct_packed(bits, size, symmetric=True, order=None):
    def write(weight):
        groups = groups_of(weight.shape[1], size or weight.shape[1])
        if order is not None:
            groups = np.random.default_rng(order).permutation(groups)
        codes, scales, zeros, exact = quantised(weight, list(groups), bits, symmetric)
        parts = {
            "weight_packed": stream(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = np.ascontiguousarray(stream(zeros.T, bits).T)
        if order is not None:
            parts["weight_g_idx"] = np.array(groups, np.int32)
        return parts, exact

    return write


def four_bit_floats(weight, size):
    """(codes, the largest number of every block over 6, the numbers that codes stand for)."""
    table = np.array([*FLOAT_4, *(-x for x in FLOAT_4)])
    scales = abs(weight).reshape(len(weight), -1, size).max(-1) / 6
    scaled = weight.reshape(*scales.shape, size) / scales[..., None]
    return np.abs(scaled[..., None] - table).argmin(-1), scales, table


def ct_nvfp4(weight):
    codes, scales, table = four_bit_floats(weight, 16)
    whole = np.float32(448 / scales.max())
    held = (scales * whole).astype(E4M3)
    exact = table[codes] * (held.astype(np.float64) / float(whole))[..., None]
    packed = stream(codes.reshape(len(weight), -1), 4, 8)
    parts = {"weight_packed": packed, "weight_scale": held, "weight_global_scale": whole.reshape(1)}
    return parts | {"input_global_scale": whole.reshape(1)}, exact.reshape(weight.shape)


def ct_mxfp4(weight):
    codes, scales, table = four_bit_floats(weight, 32)
    exponents = np.floor(np.log2(scales)).astype(np.int64)
    exact = table[codes] * 2.0 ** exponents[..., None]
    parts = {
        "weight_packed": stream(codes.reshape(len(weight), -1), 4, 8),
        "weight_scale": (exponents + 127).astype(np.uint8),
    }
    return parts, exact.reshape(weight.shape)


# --- GPTQ and AWQ ------------------------------------------------------------------------------------


def awq(weight):
    codes, scales, zeros, exact = quantised(weight, groups_of(weight.shape[1], 16), 4)
    return {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.copy()}, exact


def gptq(bits, size=16, stored="v1", order=None, named=True, symmetric=False):
    """Quantise. stored: zero points as they are ("v2"), one less each ("v1"), or as words less these."""

    def write(weight):
        groups = groups_of(weight.shape[1], size)
        if order is not None:
            groups = list(np.random.default_rng(order).permutation(groups))
        codes, scales, zeros, exact = quantised(weight, groups, bits, symmetric)
        held = (zeros.T - 1) % 2**bits if stored == "v1" else zeros.T
        words = stream(held, bits)
        if stored not in ("v1", "v2"):
            words = (words.view(np.uint32) - np.resize(np.array(stored, np.uint32), words.shape[1])).view(
                np.int32
            )
        parts = {
            "qweight": np.ascontiguousarray(stream(codes, bits).T),
            "qzeros": words,
            "scales": scales.T.copy(),
        }
        return parts | ({"g_idx": np.array(groups, np.int32)} if named else {}), exact

    return write


def gptq_config(bits, **more):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": False, "sym": False}
    return settings | more


# As in gptqmodel's convert_gptq_v2_to_v1_format up to version 6: for 3 bits, the first and the third word
# stand the wrong way round.
_LESS_3 = (
    0b00100100100100100100100100100100,
    0b10010010010010010010010010010010,
    0b01001001001001001001001001001001,
)
_LESS = {
    2: (0b01010101010101010101010101010101,),
    4: (0b00010001000100010001000100010001,),
    8: (0b00000001000000010000000100000001,),
}


def by_gptqmodel(version):
    return {"meta": {"quantizer": [f"gptqmodel:{version}"]}}


ANY_SIZE: dict[str, Format] = {
    "fp8_blocks": Format(FP8, fp8_blocks),
    "fp8_blocks_powers": Format(FP8, lambda weight: fp8_blocks(weight, ml_dtypes.float8_e8m0fnu)),
    "fp8_whole": Format(FP8 | {"weight_block_size": None, "activation_scheme": "static"}, fp8_whole),
    "fbgemm": Format({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "float_tensor": Format(compressed("float-quantized", "tensor", 8, "float"), ct_float((0, 0))),
    "float_channel": Format(compressed("float-quantized", "channel", 8, "float"), ct_float((1, 0))),
    "float_block": Format(
        compressed("naive-quantized", "block", 8, "float", block_structure=[16, 8]), ct_float((16, 8))
    ),
    "int8_channel": Format(compressed("int-quantized", "channel", 8), ct_int8(True)),
    "int8_zeros": Format(compressed("naive-quantized", "channel", 8, symmetric=False), ct_int8(False)),
    "packed4": Format(compressed("pack-quantized", "group", group_size=4), ct_packed(4, 4)),
    "packed4_zeros": Format(
        compressed("pack-quantized", "group", group_size=4, symmetric=False), ct_packed(4, 4, False)
    ),
    "packed4_order": Format(compressed("pack-quantized", "group", group_size=4), ct_packed(4, 4, order=1)),
    "packed8_channel": Format(compressed("pack-quantized", "channel", 8), ct_packed(8, 0)),
    "packed3_zeros": Format(
        compressed("pack-quantized", "channel", 3, symmetric=False), ct_packed(3, 0, False)
    ),
}  # fmt: skip
"""Layouts for weights of any size, a multiple of 4 inputs where they have groups."""

WHOLE_WORDS: dict[str, Format] = {
    "nvfp4": Format(compressed("nvfp4-pack-quantized", "tensor_group", 4, "float", group_size=16), ct_nvfp4),
    "mxfp4": Format(compressed("mxfp4-pack-quantized", "group", 4, "float", group_size=32), ct_mxfp4),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}, awq),
    **{f"gptq{bits}": Format(gptq_config(bits), gptq(bits)) for bits in (3, 8)},
    **{f"gptq{bits}_words": Format(gptq_config(bits), gptq(bits, stored=_LESS[bits])) for bits in _LESS},
    "gptq4_v2": Format(gptq_config(4, checkpoint_format="gptq_v2"), gptq(4, stored="v2")),
    "gptq3_v2": Format(gptq_config(3, checkpoint_format="gptq_v2"), gptq(3, stored="v2")),
    "gptq4_order": Format(gptq_config(4, desc_act=True), gptq(4, stored=_LESS[4], order=2)),
    "gptq4_unnamed": Format(gptq_config(4), gptq(4, stored=_LESS[4], named=False)),
    "gptq4_one_group": Format(gptq_config(4, group_size=-1), gptq(4, 10**6, stored=_LESS[4], named=False)),
    "gptq3_gptqmodel_6": Format(gptq_config(3, **by_gptqmodel("6.0.3")), gptq(3, stored=_LESS_3)),
    "gptq3_gptqmodel_7": Format(gptq_config(3, **by_gptqmodel("7.0.0")), gptq(3)),
    # Of symmetric weights the zero points show how they are stored, whatever the config says.
    "gptq4_symmetric": Format(gptq_config(4, sym=True), gptq(4, symmetric=True)),
    "gptq4_symmetric_v2": Format(gptq_config(4, sym=True), gptq(4, stored="v2", symmetric=True)),
    "gptq3_symmetric": Format(gptq_config(3, sym=True), gptq(3, symmetric=True)),
    "gptq3_symmetric_words": Format(gptq_config(3, sym=True), gptq(3, stored=_LESS_3, symmetric=True)),
    "gptq2_own_width": Format(gptq_config(8, dynamic={"+:.*": {"bits": 2}}), gptq(2, stored=_LESS[2])),
}  # fmt: skip
"""Layouts for weights whose sizes are multiples of 32."""

FORMATS = ANY_SIZE | WHOLE_WORDS


# --- checkpoints -------------------------------------------------------------------------------------


def is_quantised(name, tensor):
    """Whether quantisers take a tensor: matrices but embeddings, the output and routers."""
    kept = ("embed", "lm_head", "gate.weight", "conv", "shared_expert_gate", "A_log")
    return name.endswith(".weight") and tensor.ndim == 2 and not any(word in name for word in kept)


def quantise(config: dict[str, Any], weights: Parts, form: Format) -> tuple[dict[str, Any], Parts, Parts]:
    """(config.json, tensors as stored, the plain tensors that these stand for, in float32)."""
    stored, plain = {}, {}
    for name, tensor in weights.items():
        if not is_quantised(name, tensor):
            stored[name] = plain[name] = tensor
            continue
        parts, exact = form.write(tensor)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
        plain[name] = exact.astype(np.float32)
    return config | {"quantization_config": form.config}, stored, plain


def write(folder: Path, config: dict[str, Any], tensors: Parts, shards: int = 1) -> Path:
    """Write a model directory, of one file or of several without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    for i in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, folder / name)
    return folder
