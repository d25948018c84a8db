"""Builders: the parts of a method's text. Each takes a budget, or already has one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvjax.base.errors import InputError
from kvjax.grammar import Method, chain
from kvjax.grammar.to_text import name_with
from kvjax.methods.constructors import constructed
from kvjax.methods.functions import AROUND
from kvjax.methods.registry import build, takes_budget
from kvjax.methods.user import from_file, load_function

Hyper = tuple[tuple[str, Any], ...]
Defaults = Mapping[str, Mapping[str, Any]]


class NamedMethod(NamedTuple):
    """One method: its id, or path/to/file.py:function, and its hyper-parameters."""

    name: str
    hyper: Hyper

    @property
    def fixed(self) -> bool:
        return "budget" in dict(self.hyper)

    @property
    def takes_budget(self) -> bool:
        if self.fixed:
            return False
        if ".py:" in self.name:
            return "budget" in inspect.signature(load_function(self.name)).parameters
        return takes_budget(self.name)

    def label(self, inside: bool) -> str:
        if inside:
            return name_with(self.name, self.hyper)
        return self.name + (":" + ",".join(f"{k}={v}" for k, v in self.hyper) if self.hyper else "")

    def build(self, budget: float | int | None) -> Method:
        hyper = dict(self.hyper) | ({"budget": budget} if self.takes_budget and budget is not None else {})
        return from_file(self.name, **hyper) if ".py:" in self.name else build(self.name, hyper)

    def filled(self, defaults: Defaults) -> NamedMethod:
        return self._replace(hyper=in_order({**defaults.get(self.name, {}), **dict(self.hyper)}))


class WrapperCall(NamedTuple):
    """A call of a function such as kvjax.per_layer; some of its arguments are builders of methods."""

    function: str
    given: tuple[tuple[str, Any], ...]

    @property
    def inside(self) -> list[Builder]:
        each = [x if isinstance(x, tuple) else (x,) for _, x in self.given]
        return [one for many in each for one in many if isinstance(one, Builder)]

    @property
    def fixed(self) -> bool:
        return any(part.fixed for one in self.inside for part in one.parts)

    @property
    def takes_budget(self) -> bool:
        return any(one.takes_budget for one in self.inside)

    def label(self, inside: bool) -> str:
        def shown(x: Any) -> str:
            if isinstance(x, Builder):
                return x.inside
            many = isinstance(x, tuple) and x and isinstance(x[0], Builder)
            return f"[{', '.join(one.inside for one in x)}]" if many else repr(x)

        methods = AROUND[self.function].methods
        each = [shown(x) if name in methods else f"{name}={shown(x)}" for name, x in self.given]
        return f"{self.function}({', '.join(each)})"

    def build(self, budget: float | int | None) -> Method:
        def built(x: Any) -> Any:
            if isinstance(x, Builder):
                return x(budget if x.takes_budget else None)
            return [*map(built, x)] if isinstance(x, tuple) and x and isinstance(x[0], Builder) else x

        return AROUND[self.function].function(**{name: built(x) for name, x in self.given})

    def filled(self, defaults: Defaults) -> WrapperCall:
        def filled(x: Any) -> Any:
            if isinstance(x, Builder):
                return x.filled(defaults)
            return tuple(map(filled, x)) if isinstance(x, tuple) else x

        return self._replace(given=tuple((name, filled(x)) for name, x in self.given))


class ConstructorCall(NamedTuple):
    """A sentence written as a constructor of its words."""

    text: str

    @property
    def fixed(self) -> bool:
        return constructed(self.text).keep is not None

    @property
    def takes_budget(self) -> bool:
        return False

    def label(self, inside: bool) -> str:
        return " ".join(self.text.split())

    def build(self, budget: float | int | None) -> Method:
        return constructed(self.text)

    def filled(self, defaults: Defaults) -> ConstructorCall:
        return self


@dataclasses.dataclass(frozen=True)
class Builder:
    """A parsed text: called with a budget (None if it takes none), it builds the method.

    The budget applies to every part that takes one and has none in the text.
    """

    label: str
    parts: tuple[NamedMethod | WrapperCall | ConstructorCall, ...]

    @property
    def takes_budget(self) -> bool:
        return any(part.takes_budget for part in self.parts)

    @property
    def inside(self) -> str:
        """The text as an argument of another method's."""
        return " + ".join(part.label(True) for part in self.parts)

    def filled(self, defaults: Defaults) -> Builder:
        """Fill in default hyper-parameters per method id where the text gives none."""
        return dataclasses.replace(self, parts=tuple(part.filled(defaults) for part in self.parts))

    def __call__(self, budget: float | int | None = None) -> Method:
        if budget is not None and not self.takes_budget:
            fixed = any(part.fixed for part in self.parts)
            why = "has its budget in its name" if fixed else "takes no budget"
            raise InputError(f"method {self.label} {why}, got budget {budget}: leave the budget out")
        try:
            built = [part.build(budget) for part in self.parts]
            return built[0] if len(built) == 1 else chain(*built)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error


def in_order(hyper: Mapping[str, Any]) -> Hyper:
    """Hyper-parameters sorted by name, as specs hold them."""
    return tuple(sorted(hyper.items()))
