"""Shared by mixers and feed-forwards: a name in config JSON, and the logical axes of their parameters."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes
from kvjax.mesh.rules import AXES


class LayerPart:
    """A mixer or a feed-forward. Defining a class registers its name for config JSON.

    A base class, which no config names, is defined with `class Base(Mixer, abstract=True)`.

    axes: for every parameter in `shapes`, one logical axis (`kvjax.mesh.rules.AXES`) per array axis, or None
    for one that is never split. Norms and the biases of matrices need no entry. registered: every class by
    name. absent: whether a layer with it has no such part, no norm before it, and never calls it.
    """

    axes: ClassVar[dict[str, Axes]] = {}
    registered: ClassVar[dict[str, Any]] = {}
    absent: ClassVar[bool] = False

    def __init_subclass__(cls, abstract: bool = False, **more: Any) -> None:
        """Raise InputError for a second class with the same name, and for unknown axes."""
        super().__init_subclass__(**more)
        unknown = sorted({axis for axes in cls.axes.values() for axis in axes if axis} - {*AXES})
        if unknown:
            raise InputError(f"{cls.__name__}.axes names {unknown[0]!r}, expected one of {', '.join(AXES)}")
        if LayerPart in cls.__bases__:
            cls.registered = {}
        elif not abstract:
            first = cls.registered.setdefault(cls.__name__, cls)
            # A cell that runs again, or a reloaded module, defines the same class once more.
            if _source(first) != _source(cls):
                raise InputError(
                    f"{cls.__module__} and {first.__module__} both define a {cls.__name__}, and config JSON "
                    "tells layers apart by the names of their classes: choose another name"
                )
            cls.registered[cls.__name__] = cls

    def axes_of(self, name: str) -> Axes | None:
        """Return the logical axes of a parameter; None if the class names none."""
        if name in self.axes:
            return self.axes[name]
        if name.endswith(("_norm", "_norm_bias")):
            return (None,)
        matrix = self.axes.get(name.removesuffix("_bias"))
        if matrix is None:
            return None
        # If a product's rows are split, every device would add the bias once.
        return (None if matrix[-1] == "embed" else matrix[-1],)


def _source(kind: type) -> tuple[str, str]:
    """Return the file (or module without one) that defines a class, and its name there."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file or kind.__module__, kind.__qualname__
