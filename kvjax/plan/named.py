"""Shapes of well-known models by name, from their public config.json; `shapes.json` has the sources."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_config import config_from_hf
from kvjax.models.mixers.attention import Attention

TABLE = Path(__file__).with_name("shapes.json")
ALIASES = {"llama-3-405b": "llama-3.1-405b", "deepseek-v3-671b": "deepseek-v3", "gemma-3": "gemma-3-27b"}


class NamedModel(NamedTuple):
    """A model of the table: its config, the source, and how it differs from the published one."""

    name: str
    config: Config
    source: str
    about: str = ""


@cache
def rows() -> dict[str, dict[str, Any]]:
    """Read the table: name -> its "source", its config.json and, if needed, "about"."""
    return json.loads(TABLE.read_text())


def names() -> list[str]:
    """Return every name, in the order of the table.

    >>> names()[0]
    'llama-3-8b'
    """
    return list(rows())


def named(name: str) -> NamedModel:
    """Find the model of that name. Raises InputError, with the nearest name, if there is none.

    >>> named("Llama-3-70B").config.layers
    80
    """
    known = name.lower()
    known = ALIASES.get(known, known)
    if known not in rows():
        near = difflib.get_close_matches(known, [*rows(), *ALIASES], 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(rows())}"
        raise InputError(f"there is no model named {name!r}, nor a directory of that name: {hint}")
    row = rows()[known]
    return NamedModel(known, _config(row["config"]), row["source"], row.get("about", ""))


def _config(data: Mapping[str, Any]) -> Config:
    return _yoco(data) if data["model_type"] == "yoco" else config_from_hf(data)


def _yoco(data: Mapping[str, Any]) -> Config:
    """Windows in the lower half; the first layer above stores all tokens, which all layers above it read."""
    layers, heads = data["num_hidden_layers"], data["num_attention_heads"]
    half = layers // 2
    mixers = (Attention(kv_heads=heads),) * half + (Attention(),) + (Attention(source=half),) * (half - 1)
    windows = tuple(data["sliding_window"] if i < half else None for i in range(layers))
    return dataclasses.replace(_as_llama(data), mixers=mixers, windows=windows, family="yoco")


def _as_llama(data: Mapping[str, Any]) -> Config:
    return config_from_hf({**data, "model_type": "llama"})
