"""A `Config` as JSON and back: plain fields, and for every layer the words for its mixer and feed-forward."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from kvjax.base.ranges import FieldError
from kvjax.models.block_transformer import BlockConfig
from kvjax.models.config import Config
from kvjax.models.feed_forward import MLP, GatedMLP, MoE, NoMLP
from kvjax.models.mixers.attention import Attention
from kvjax.models.mixers.bidirectional import Bidirectional
from kvjax.models.mixers.cross_attention import CrossAttention
from kvjax.models.mixers.deltaformer import DeltaFormer
from kvjax.models.mixers.dmc import DynamicMerging
from kvjax.models.mixers.dropped import Dropped
from kvjax.models.mixers.features import Based, LinearAttention, Performer
from kvjax.models.mixers.forgetting import Forgetting, Path
from kvjax.models.mixers.gau import GatedUnit
from kvjax.models.mixers.goldfinch import FinchC2, Gold
from kvjax.models.mixers.grouped_latent import GroupedLatent
from kvjax.models.mixers.head_maps import HeadMaps
from kvjax.models.mixers.hgrn import Hgrn
from kvjax.models.mixers.hidden_cache import CacheAttention, HiddenCache
from kvjax.models.mixers.infini import Infini
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.lattice import Lattice
from kvjax.models.mixers.local_linear import LocalLinear
from kvjax.models.mixers.log_linear import LogLinearDelta, LogLinearMamba2
from kvjax.models.mixers.mamba import Conba, Mamba
from kvjax.models.mixers.mcsd import SlopeDecay
from kvjax.models.mixers.mesa import Mesa
from kvjax.models.mixers.proximal import SharedKeys
from kvjax.models.mixers.recurrent import GatedDelta, GatedLinear, GatedSlot, KimiDelta, Mamba2, Retention
from kvjax.models.mixers.rwkv import ChannelMix, Rwkv6, Rwkv7
from kvjax.models.mixers.shared_weights import SharedWeights
from kvjax.models.mixers.tensor_product import TensorProduct
from kvjax.models.mixers.transformer_vq import VectorQuantised
from kvjax.ops.base.rope import Rope

C = TypeVar("C")

MIXERS = {
    word.__name__: word
    for word in (
        Attention,
        Bidirectional,
        CrossAttention,
        Dropped,
        GroupedLatent,
        HeadMaps,
        Latent,
        TensorProduct,
        SharedWeights,
        Retention,
        GatedLinear,
        GatedSlot,
        GatedDelta,
        KimiDelta,
        Mamba2,
        LogLinearDelta,
        LogLinearMamba2,
        Infini,
        Rwkv6,
        Rwkv7,
        ChannelMix,
        FinchC2,
        Gold,
        LinearAttention,
        Based,
        Performer,
        Mesa,
        Lattice,
        GatedUnit,
        VectorQuantised,
        Hgrn,
        HiddenCache,
        CacheAttention,
        Mamba,
        Conba,
        SlopeDecay,
        Forgetting,
        Path,
        DeltaFormer,
        DynamicMerging,
        LocalLinear,
        SharedKeys,
    )
}
MLPS = {word.__name__: word for word in (GatedMLP, MLP, NoMLP, MoE)}


def config_to_json(config: Config | BlockConfig) -> dict[str, Any]:
    """The fields of a config as JSON takes them; a layer's words as {"word": its name, field: value, ...}.

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
    """The config that `config_to_json` wrote.

    Raises ValueError for unknown words, with the nearest one, and for fields or sizes that do not fit.

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
        fields[name] = fields.get(name) and _built(Rope, fields[name])
    for name, words, what in (("mixers", MIXERS, "mixer"), ("mlps", MLPS, "feed-forward")):
        given = fields.get(name, ())
        if not isinstance(given, list | tuple):
            raise FieldError(f"{name} is {given!r}, expected a list of a {what} for every layer")
        fields[name] = tuple(_read(word, words, what) for word in given)
    return _built(Config, fields)


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
        raise ValueError(f"{name!r} is no {what}{hint}: expected one of {', '.join(words)}")
    # JSON knows lists only; words hold tuples.
    given = {n: tuple(x) if isinstance(x, list) else x for n, x in given.items()}
    try:
        return words[name](**given)
    except TypeError as error:
        known = ", ".join(f.name for f in dataclasses.fields(words[name]))
        raise ValueError(f"{name} takes {known}; {error}") from error
