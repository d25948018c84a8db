"""RWKV-7 files of their authors: a `.pth` of tensors, read without torch; nothing in it is run."""

from __future__ import annotations

import math
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.files import Stored, first_bytes
from kvjax.models.hf import assemble, check_dtype
from kvjax.models.hf_config import config_from_hf, naming_file
from kvjax.models.mixers.rwkv import EPS
from kvjax.models.model import Model
from kvjax.models.params import Group
from kvjax.models.tokenizer import Text

_DTYPES: dict[str, tuple[str, Any]] = {
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
}
_TOP = {"emb": "embeddings", "ln_out": "norm", "head": "lm_head"}
_ROOMS = {"att": "attn", "ffn": "ffn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
_MAPS = {
    "receptance": "r_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "ln_x": "g_norm",
}
_LOW_RANK = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}


def is_pth(path: Path) -> bool:
    """Whether a path names a torch file."""
    return path.suffix == ".pth" and path.is_file()


def load_rwkv(
    path: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    sharding: Any = None,
    groups: tuple[Group, ...] | None = None,
    progress: bool = True,
    on_mesh: OnMesh | None = None,
) -> Model:
    """Load an RWKV-7 `.pth` of its authors; arguments as of `kvjax.models.hf.load_hf`.

    Sizes are those of its tensors, which are read a few rows at a time. It has no tokenizer. Raises
    InputError for other files, for older versions of RWKV, and for tensors that do not fit together.
    """
    dtype, path = check_dtype(dtype), Path(path)
    arrays = named_as_in_fla(read_pth(path), path)
    with naming_file(path, "tensors"):
        config = config_from_hf(sizes_of(arrays, path))
    opened = PthFile(arrays)
    kinds = {np.dtype(kind): name for name, kind in _DTYPES.values()}
    found = {n: Stored(path, opened, n, kinds[x.dtype], x.shape) for n, x in arrays.items()}
    text = Text(None, None, (), {})
    return assemble(config, found, text, path.stem, dtype, sharding, groups, progress, on_mesh)


class PthFile(NamedTuple):
    """Plays the role of an open file in `Stored`."""

    of: dict[str, np.ndarray]

    def get_slice(self, name: str) -> np.ndarray:
        return self.of[name]


def sizes_of(arrays: dict[str, np.ndarray], path: Path) -> dict[str, Any]:
    """config.json, from the shapes of tensors."""
    numbers = [int(n.split(".")[2]) for n in arrays if n.startswith("model.layers.")]
    layers = 1 + max(numbers, default=-1)
    upper = "model.layers.1." if layers > 1 else "model.layers.0."
    try:
        vocab, d = arrays["model.embeddings.weight"].shape
        low = {n: arrays[f"model.layers.0.attn.{n}_lora.lora.0.weight"].shape[0] for n in "wag"}
        values = arrays.get(f"{upper}attn.v_lora.lora.0.weight")
        return {
            "model_type": "rwkv7",
            "vocab_size": vocab,
            "hidden_size": d,
            "num_hidden_layers": layers,
            "head_dim": arrays["model.layers.0.attn.r_k"].shape[1],
            "intermediate_size": arrays["model.layers.0.ffn.key.weight"].shape[0],
            "decay_low_rank_dim": low["w"],
            "a_low_rank_dim": low["a"],
            "gate_low_rank_dim": low["g"],
            "v_low_rank_dim": 32 if values is None else values.shape[0],
            "norm_first": "model.layers.0.pre_norm.weight" in arrays,
            "head_norm_eps": EPS,
        }
    except (KeyError, ValueError, IndexError) as error:
        raise InputError(
            f"{path} is no RWKV-7 of its authors ({error} is missing or has another shape): expected tensors "
            "such as blocks.0.att.w1; older versions of RWKV are not read"
        ) from error


