"""The only file that speaks gin: it turns *.gin files into plain arguments for the library.

Values are read before anything is traced; nothing called under jit is gin-configurable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin

from kvjax.errors import InputError


@gin.configurable
def hyper(**methods: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Hyper-parameters per method id, as a preset binds them."""
    return {id.replace("_", "-"): dict(values) for id, values in methods.items()}


def presets() -> dict[str, Path]:
    """The shipped presets of `compare`, by name."""
    import kvjax.configs

    folder = Path(next(iter(kvjax.configs.__path__))) / "compare"
    return {p.stem: p for p in sorted(folder.glob("*.gin"))}


def load_preset(name: str) -> dict[str, dict[str, Any]]:
    """Hyper-parameters per method id, from a shipped preset's name or the path of a .gin file.

    >>> load_preset("short")["snapkv"]["window"]
    16
    """
    known = presets()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise InputError(f"no preset {name!r}: give one of {', '.join(known)}, or the path of a .gin file")
    gin.clear_config()
    try:
        gin.parse_config_file(str(path))
        return hyper()
    except (ValueError, SyntaxError) as error:
        raise InputError(f"{path} is not a preset: {str(error).splitlines()[0]}") from error
    finally:
        gin.clear_config()
