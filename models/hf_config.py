"""config.json of Hugging Face checkpoints to `Config`, by the family's row of `kvjax.models.hf_families`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_families import FAMILIES, SUPPORTED
from kvjax.models.hf_family import Json
from kvjax.models.hf_left_out import ADDING, why_not
from kvjax.models.hf_numbers import check_numbers, size
from kvjax.models.quantised.settings import quantisation_of
from kvjax.ops.base.long_rope import LongRope
from kvjax.ops.base.rope import Rope

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "sqrelu": "relu2",
}
_NUMBERS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
_SCALED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


# No decoder is nearly as deep, and a mistyped number would fill the memory with the words of its layers.
_MOST_LAYERS = 10_000


def config_from_hf(data: Json) -> Config:
    """Build the `Config` that a config.json describes.

    Raises InputError for an unsupported model_type, rotary scaling, activation or quantisation, and for
    missing sizes.

    >>> sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    >>> config_from_hf({"model_type": "llama", "intermediate_size": 64, **sizes}).head_dim
    8
    """
    given = data
    family, data = _family(data)
    try:
        if "num_hidden_layers" in data:
            _check_layers(data)
        data = data | FAMILIES[family].spell(data)
        _check_layers(data)
        quantisation_of(given)
        check_numbers(FAMILIES[family].defaults, data)
        return Config(**_fields(family, data))
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"config.json lacks {error.args[0]}, which {family} needs") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise InputError(f"config.json describes no model that can be built: {error}") from error


def _check_layers(data: Json) -> None:
    if (layers := size(data, "num_hidden_layers")) > _MOST_LAYERS:
        raise InputError(
            f"config.json gives num_hidden_layers = {layers}, expected at most {_MOST_LAYERS}: correct it"
        )


@contextlib.contextmanager
def naming_file(path: Path, part: str) -> Iterator[None]:
    """Make errors about a config.json, and about values of a wrong type, name `part` of a file instead.

    For models whose config is computed from a file of weights.
    """
    try:
        yield
    except InputError as error:
        if "config.json" not in str(error):
            raise
        raise InputError(str(error).replace("config.json", f"the {part} of {path}")) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(
            f"{path} has {part} that make no sense ({error}): fetch or convert it again"
        ) from error


def _fields(family: str, data: Json) -> dict[str, Any]:
    d_model, heads = size(data, "hidden_size"), size(data, "num_attention_heads")
    head_dim = size(data, "head_dim") if data.get("head_dim") else d_model // heads
    head_dim = data.get("qk_rope_head_dim", head_dim)
    rope, rope_local = _ropes(family, data, head_dim)
    windows = FAMILIES[family].windows.read(data)
    fields: dict[str, Any] = dict(
        vocab=size(data, "vocab_size"),
        d_model=d_model,
        layers=size(data, "num_hidden_layers"),
        heads=heads,
        kv_heads=size(data, "num_key_value_heads") if data.get("num_key_value_heads") else heads,
        head_dim=head_dim,
        d_ff=size(data, "intermediate_size"),
        norm_eps=float(data["rms_norm_eps"]),
        tied=bool(data.get("tie_word_embeddings", False)),
        max_positions=_reach(rope, size(data, "max_position_embeddings")),
        rope=rope,
        rope_local=rope_local if any(windows) else None,
        windows=windows,
        activation=_activation(data),
        family=family,
    )
    return fields | FAMILIES[family].read(data, rope)


def _family(data: Json) -> tuple[str, dict[str, Any]]:
    """Return (family, the language model's settings with the family's defaults below them)."""
    name = data.get("model_type")
    if not isinstance(name, str | None):
        raise InputError(f"config.json gives model_type = {name!r:.40}, expected a text: correct it")
    inner = [family for family, row in FAMILIES.items() if name in row.within]
    if inner:
        text = data.get("text_config")
        outer = {k: data[k] for k in ("tie_word_embeddings", "eos_token_id") if k in data}
        data = {**outer, **(text if isinstance(text, Mapping) else data)}
        said = data.get("model_type")
        name = said if said in inner else inner[0]
    if name not in FAMILIES:
        raise InputError(
            f"model_type {name!r} {why_not(str(name), SUPPORTED)}: choose a checkpoint of "
            f"{', '.join(SUPPORTED)}. {ADDING}"
        )
    if (both := data.get("use_bidirectional_attention")) and both != "vision":
        raise InputError(f"use_bidirectional_attention is {both!r}: kvjax runs causal decoders only")
    given = {k: v for k, v in data.items() if v is not None or k in _NULLABLE}
    return name, {**FAMILIES[name].defaults, **given}


# For these, null means "none", not "the default".
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def _activation(data: Json) -> str:
    name = data.get("hidden_activation") or data.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise InputError(f"hidden_act {name!r} is not supported, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _ropes(family: str, data: Json, head_dim: int) -> tuple[Rope, Rope | None]:
    """Return (rotation, rotation of the windowed layers if it differs), from any of the spellings."""
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    full, local = scaling, {}
    # If all layers are of one kind, transformers 5 writes empty flat parameters beside those per kind.
    if {"full_attention", "sliding_attention"} & scaling.keys():
        full, local = scaling.get("full_attention") or {}, scaling.get("sliding_attention") or {}
    rope = _rope(family, full, data, data.get("global_head_dim") or head_dim)
    if "rope_local_base_freq" in data:
        local = {"rope_theta": data["rope_local_base_freq"], **local}
    elif not local:
        unscaled = FAMILIES[family].local_rope == "unscaled" and rope.kind != "default"
        return rope, Rope(theta=rope.theta) if unscaled else None
    other = _rope(family, local, data, head_dim)
    return rope, None if other == rope else other


def _rope(family: str, params: Json, data: Json, head_dim: int) -> Rope:
    kind = params.get("rope_type", params.get("type", "default"))
    # Phi-3's first name for it.
    kind = "longrope" if kind in ("su", "yarn") and "long_factor" in params else kind
    if kind != "default" and kind not in _SCALED:
        raise InputError(
            f"rotary scaling {kind!r} is not supported, expected one of default, {', '.join(_SCALED)}"
        )
    missing = [name for name in _SCALED.get(kind, ()) if params.get(name) is None]
    if missing:
        raise InputError(f"rotary scaling {kind!r} in config.json lacks {', '.join(missing)}")
    out: dict[str, Any] = {"theta": float(params.get("rope_theta") or data["rope_theta"]), "kind": kind}
    share = params.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if share is not None and int(head_dim * share) != head_dim:
        if FAMILIES[family].partial_rotary:
            out["rotary_dim"] = int(head_dim * share)
        elif kind != "default":
            raise InputError(
                f"config.json gives partial_rotary_factor = {share} with rotary scaling {kind!r}, which the "
                f"class of {family} cannot compute: leave one of them out"
            )
    if kind == "default":
        return Rope(**out)
    if kind in ("linear", "proportional"):
        return Rope(
            **out, factor=float(params.get("factor", 1.0) if kind == "proportional" else params["factor"])
        )
    longest = data["max_position_embeddings"]
    original = data.get("original_max_position_embeddings", params.get("original_max_position_embeddings"))
    # The dynamic kind extends the model's own length, whatever else the file says.
    out["original_max"] = int(longest if kind == "dynamic" or not original else original)
    out["factor"] = float(params.get("factor") or longest / out["original_max"])
    if kind == "longrope":
        return _long_rope(out, params, head_dim)
    for name in _NUMBERS.get(kind, ()):
        if params.get(name) is not None:
            out[name] = float(params[name])
    if kind != "yarn":
        return Rope(**out)
    return Rope(**out, truncate=bool(params.get("truncate", True)))


def _long_rope(out: dict[str, Any], params: Json, head_dim: int) -> LongRope:
    half = (out.get("rotary_dim") or head_dim) // 2
    for name in ("short_factor", "long_factor"):
        given = params[name]
        if not isinstance(given, list | tuple) or len(given) != half:
            raise InputError(
                f"config.json gives {name} = {given!r:.60}, expected {half} numbers: one for each pair of "
                f"the {2 * half} channels that rotate"
            )
        out[name] = tuple(float(x) for x in given)
    if params.get("attention_factor") is not None:
        out["attention_factor"] = float(params["attention_factor"])
    return LongRope(**out)


def _reach(rope: Rope, positions: int) -> int:
    """Return the longest prompt: kinds that stretch the original length may exceed what config.json says."""
    stretched = int(rope.factor * rope.original_max) if rope.kind in ("dynamic", "yarn") else 0
    return max(positions, stretched)
