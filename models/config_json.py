"""A `Config` as JSON and back: plain fields, and for every layer the words for its mixer and feed-forward.

A class is looked up by name among those already defined (`LayerPart.registered`); no name in a file causes an
import. Importing this module imports every file of `kvjax.models.mixers`, so that a new mixer needs no entry
in a list. A user's own mixers are found if their module was imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, TypeVar

from kvjax.base.ranges import FieldError
from kvjax.models import gated_mlps, mixers
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import FeedForward
from kvjax.models.mixer import Mixer
from kvjax.ops.base.long_rope import LongRope
from kvjax.ops.base.rope import Rope

C = TypeVar("C")

assert gated_mlps  # Its classes are found by name, too.
for _file in pkgutil.iter_modules(mixers.__path__):
    importlib.import_module(f"{mixers.__name__}.{_file.name}")

MIXERS: dict[str, type[Mixer]] = Mixer.registered
"""Every mixer by the name of its class: those of `kvjax.models.mixers`, and of what the user imported."""
MLPS: dict[str, type[FeedForward]] = FeedForward.registered
"""Every feed-forward by the name of its class."""


def config_to_json(config: Config | BlockConfig) -> dict[str, Any]:
    """Write the fields of a config as JSON data; a layer's words as {"word": its name, field: value, ...}.

    >>> from kvjax.models.mixers.attention import Attention
    >>> config = Config(32, 16, 1, 2, 1, 8, 32, mixers=(Attention(gate=True),))
    >>> config_to_json(config)["mixers"]
    [{'word': 'Attention', 'gate': True}]
    """
    if isinstance(config, BlockConfig):
        both = {name: config_to_json(getattr(config, name)) for name in ("blocks", "tokens")}
        return {"word": "BlockConfig", **both, "length": config.length, "prefix": config.prefix}
    out = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name in ("rope", "rope_local"):
        out[name] = out[name] and dataclasses.asdict(out[name])
    return out | {name: [_word(word) for word in out[name]] for name in ("mixers", "mlps")}


def _word(word: Any) -> dict[str, Any]:
    fields = {f.name: getattr(word, f.name) for f in dataclasses.fields(word)}
    defaults = {f.name: f.default for f in dataclasses.fields(word)}
    return {"word": type(word).__name__} | {n: x for n, x in fields.items() if x != defaults[n]}


def config_from_json(data: Mapping[str, Any]) -> Config | BlockConfig:
    """Read the config that `config_to_json` wrote.

    Raises ValueError for unknown words, with the nearest one, and for fields or sizes that do not fit.

    >>> from kvjax.models.mixers.attention import Attention
    >>> config = Config(32, 16, 1, 2, 1, 8, 32, mixers=(Attention(gate=True),))
    >>> config_from_json(config_to_json(config)) == config
    True
    """
    if data.get("word") == "BlockConfig":
        fields = {name: x for name, x in data.items() if name != "word"}
        both = {name: _decoder(fields[name]) for name in ("blocks", "tokens") if name in fields}
        return _built(BlockConfig, fields | both)
    return _decoder(data)


def _decoder(data: Mapping[str, Any]) -> Config:
    fields = dict(data)
    for name in ("rope", "rope_local"):
        fields[name] = fields.get(name) and _built(_rope_class(fields[name]), fields[name])
    for name, words, what in (("mixers", MIXERS, "mixer"), ("mlps", MLPS, "feed-forward")):
        given = fields.get(name, ())
        if not isinstance(given, list | tuple):
            raise FieldError(f"{name} is {given!r}, expected a list of a {what} for every layer")
        fields[name] = tuple(_read(word, words, what) for word in given)
    return _built(Config, fields)


def _rope_class(fields: Any) -> type[Rope]:
    return LongRope if isinstance(fields, Mapping) and "long_factor" in fields else Rope


def _built(kind: type[C], fields: dict[str, Any]) -> C:
    known = [f.name for f in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
            raise ValueError(f"the fields are not those of a model: {kind.__name__} has no {name!r}: {hint}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"the fields are not those of a model: {error}") from error


def _read(data: Mapping[str, Any], words: Mapping[str, Any], what: str) -> Any:
    if not isinstance(data, Mapping):
        raise FieldError(f"{what} is {data!r}, expected a dict such as {{'word': {next(iter(words))!r}}}")
    given = dict(data)
    name = given.pop("word", None)
    if name not in words:
        near = difflib.get_close_matches(str(name), words, 1)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ValueError(
            f"{name!r} is no {what}{hint}: expected one of {', '.join(sorted(words))}, or import the module "
            "that defines it first"
        )
    # JSON has only lists; words hold tuples.
    given = {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}
    try:
        return words[name](**given)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(words[name]))
        raise ValueError(f"{name} takes {known}; {error}") from error
