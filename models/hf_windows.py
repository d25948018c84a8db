"""Which layers of a Hugging Face model have a window, from config.json and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.models.config import Config
from kvjax.models.hf_numbers import size


class WindowRule(NamedTuple):
    """read: config.json -> the window of every layer, () for none. write: the inverse."""

    read: Callable[[Mapping[str, Any]], tuple[int | None, ...]]
    write: Callable[[Config], dict[str, Any]]


def in_layers(slides: Callable[[Mapping[str, Any], int], bool], switch: str = "") -> WindowRule:
    """Windows in the layers that `layer_types` names or, without it, in those for which `slides` is true.

    slides: (config.json, layer) -> whether it has a window. switch: a setting that enables windows.
    """

    def read(data: Mapping[str, Any]) -> tuple[int | None, ...]:
        window, layers = data.get("sliding_window"), size(data, "num_hidden_layers")
        if window is None or (switch and not data.get(switch)):
            return ()
        kinds = data.get("layer_types")
        if kinds is None:
            return _where(window, [slides(data, i) for i in range(layers)])
        _check_kinds(kinds, layers)
        return _where(window, [kind == "sliding_attention" for kind in kinds])

    def write(config: Config) -> dict[str, Any]:
        windows = [config.window(i) for i in range(config.layers)]
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        if switch:
            return {"sliding_window": _width(config), "layer_types": kinds, switch: any(windows)}
        # Classes without a switch need a width even if no layer has a window: then their default.
        width = {"sliding_window": _width(config)} if any(windows) else {}
        return {**width, "layer_types": kinds}

    return WindowRule(read, write)


def _read_all(data: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = data.get("sliding_window")
    return () if window is None else _where(window, [True] * size(data, "num_hidden_layers"))


NO_WINDOWS = WindowRule(lambda data: (), lambda config: {})
IN_ALL_LAYERS = WindowRule(_read_all, lambda config: {"sliding_window": _width(config)})


def _where(window: int, slides: list[bool]) -> tuple[int | None, ...]:
    return tuple(window if s else None for s in slides) if any(slides) else ()


def _width(config: Config) -> int | None:
    """Return the one width that config.json can hold."""
    return min((w for w in config.windows if w is not None), default=None)


def _check_kinds(kinds: list[str], layers: int) -> None:
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        what = f"names {', '.join(unknown)}" if unknown else f"has {len(kinds)} entries for {layers} layers"
        raise InputError(f"layer_types {what}, expected full_attention or sliding_attention for every layer")
