"""Loading a model: from a directory or GGUF file, by the name of a shipped one, or from the hub."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvjax import models
from kvjax.base.errors import InputError
from kvjax.io.downloads import KNOWN, fetched
from kvjax.mesh.on_mesh import on_mesh
from kvjax.models.axes import note_whole, spread_params
from kvjax.models.files import check_folder
from kvjax.models.gguf.load import load_gguf, text_of_gguf
from kvjax.models.gguf.reader import SPLIT, is_gguf, open_gguf
from kvjax.models.hf import load_hf
from kvjax.models.model import Model, check_single
from kvjax.models.params import Group
from kvjax.models.rwkv_pth import is_pth, load_rwkv
from kvjax.models.tokenizer import Text, read_text

SHIPPED = Path(models.__file__).parent / "zoo"
_WANTED = ("*.json", "*.safetensors", "*.jinja")


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    sharding: Any = None,
    groups: tuple[Group, ...] | None = None,
    progress: bool = True,
    mesh: Any = None,
    rules: Any = None,
) -> Model:
    """Load a Hugging Face directory, a GGUF file, a kvjax checkpoint, a shipped model or "org/name".

    Args:
        path_or_name: looked up in this order: a path on disk, a shipped model ("recall-tiny"), a model
            fetched by `kvjax get` ("smollm2-135m"), the Hugging Face hub ("org/name").
        dtype: of the weights; those of a GGUF file (llama.cpp) are decoded into it.
        sharding: where the parameters go, as `kvjax.models.hf.load_hf` takes it; excludes `mesh`.
        groups: how layers are stacked, `kvjax.models.params.plan(config)` unless given.
        progress: shows a bar for models larger than 1 GB.
        mesh: the devices over which weights and all caches of the model are split, a `jax.sharding.Mesh` or
            a text such as "data=2,model=4". All functions then run there. Heads, channels or a vocabulary
            that do not divide over the mesh are replicated, with a UserWarning.
        rules: how they are split: "tensor", another name of `kvjax.mesh.rules.PRESETS`, or a `kvjax.Rules`.

    Returns:
        The model; a checkpoint may hold a `kvjax.api.block_transformer.BlockTransformer` instead.

    Raises:
        InputError: for anything that cannot be loaded; the message says what to do.

    >>> load("recall-tiny").config.layers
    4
    """
    options: dict[str, Any] = dict(dtype=dtype, sharding=sharding, groups=groups, progress=progress)
    options |= dict(on_mesh=on_mesh(mesh, rules))
    if sharding is not None and mesh is not None:
        raise InputError("sharding= and mesh= both say where the weights go: leave one of them out")
    if not isinstance(path_or_name, str | os.PathLike):
        raise InputError(
            f"the model is {path_or_name!r}, expected a path or a name, as in kvjax.load('recall-tiny')"
        )
    model = _load_path(model_path(path_or_name), options)
    if model.on_mesh is not None:
        note_whole(model.config, model.on_mesh)
    return model


def model_path(path_or_name: str | os.PathLike[str]) -> Path:
    """Find the directory or GGUF file of a `load` argument. "org/name" is fetched.

    Raises InputError if there is none.

    >>> model_path("recall-tiny").name
    'recall-tiny'
    """
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if os.path.lexists(path):
        return on_disk(path)
    if name in shipped():
        return SHIPPED / name
    if (file := fetched().get(name)) is not None:
        return file
    if name in KNOWN:
        return _known(name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _download(name)
    hint = f"; shipped models: {', '.join(shipped())}"
    if near := difflib.get_close_matches(name, [*shipped(), *fetched(), *KNOWN], 1):
        hint = f"; did you mean {'the shipped model ' if near[0] in shipped() else ''}{near[0]}?"
    raise InputError(
        f"{name} does not exist, expected a model directory, a GGUF file, org/name, or a shipped name{hint}"
    )


def on_disk(path: Path) -> Path:
    """Find a model's directory or GGUF file (perhaps a directory's only one). InputError for neither."""
    if is_gguf(path) or is_pth(path):
        return path
    folder = check_folder(path)
    files = sorted(folder.glob("*.gguf"))
    if not files or any((folder / name).is_file() for name in ("config.json", "kvjax.json")):
        return folder
    whole = [file for file in files if not SPLIT.fullmatch(file.name)] or files[:1]
    if len(whole) > 1:
        raise InputError(f"{folder} has several GGUF files, {', '.join(f.name for f in whole[:8])}: name one")
    return whole[0]


def load_text(path_or_name: str | os.PathLike[str]) -> Text:
    """Load the tokenizer and other text data of a `load` argument. Raises InputError as `load` does."""
    path = model_path(path_or_name)
    if is_pth(path):
        return Text(None, None, (), {})
    return text_of_gguf(open_gguf(path)) if is_gguf(path) else read_text(path)


def spread(model: Model, mesh: Any, rules: Any) -> Model:
    """Split a model that is in memory over the devices of a mesh, as `load(..., mesh=, rules=)` does.

    Args:
        model: a model of one decoder; it is not changed.
        mesh: a `jax.sharding.Mesh` or a text such as "data=2,model=4".
        rules: a name of `kvjax.mesh.rules.PRESETS`, or a `kvjax.Rules`.

    Returns:
        The model with its weights on the mesh. Sizes that do not divide over the mesh are replicated, with a
        UserWarning that names them.

    Raises:
        InputError: for an invalid mesh or invalid rules, and for a model of two decoders.

    >>> spread(load("recall-tiny"), "model=1", "tensor").on_mesh.rules.heads
    'model'
    """
    check_single(model, "place its weights with sharding= where it is loaded")
    on = on_mesh(mesh, rules)
    assert on is not None
    note_whole(model.config, on)
    return dataclasses.replace(model, params=spread_params(model.params, model.config, on), on_mesh=on)


def shipped() -> list[str]:
    """Names of the models that come with kvjax."""
    return sorted(folder.name for folder in SHIPPED.iterdir() if folder.is_dir())


def _load_path(folder: Path, options: dict[str, Any]) -> Model:
    if is_gguf(folder):
        return load_gguf(folder, **options)
    if is_pth(folder):
        return load_rwkv(folder, **options)
    # A local import, because Orbax takes half a second to import.
    from kvjax.io.checkpoint import MARKER, load_checkpoint

    if (folder / MARKER).is_file():
        return load_checkpoint(folder, **{k: v for k, v in options.items() if k != "progress"})
    return load_hf(folder, **options)


def _known(name: str) -> Path:
    """Return the hub original of a model that `kvjax get` fetches, if the hub can be used."""
    known = KNOWN[name]
    try:
        return _download(known.hub)
    except InputError as error:
        raise InputError(
            f"{name} is not here yet: run `kvjax get {name}` ({known.bytes / 1e6:.0f} MB, {known.licence}); "
            f"its original, {known.hub}, could not be fetched from huggingface.co either"
        ) from error


def _download(name: str) -> Path:
    """Find the local directory of a Hugging Face hub repository, fetched or cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its terms on huggingface.co, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(f"{name} is neither a directory here nor a repository on huggingface.co") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"{name} is no directory here and could not be fetched from huggingface.co "
            f"({type(error).__name__}; no network?): fetch it on a connected machine with "
            f"`hf download {name} --local-dir DIR`, and pass DIR"
        ) from error
