"""Hugging Face directories to models and back: config.json, safetensors shards, tokenizer files.

Weights go block by block from the files into the stacked arrays of the plan, each device reading only the
rows it holds, so that the model is never in memory twice. The contents of the files are handled in
`hf_config.py`, `hf_config_out.py`, `hf_tensors.py` and `tokenizer.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kvjax.base.errors import InputError
from kvjax.hosts.arrays import from_pieces
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.axes import weight_shardings
from kvjax.models.config import Config
from kvjax.models.files import (
    Stored,
    atomic_folder,
    check_folder,
    plain_name,
    read_header,
    read_json,
    save_safetensors,
)
from kvjax.models.hf_config import config_from_hf
from kvjax.models.hf_config_out import config_to_hf
from kvjax.models.hf_experts import experts_apart
from kvjax.models.hf_fetch import fetcher
from kvjax.models.hf_tensors import (
    TensorPart,
    TensorView,
    check_layers,
    further_tokens,
    hf_name,
    match,
    refuse_doubles,
    short_name,
    tensors,
    top_names,
    transposed,
    view,
)
from kvjax.models.layers import Params
from kvjax.models.model import Model, check_single
from kvjax.models.params import Group, check_groups, plan, shapes
from kvjax.models.placement import laid_out, leaves, map_leaves, placement
from kvjax.models.quantised.reader import plain_tensors
from kvjax.models.quantised.settings import beside, quantisation_of
from kvjax.models.tokenizer import Text, read_text, write_text

LARGE_BYTES = 10**9
SHARD_BYTES = 5 * 10**9
_BLOCK_ROWS = 256
_FLOATS = ("float32", "float16", "bfloat16")


def load_hf(
    path: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    sharding: Any = None,
    groups: tuple[Group, ...] | None = None,
    progress: bool = True,
    on_mesh: OnMesh | None = None,
) -> Model:
    """Load a Hugging Face directory (config.json, safetensors, tokenizer files) into `dtype`.

    sharding: where the parameters go: one `jax.sharding.Sharding` for all, a function (path, shape) ->
    Sharding with paths such as "embed" or "layers.0.q", or a tree of Shardings like the parameters. groups:
    how layers are stacked, `plan(config)` unless given. progress: shows a bar for models larger than 1 GB.
    on_mesh: places the parameters, and all caches of the model, by rules, instead of `sharding`.

    Raises InputError, before any weight is read, that says what is wrong with the directory, naming tensors
    that are missing, extra or wrongly shaped.

    >>> from kvjax.io.load import SHIPPED
    >>> load_hf(SHIPPED / "recall-tiny")(jnp.zeros((1, 4), jnp.int32)).shape
    (1, 4, 220)
    """
    dtype = check_dtype(dtype)
    folder = check_folder(path)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} is not a model directory: it has no config.json (it has {_contents(folder)})"
        )
    data, found = beside(folder, read_json(folder / "config.json")), _headers(folder)
    check_layers(data, found)
    config = config_from_hf(data)
    if (quantisation := quantisation_of(data)) is not None:
        found = plain_tensors(found, quantisation, tensors(config))
    found = experts_apart(found, tensors(config))
    refuse_doubles(found)
    config = _untie(config, found)
    text = read_text(folder)
    return assemble(config, found, text, folder.resolve().name, dtype, sharding, groups, progress, on_mesh)


def assemble(
    config: Config,
    found: Mapping[str, Stored],
    text: Text,
    name: str,
    dtype: np.dtype,
    sharding: Any,
    groups: tuple[Group, ...] | None,
    progress: bool,
    on_mesh: OnMesh | None,
) -> Model:
    """Build the model of a config from tensors under Hugging Face names; all else as of `load_hf`.

    Raises InputError if tensors are missing, extra or wrongly shaped, before any is read.
    """
    stored = match(config, found)
    if further := further_tokens(config, found):
        note = f"{name}: {len(further)} tensors predict further tokens ({further[0]}, ...) and are not read"
        warnings.warn(f"{note}: kvjax predicts the next token alone", UserWarning, stacklevel=3)
    layers = check_groups(config, groups or plan(config))
    if on_mesh is not None:
        sharding = weight_shardings(config, layers, on_mesh)
    params = _read_params(config, stored, dtype, sharding, layers, progress)
    return Model(config, params, **text._asdict(), name=name, on_mesh=on_mesh)


def check_dtype(dtype: Any) -> np.dtype:
    """Check and return the dtype of a model's parameters; InputError unless it is a supported float."""
    with contextlib.suppress(TypeError):
        if (known := jnp.dtype(dtype)).name in _FLOATS:
            return known
    raise InputError(f"dtype {dtype!r} is not one a model runs in, expected {', '.join(_FLOATS)}")


