"""Shipped fits: methods completed with arrays that come with kvjax for a model, and checked against it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.grammar.fitted import FittedWord, ModelSizes, as_fitted, fitted_words, lacks_fit, shipped_for
from kvjax.grammar.to_text import changed
from kvjax.methods import METHODS, takes
from kvjax.models.model import Model


def ready(model: Model, method: Method) -> Method:
    """Return the method with arrays shipped for this model (`kvjax/fits`), if a word lacks fitted arrays.

    Raises InputError for a word that was fitted to another model. If a method's `make` has rewritten the
    model, that method gets the arrays of the rewrite.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> ready(model, kvjax.method("locret", budget=0.5)).spec
    ('locret', (('budget', 0.5), ('fitted', 'recall-tiny/locret')))
    """
    words = list(fitted_words(method))
    if not words or not isinstance(model, Model):
        return method
    if model.made_by is not None:
        return _as_made(model.made_by, method)
    for word in words:
        if word.fitted is not None and word.fitted.model not in ("", model.signature):
            raise InputError(
                f"{method.id}: it was fitted to another model (of the signature {word.fitted.model}, this "
                f"model's is {model.signature}): run `kvjax fit {word.by}` on this model"
            )
    shipped, sizes = shipped_for(model.signature), ModelSizes.of(model.config)
    lacking = [word for word in words if lacks_fit(word) and word.by in shipped]
    names = {word.by: shipped[word.by] for word in lacking if _takes(word, shipped[word.by], sizes)}
    if not names:
        return method
    return _filled(method, names).called(_named(method.spec, names))


def _as_made(by: Any, method: Method) -> Method:
    """Return the method with the shipped arrays of `by`, which made the model, if only these differ."""
    word: Any = method.make
    if not isinstance(by, FittedWord) or by.fitted is None or type(word) is not type(by):
        return method
    fitted = by.fitted
    if not lacks_fit(word):
        return method
    name = shipped_for(fitted.model).get(word.by, "")
    if dataclasses.replace(method.make, fitted=fitted) != by or not name or as_fitted(name) != fitted:
        return method
    return dataclasses.replace(method, make=by).called(_named(method.spec, {word.by: name}))


def _takes(word: Any, name: str, sizes: ModelSizes) -> bool:
    """Whether shipped arrays are for this word, and not, say, for another number of memory tokens."""
    try:
        dataclasses.replace(word, fitted=as_fitted(name)).check(sizes)
    except InputError:
        return False
    return True


def _filled(word: Any, names: dict[str, str]) -> Any:
    """Fill in the word's missing fitted arrays from these names, by the methods they are for."""
    if isinstance(word, tuple):
        new = tuple(_filled(one, names) for one in word)
        return word if all(a is b for a, b in zip(word, new, strict=True)) else new
    if not dataclasses.is_dataclass(word) or isinstance(word, type):
        return word
    old = {f.name: getattr(word, f.name) for f in dataclasses.fields(word) if f.init and f.name != "spec"}
    changed = {name: new for name, x in old.items() if (new := _filled(x, names)) is not x}
    if isinstance(word, FittedWord) and lacks_fit(word) and word.by in names:
        changed["fitted"] = as_fitted(names[word.by])
    return dataclasses.replace(word, **changed) if changed else word


def _named(spec: tuple[Any, ...], names: dict[str, str]) -> tuple[Any, ...]:
    """How to build the completed method again: the hyper-parameters that were left out are named."""

    def filled(part: tuple[Any, ...]) -> tuple[Any, ...]:
        id, hyper = part
        if id in names and id in METHODS and takes(id, "fitted"):
            return id, tuple(sorted({"fitted": names[id], **dict(hyper)}.items()))
        return part

    return changed(spec, filled)
