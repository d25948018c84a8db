"""How a saved cache records the method that filled it: by name, or in the words of the grammar."""

from __future__ import annotations

import json
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.methods.constructors import constructor_of
from kvjax.methods.parse import from_spec


def saved_spec(method: Method) -> tuple[Any, ...]:
    """Write the spec that rebuilds the method, in JSON values; in words, if it has no name.

    Raises InputError if neither a name nor the words of kvjax can build it.

    >>> from kvjax.grammar import Store
    >>> from kvjax.store.affine import Affine
    >>> saved_spec(Method(store=Store(keys=Affine(8))))
    ('custom', ('Method(store=Store(keys=Affine(8)))',))
    """
    try:
        if from_spec(method.spec) == method and _through_json(method.spec) == method.spec:
            return method.spec
    except (ValueError, TypeError):
        pass
    try:
        return "custom", (constructor_of(method),)
    except InputError as error:
        raise InputError(
            f"this cache cannot be saved: {error}: write the sentence in a function of a file, and fill the "
            "cache by kvjax.method('my_file.py:my_method')"
        ) from error


def _through_json(spec: tuple[Any, ...]) -> Any:
    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    return tuples(json.loads(json.dumps(spec)))
