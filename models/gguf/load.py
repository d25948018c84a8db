"""Loads a model from a GGUF file: by the Hugging Face loader, which is given other files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import OnMesh
from kvjax.models.config import Config
from kvjax.models.gguf.config import config_of
from kvjax.models.gguf.reader import Gguf, check_kinds, open_gguf
from kvjax.models.gguf.text import text_of
from kvjax.models.gguf.weights import stored_tensors
from kvjax.models.hf import assemble, check_dtype
from kvjax.models.hf_config import config_from_hf
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
    """Loads a GGUF file, of a split one any of its files; arguments as of `kvjax.models.hf.load_hf`.

    Weights are decoded a few rows at a time into `dtype`, so that the model is never in memory twice. The
    tokenizer, the chat template and the ids that end an answer are those of its metadata.

    Raises InputError that says what is wrong with the file, before any weight is read: an architecture, a
    type of weights or a tokenizer that is not read, a file cut short, tensors that do not fit its metadata.
    """
    dtype = check_dtype(dtype)
    file = open_gguf(Path(path))
    config = config_of_gguf(file)
    check_kinds(file)
    found, text = stored_tensors(file, config), text_of_gguf(file)
    name = Path(path).name.removesuffix(".gguf")
    return assemble(config, found, text, name, dtype, sharding, groups, progress, on_mesh)


def config_of_gguf(file: Gguf) -> Config:
    """The config of an open file's model. Raises InputError as `load_gguf` does."""
    with _named(file):
        return config_from_hf(config_of(file))


def text_of_gguf(file: Gguf) -> Text:
    """What an open file says about text. Raises InputError as `load_gguf` does."""
    with _named(file):
        return text_of(file)


def check_gguf(path: str | os.PathLike[str], shown: str) -> None:
    """Raises InputError, which names the file as `shown`, where `load_gguf` would not read it."""
    try:
        file = open_gguf(Path(path))
        config = config_of_gguf(file)
        check_kinds(file)
        stored_tensors(file, config)
        text_of_gguf(file)
    except InputError as error:
        raise InputError(str(error).replace(str(path), shown)) from error


@contextlib.contextmanager
def _named(file: Gguf) -> Iterator[None]:
    """Has errors about a config.json name the file instead, as do those of values of a wrong type."""
    try:
        yield
    except InputError as error:
        if "config.json" not in str(error):
            raise
        raise InputError(str(error).replace("config.json", f"the metadata of {file.path}")) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{file.path} has metadata that make no sense ({error}): fetch or convert it again"
        ) from error
