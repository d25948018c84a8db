"""How a model is loaded: from a directory on disk, by the name of a shipped one, or from the hub."""

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
from kvjax.mesh.on_mesh import on_mesh
from kvjax.models.axes import note_whole, spread_params
from kvjax.models.files import check_folder
from kvjax.models.hf import load_hf
from kvjax.models.model import Model, check_single
from kvjax.models.params import Group

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
    """Loads a Hugging Face directory, a kvjax checkpoint, a shipped model ("recall-tiny") or "org/name".

    A name is looked up in this order: a path on disk, a shipped model, the Hugging Face hub. A checkpoint
    may hold a `kvjax.api.block_transformer.BlockTransformer`. dtype, sharding, groups, progress: as of
    `load_hf`.

    mesh, rules: the devices that weights and all caches of the model are split over, a `jax.sharding.Mesh` or
    words such as "data=2,model=4", and how: "tensor", another name of `kvjax.mesh.rules.PRESETS`, or a
    `kvjax.Rules`. Whatever is given the model then runs there. Heads, channels or a vocabulary that do not
    divide over the mesh stay whole on every device, with a UserWarning that names them.

    Raises InputError for anything that cannot be loaded, and says what to do.

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
    model = _load_folder(model_folder(path_or_name), options)
    if model.on_mesh is not None:
        note_whole(model.config, model.on_mesh)
    return model


def model_folder(path_or_name: str | os.PathLike[str]) -> Path:
    """The directory of what `load` takes: a path, a shipped model's name, or "org/name", which is fetched.

    Raises InputError where there is none.

    >>> model_folder("recall-tiny").name
    'recall-tiny'
    """
    name = os.fspath(path_or_name)
    path = Path(name).expanduser()
    if os.path.lexists(path):
        return check_folder(path)
    if name in shipped():
        return SHIPPED / name
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return _download(name)
    near = difflib.get_close_matches(name, shipped(), 1)
    hint = (
        f"; did you mean the shipped model {near[0]}?"
        if near
        else f"; shipped models: {', '.join(shipped())}"
    )
    raise InputError(f"{name} does not exist, expected a model directory, org/name, or a shipped name{hint}")


def spread(model: Model, mesh: Any, rules: Any) -> Model:
    """A model that is in memory, split over the devices of a mesh, as `load(..., mesh=, rules=)` splits one.

    Sizes that do not divide over the mesh stay whole on every device, with a UserWarning that names them.
    Raises InputError for an invalid mesh or invalid rules.

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


def _load_folder(folder: Path, options: dict[str, Any]) -> Model:
    # Here and not above: it imports Orbax, which takes half a second.
    from kvjax.io.checkpoint import MARKER, load_checkpoint

    if (folder / MARKER).is_file():
        return load_checkpoint(folder, **{k: v for k, v in options.items() if k != "progress"})
    return load_hf(folder, **options)


def _download(name: str) -> Path:
    """The directory of a repository of the Hugging Face hub, fetched or from its cache."""
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
