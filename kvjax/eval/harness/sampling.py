"""The samplers and processors that a task's `generation_kwargs` describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.api.logit_processors import Processor, RepetitionPenalty
from kvjax.api.sampling import Sampler
from kvjax.base.errors import InputError

# Options of Hugging Face's `generate` that change nothing at these values.
NEUTRAL = {
    "num_beams": 1, "num_return_sequences": 1, "use_cache": True, "early_stopping": False,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "min_length": 0,
}  # fmt: skip
KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Writing(NamedTuple):
    """How a model generates: up to `new` tokens, drawn by sampler and processors, up to a stop string."""

    new: int
    sampler: Sampler
    processors: tuple[Processor, ...]
    stop_strings: tuple[str, ...]


def writing_of(asked: Mapping[str, Any], stop_strings: Sequence[str]) -> Writing:
    """Parse `generation_kwargs`; InputError for unknown options.

    asked: as `normalize_gen_kwargs` of the harness returns them.

    >>> writing_of({"max_gen_toks": 8, "do_sample": False, "top_k": 5, "num_beams": 1}, ["."]).sampler
    Sampler(temperature=0.0, top_k=None, top_p=None, min_p=None)
    """
    for name, value in asked.items():
        if name not in KNOWN and NEUTRAL.get(name) != value:
            only = f"only {NEUTRAL[name]!r} is possible" if name in NEUTRAL else "it is not known"
            raise InputError(
                f"generation_kwargs ask for {name}={value!r}, and {only}: expected {', '.join(KNOWN)}"
            )
    penalty = asked.get("repetition_penalty") or 1.0
    return Writing(
        int(asked["max_gen_toks"]),
        _sampler(asked) if asked.get("do_sample") else Sampler(),
        () if penalty == 1 else (RepetitionPenalty(float(penalty)),),
        tuple(text for text in stop_strings if text),
    )


def _sampler(asked: Mapping[str, Any]) -> Sampler:
    """top_k=0, top_p=1 and min_p=0 keep all tokens."""
    top_k, top_p, min_p = (asked.get(name) for name in ("top_k", "top_p", "min_p"))
    return Sampler(
        float(asked.get("temperature") or 0.0), top_k or None, top_p if top_p and top_p < 1 else None,
        min_p or None,
    )  # fmt: skip