def named_as_in_fla(arrays: dict[str, np.ndarray], path: Path) -> dict[str, np.ndarray]:
    """Rename and reshape the tensors as flash-linear-attention has them."""
    out = {}
    for name, x in arrays.items():
        new = _name(name)
        if new is None:
            raise InputError(
                f"{path} holds {name}, which is no tensor of RWKV-7: expected blocks.0.att.w1 ..."
            )
        if re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            # Layer 0 has no values before its own; some files hold these all the same.
            continue
        x = x.T if re.search(r"_lora\.lora\.[02]\.weight$", new) else x
        out[new] = (
            x if ".attn.x_" in new else np.squeeze(x, tuple(i for i, n in enumerate(x.shape) if n == 1))
        )
    return out


def _name(name: str) -> str | None:
    first, *rest = name.split(".")
    if first in _TOP and len(rest) == 1:
        return f"{'' if first == 'head' else 'model.'}{_TOP[first]}.{rest[0]}"
    if first != "blocks" or len(rest) < 3 or not rest[0].isdigit() or rest[1] not in _ROOMS:
        return None
    number, room, part, *end = rest
    if room == "att" and re.fullmatch("[wvag][012]", part):
        part = f"{part[0]}_lora.lora.{_LOW_RANK[part[1]]}"
    elif room == "att":
        part = _MAPS.get(part, part)
    return ".".join(("model.layers", number, _ROOMS[room], part, *end))


# --- the file ----------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """The dtype of a stored array."""

    name: str


class _Tensors(pickle.Unpickler):
    """Unpickles a dict of tensors alone: every other class is refused, and nothing is imported or called."""

    def __init__(self, file: Any, path: Path, at: dict[str, int]):
        super().__init__(file)
        self.path, self.at = path, at

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuilt
        if module == "torch" and name in _DTYPES:
            return _Kind(name)
        raise InputError(
            f"{self.path} holds a {module}.{name}, expected tensors of floats alone: save the model's "
            "state_dict, or convert it to safetensors"
        )

    def persistent_load(self, pid: Any) -> tuple[_Kind, int]:
        _, kind, key, _, _ = pid
        return kind, self.at[str(key)]

    def _rebuilt(
        self, storage: tuple[_Kind, int], offset: int, shape: Any, stride: Any, *_: Any
    ) -> np.ndarray:
        (kind, start), shape = storage, tuple(shape)
        dtype = np.dtype(_DTYPES[kind.name][1])
        whole = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if [s for s, n in zip(stride, shape, strict=True) if n > 1] != [
            s for s, n in zip(whole, shape, strict=True) if n > 1
        ]:
            raise InputError(f"{self.path} holds a tensor of strides {tuple(stride)}: save it contiguous")
        at = start + offset * dtype.itemsize
        return np.memmap(self.path, dtype, "r", at, shape)


def read_pth(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a torch file by name, mapped into memory. InputError for anything else."""
    first_bytes(path)
    try:
        with zipfile.ZipFile(path) as file:
            entries = {info.filename: info for info in file.infolist()}
            [listing] = [name for name in entries if name.endswith("/data.pkl")]
            room = listing.removesuffix("data.pkl") + "data/"
            at = {n.removeprefix(room): _start(path, x) for n, x in entries.items() if n.startswith(room)}
            with file.open(listing) as listed:
                found = _Tensors(listed, path, at).load()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as a file of tensors that torch saved ({type(error).__name__}: {error}): "
            "fetch it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(x, np.ndarray) for x in found.values()):
        raise InputError(f"{path} holds more than tensors by name: save the model's state_dict")
    return dict(found)


def _start(path: Path, entry: zipfile.ZipInfo) -> int:
    """Where the bytes of an uncompressed entry begin."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise InputError(f"{path} is compressed: save it again with torch.save")
    with open(path, "rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)
    return (
        entry.header_offset
        + 30
        + int.from_bytes(header[26:28], "little")
        + int.from_bytes(header[28:30], "little")
    )