def _contents(folder: Path) -> str:
    names = sorted(f.name for f in folder.iterdir())
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "no files"


def _headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of the directory: from a single file, the shards of its index, or all its safetensors."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise InputError(
                f"{index} has no weight_map: fetch it again, or remove it to read every safetensors file"
            )
        names = [plain_name(name, index, "weight_map") for name in weight_map.values()]
        files = [folder / name for name in sorted(set(names))]
        absent = [f.name for f in files if not f.is_file()]
        if absent:
            raise InputError(
                f"{folder} lacks {', '.join(absent)}, named in {index.name}: fetch the missing shards"
            )
    else:
        # Mistral ships a second copy of its weights under that name.
        files = [f for f in sorted(folder.glob("*.safetensors")) if not f.name.startswith("consolidated")]
    if not files:
        raise InputError(
            f"{folder} has no safetensors (it has {_contents(folder)}): save the model with "
            "`save_pretrained(..., safe_serialization=True)` in transformers, and load that directory"
        )
    out: dict[str, Stored] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in out:
                raise InputError(
                    f"{name} is in {out[name].path.name} and in {file.name}: remove one of the files"
                )
            out[name] = tensor
    return out


def _untie(config: Config, found: Mapping[str, Stored]) -> Config:
    """`config` untied if the checkpoint has an output matrix that differs from the embeddings."""
    by_short = {short_name(name): tensor for name, tensor in found.items()}
    embed, unembed = (by_short.get(name) for name in (top_names(config)[0], "lm_head.weight"))
    if not config.tied or embed is None or unembed is None:
        return config
    return config if embed.equals(unembed) else dataclasses.replace(config, tied=False)


def _blocks(start: int, stop: int) -> Iterator[slice]:
    """[start, stop) in pieces small enough to be in memory beside the array that they are copied to."""
    return (slice(i, min(i + _BLOCK_ROWS, stop)) for i in range(start, stop, _BLOCK_ROWS))


# --- reading -----------------------------------------------------------------------------------------


def _read_params(
    config: Config,
    stored: Mapping[str, Stored],
    dtype: np.dtype,
    sharding: Any,
    groups: tuple[Group, ...],
    progress: bool,
) -> Params:
    places = _places(config, stored)
    tree = shapes(config, groups)
    total = sum(int(np.prod(s)) for _, s in leaves(tree)) * dtype.itemsize
    placed = placement(tree, sharding)
    with _bar(total, progress) as advance:

        def leaf(path: str, shape: tuple[int, ...]) -> jax.Array:
            def read(index: Any) -> np.ndarray:
                return _read_leaf(path, shape, groups, places, index, dtype)

            where = placed(path, shape)
            if where is None:
                out = jax.device_put(read((slice(None),) * len(shape)))
            else:
                out = from_pieces(shape, where, read)
            advance(out.nbytes)
            return laid_out(out)

        return map_leaves(leaf, tree)


Places = dict[tuple[str, int | None, int | None], list[tuple[Stored | TensorView, TensorPart]]]


def _places(config: Config, stored: Mapping[str, Stored]) -> Places:
    """Return a map (leaf, layer, expert) -> the stored tensors that hold it, and where."""
    places: Places = {}
    for name, tensor in tensors(config).items():
        for part in tensor.parts:
            places.setdefault((part.leaf, part.layer, part.expert), []).append(
                (view(stored[name], part), part)
            )
    return places


