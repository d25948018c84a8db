"""Loads a model from a GGUF file, through the Hugging Face loader with converted files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.config import Config
from kvjax.models.gguf.config import config_of
from kvjax.models.gguf.reader import Gguf, check_kinds, open_gguf
from kvjax.models.gguf.text import text_of
from kvjax.models.gguf.weights import is_later, stored_tensors
from kvjax.models.hf import assemble, check_dtype
from kvjax.models.hf_config import config_from_hf, naming_file
from kvjax.models.model import Model
from kvjax.models.params import Group
from kvjax.models.tokenizer import Text


def load_gguf(
    path: str | os.PathLike[str],
    *,
    dtype: Any = jnp.float32,
    sharding: Any = None,
    groups: tuple[Group, ...] | None = None,
    progress: bool = True,
    on_mesh: OnMesh | None = None,
) -> Model:
    """Load a GGUF file, or any file of a split one; arguments as of `kvjax.models.hf.load_hf`.

    Weights are decoded a few rows at a time into `dtype`, so that the model is never in memory twice. The
    tokenizer, the chat template and the stop ids come from its metadata.

    Raises InputError, before any weight is read, that says what is wrong with the file: an unsupported
    architecture, weight type or tokenizer, a file cut short, tensors that do not fit its metadata.
    """
    dtype = check_dtype(dtype)
    file = open_gguf(Path(path))
    config = config_of_gguf(file)
    check_kinds(file)
    found, text = stored_tensors(file, config), text_of_gguf(file)
    name = Path(path).name.removesuffix(".gguf")
    if later := [tensor for tensor in file.tensors if is_later(tensor, config)]:
        note = f"{name}: {len(later)} tensors predict further tokens ({later[0]}, ...) and are not read"
        warnings.warn(f"{note}: kvjax predicts the next token alone", UserWarning, stacklevel=2)
    return assemble(config, found, text, name, dtype, sharding, groups, progress, on_mesh)


def config_of_gguf(file: Gguf) -> Config:
    """Read the config of an open file's model. Raises InputError as `load_gguf` does."""
    with naming_file(file.path, "metadata"):
        return config_from_hf(config_of(file))


def text_of_gguf(file: Gguf) -> Text:
    """Read the text data of an open file. Raises InputError as `load_gguf` does."""
    with naming_file(file.path, "metadata"):
        return text_of(file)


def check_gguf(path: str | os.PathLike[str], shown: str) -> None:
    """Raise InputError, which names the file as `shown`, if `load_gguf` would refuse it."""
    try:
        file = open_gguf(Path(path))
        config = config_of_gguf(file)
        check_kinds(file)
        stored_tensors(file, config)
        text_of_gguf(file)
    except InputError as error:
        raise InputError(str(error).replace(str(path), shown)) from error
