"""Rotation settings of a GGUF file, as the `rope_scaling` of a config.json.

Llama 3's factors are stored as one number per frequency (`rope_freqs.weight`), from which the original
settings are recovered; Phi-3's in two such tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvjax.base.errors import InputError
from kvjax.models.gguf.reader import Gguf, decoded
from kvjax.ops.base.long_rope import LongRope

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# Factors are stored in float32.
_CLOSE = 1e-6


def rope_fields(file: Gguf, rotated: int) -> dict[str, Any]:
    """`rope_theta` and, if the rotation is scaled, `rope_scaling`; rotated: how many of a head's channels.

    Raises InputError for an unsupported scaling.
    """
    theta = float(file.of("rope.freq_base", 10000.0))
    if theta <= 0:
        raise InputError(f"{file.path} gives rope.freq_base = {theta}, expected a number above 0")
    turned = file.of("rope.dimension_count", rotated)
    if turned != rotated and file.architecture != "phi3":
        raise InputError(
            f"{file.path} rotates {turned} of the {rotated} channels of a head, expected all of them"
        )
    scaling = _scaling(file, theta, rotated)
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def _scaling(file: Gguf, theta: float, rotated: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3(file, theta, rotated)
    if _LONG in file.tensors or _SHORT in file.tensors:
        return _longrope(file)
    kind = str(file.of("rope.scaling.type", ""))
    factor = file.of("rope.scaling.factor", file.of("rope.scale_linear"))
    if kind in ("", "none", "linear"):
        # Old files give only a factor.
        factor = float(factor or 1.0)
        return None if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, float(file.need("rope.scaling.factor")))
    raise InputError(
        f"{file.path} scales its rotation by {kind!r}, expected one of none, linear, yarn, or factors"
    )


def _yarn(file: Gguf, factor: float) -> dict[str, Any]:
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if file.of(key, 1.0) != 1.0:
            raise InputError(
                f"{file.path} gives YaRN {key} = {file.of(key)}, expected 1: others are not read"
            )
    out: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    names = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    out |= {name: file.of(key) for name, key in names.items() if file.of(key) is not None}
    # A tenth of mscale_all_dim, which then replaces mscale, too: the ratio of both is 1.
    if weight := file.of("rope.scaling.yarn_log_multiplier"):
        out |= {"mscale": 10 * float(weight), "mscale_all_dim": 10 * float(weight)}
    return out


def _factors(file: Gguf, name: str) -> np.ndarray:
    held = file.tensors.get(name)
    if held is None:
        raise InputError(f"{file.path} has rope factors for some lengths and lacks {name}: fetch it again")
    return np.asarray(decoded(held.data, held.kind), np.float64).ravel()


def _longrope(file: Gguf) -> dict[str, Any]:
    out = {
        "rope_type": "longrope",
        "short_factor": _factors(file, _SHORT).tolist(),
        "long_factor": _factors(file, _LONG).tolist(),
        "original_max_position_embeddings": file.need("rope.scaling.original_context_length"),
    }
    given, usual = file.of("rope.scaling.attn_factor"), _amplitude(file)
    if given is not None and not math.isclose(given, usual, rel_tol=_CLOSE):
        out["attention_factor"] = float(given)
    return out


def _amplitude(file: Gguf) -> float:
    """Return the factor on cos and sin if a file does not give it."""
    longest, original = file.need("context_length"), file.need("rope.scaling.original_context_length")
    return LongRope(
        factor=longest / original, original_max=original, short_factor=(1.0,), long_factor=(1.0,)
    ).amplitude


def _llama3(file: Gguf, theta: float, rotated: int) -> dict[str, Any] | None:
    """Find the settings of Llama 3.1's scaling that give the file's divisors of frequencies.

    A frequency is divided by factor / (1 + (factor - 1) s), with s = (original / wavelength - low) /
    (high - low) between 0 and 1. So s is linear in 1 / wavelength: a line through the frequencies between.
    """
    divisors = _factors(file, "rope_freqs.weight")
    if len(divisors) != rotated // 2 or not (np.isfinite(divisors) & (divisors >= 1 - _CLOSE)).all():
        raise InputError(
            f"{file.path} has {len(divisors)} rope_freqs, expected {rotated // 2} numbers of at least 1"
        )
    factor = float(divisors.max())
    if factor <= 1 + _CLOSE:
        return None
    pace = theta ** (-np.arange(0, rotated, 2) / rotated) / (2 * np.pi)
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    slope, base = _ramp(pace, share)
    original = int(file.of("rope.scaling.original_context_length", 8192))
    found = np.array([factor, -base * original / slope, (1 - base) * original / slope])
    # If several give the same result: those of Llama 3, or short numbers.
    for numbers in ((round(factor, 3), 1.0, 4.0), found.round(3), found):
        factor, low, high = (float(n) for n in numbers)
        smooth = np.clip((original * pace - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=_CLOSE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise InputError(f"{file.path} has rope_freqs that Llama 3's scaling does not give: not read")


def _ramp(pace: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """Return (rise, base) of the line that `share` follows where it is between 0 and 1."""
    inside = (share > 10 * _CLOSE) & (share < 1 - 10 * _CLOSE)
    if inside.sum() > 1:
        slope, base = np.polyfit(pace[inside], share[inside], 1)
        return float(slope), float(base)
    # Fewer than two shares lie between 0 and 1: a line that is at most 0 where shares are 0, at least 1 where
    # they are 1.
    zero = pace[share <= 10 * _CLOSE].max(initial=0.0)
    one = pace[share >= 1 - 10 * _CLOSE].min(initial=2 * float(pace.max()) + zero)
    if not inside.any():
        slope = 1 / (one - zero)
        return slope, -slope * zero
    at, value = float(pace[inside][0]), float(share[inside][0])
    slope = max(value / (at - zero), (1 - value) / (one - at))
    return slope, value - slope * at