def _read_leaf(
    path: str,
    shape: tuple[int, ...],
    groups: tuple[Group, ...],
    places: Places,
    index: tuple[slice, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """Read the piece `index` of a leaf, in our orientation and layer stacking."""
    out = np.empty([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], dtype)
    if not path.startswith("layers."):
        [(tensor, part)] = places[path, None, None]
        _copy(out, tensor, part, index, transpose=transposed(path))
        return out
    _, group, name = path.split(".")
    layers = groups[int(group)].layers
    for row, layer in zip(out, layers[index[0]], strict=True):
        if row.ndim < 3:
            _gather(row, places[name, layer, None], index[1:], shape[-1])
            continue
        for one, expert in zip(row, range(shape[1])[index[1]], strict=True):
            _gather(one, places[name, layer, expert], index[2:], shape[-1])
    return out


def _gather(
    out: np.ndarray,
    held: list[tuple[Stored | TensorView, TensorPart]],
    index: tuple[slice, ...],
    columns: int,
) -> None:
    """Fill `out` with the piece `index` of a layer's parameter, from every tensor that holds part of it."""
    first, last, _ = index[-1].indices(columns)
    for tensor, part in held:
        start, stop = max(first, part.columns.start), min(last, part.columns.stop)
        if start < stop:
            within = (*index[:-1], slice(start - part.at, stop - part.at))
            _copy(out[..., start - first : stop - first], tensor, part, within, transpose=out.ndim == 2)


def _copy(
    out: np.ndarray, stored: Stored | TensorView, part: TensorPart, index: tuple[slice, ...], transpose: bool
) -> None:
    """Fill `out` with the piece `index` of a parameter, a block of the tensor's rows at a time.

    A transposed copy of a large matrix in one piece would miss the processor's cache all the time.
    """
    rows, *columns = index[::-1] if transpose else index
    target = out.T if transpose else out
    if part.rows is not None:
        wanted = part.rows[rows]
        start, stop = int(wanted.min()), int(wanted.max()) + 1
        target[...] = _read(stored, slice(start, stop), *columns)[wanted - start]
        return
    first, last, _ = rows.indices(part.stop - part.start)
    for block in _blocks(first, last):
        piece = _read(stored, slice(part.start + block.start, part.start + block.stop), *columns)
        target[block.start - first : block.stop - first] = piece


def _read(stored: Stored | TensorView, *index: slice) -> np.ndarray:
    """`stored.read` for a tensor that may have more axes than the parameter, all of length one.

    Such axes are a convolution's single input channel, and those along which a decay was broadcast when
    saved.
    """
    thin = [axis for axis, n in enumerate(stored.shape) if n == 1][: len(stored.shape) - len(index)]
    rest = iter(index)
    spans = (slice(0, 1) if axis in thin else next(rest) for axis in range(len(stored.shape)))
    return np.squeeze(stored.read(*spans), tuple(thin))


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    if not wanted or total < LARGE_BYTES or not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda done: bar.advance(task, done)


# --- writing -----------------------------------------------------------------------------------------


def save_hf(
    model: Model, path: str | os.PathLike[str], *, shard_bytes: int = SHARD_BYTES, overwrite: bool = False
) -> None:
    """Write a model as a Hugging Face directory that transformers loads, atomically.

    Weights keep their dtype, in one file or, beyond `shard_bytes`, in several with an index.
    overwrite: whether it may replace an older save at `path`. For Kimi Linear, transformers needs its
    authors' code too, which is not written.

    Raises InputError if `path` holds something else or cannot be written, or if no class of transformers
    computes what the model's config says.
    """
    check_single(model, "no class of transformers computes it, use kvjax.io.checkpoint.save_checkpoint")
    data = config_to_hf(model.config)
    dtype = model.params["embed"].dtype
    stops = list(model.stop_ids)
    # Without them, the classes would fill in ids of their own vocabulary.
    data |= {"bos_token_id": _special_id(model, "bos_token"), "pad_token_id": _special_id(model, "pad_token")}
    data |= {"eos_token_id": stops if len(stops) > 1 else next(iter(stops), None), "torch_dtype": dtype.name}
    sizes = {hf_name(name, model.config): tensor.shape for name, tensor in tensors(model.config).items()}
    fetch = fetcher(model)
    with atomic_folder(path, "config.json", overwrite=overwrite) as folder:
        (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")
        write_text(model, folder)
        files = _split(sizes, dtype.itemsize, shard_bytes)
        for file, names in files.items():
            weights = {name: np.ascontiguousarray(fetch(name), dtype) for name in names}
            save_safetensors(weights, folder / file, {"format": "pt"})
        if len(files) > 1:
            total = sum(int(np.prod(s)) for s in sizes.values()) * dtype.itemsize
            index = {n: file for file, names in files.items() for n in names}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (folder / "model.safetensors.index.json").write_text(text + "\n")


def _special_id(model: Model, name: str) -> int | None:
    token = model.special_tokens.get(name)
    return None if model.tokenizer is None or token is None else model.tokenizer.token_to_id(token)


def _split(sizes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> dict[str, list[str]]:
    """File name -> its tensors, in order; no file exceeds `limit` bytes unless a single tensor does."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in sizes.items():
        size = int(np.prod(shape)) * itemsize
        if used + size > limit and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    n = len(shards)
    return {f"model-{i + 1:05d}-of-{n:05d}.safetensors": names for i, names in enumerate(shards)}
