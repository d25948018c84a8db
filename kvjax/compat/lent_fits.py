"""Whether fitted arrays are for the word that gets them: for its class, and for its settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import Fitted, FittedEncoding, FittedWord, fitted_words, spelled
from kvjax.methods.renamed import RENAMED

# Words that read the arrays of another word's fit.
_FIT_OF = {
    "ByChannel": "Levels",
    "Distilled": "TokenScorer",
    "EigenHeads": "GroupedLowRank",
    "InteractionKey": "FirstDroppingToken",
    "OpeningGate": "Opening",
    "RunMerge": "Opening",
    "RunWeight": "Opening",
    "TokenProjection": "Controller",
}
# The fields that change what arrays of the same shapes mean.
_SETTINGS = {
    "HeadPatterns": ("patterns",),
    "InBasis": ("by",),
    "MemoryTokens": ("by", "mean"),
    "RunMemory": ("by", "mean"),
    "StaticAffine": ("bits", "by"),
}


def with_settings(fitted: Fitted, method: Method) -> Fitted:
    """Return fitted arrays with the settings of the method's words for which they were fitted."""
    found: dict[str, str] = {}
    for word in fitted_words(method):
        if _expected(word) == _present(fitted.word):
            found |= _settings(word, method)
    return dataclasses.replace(fitted, settings=found)


def check_lent(word: Any, method: Method) -> None:
    """Raise InputError if a word of kvjax has the arrays of another word, or for other settings."""
    if not type(word).__module__.startswith("kvjax."):
        return
    fitted, expected = word.fitted, _expected(word)
    if _present(fitted.word) != expected:
        raise InputError(
            f"it was given arrays that were fitted for {fitted.word}, expected those for {expected}: run "
            f"`kvjax fit {word.by}` on this model"
        )
    for name, own in _settings(word, method).items():
        if (was := fitted.settings.get(name, own)) != own:
            raise InputError(
                f"its arrays were fitted for {expected} with {name}={was}, and it has {name}={own}: run "
                f"`kvjax fit {spelled(method.spec, word.by)}` on this model"
            )


def _present(name: str) -> str:
    return RENAMED.get(name, name)


def _expected(word: Any) -> str:
    name = type(word).__name__
    return _FIT_OF.get(name, name)


def _settings(word: FittedWord, method: Method) -> dict[str, str]:
    """Return the settings of a word by name; those of a codec say whether they are of keys or of values."""
    of = word.of if isinstance(word, FittedEncoding) else ""
    names = _SETTINGS.get(type(word).__name__, ())
    found = {f"{of} {name}".lstrip(): str(getattr(word, name)) for name in names}
    if of == "key" and method.store is not None:
        found["unrotated keys"] = str(method.store.unrotated)
    return found
