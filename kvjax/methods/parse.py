"""Methods as text: one language for Python, the command line, presets, gin files and saved caches.

snapkv                               an id or alias
snapkv(window=16, variant=kvpress)   with hyper-parameters
snapkv:window=16,variant=kvpress     the same, without brackets
ape(contexts=(512, 256))             several values in brackets
snapkv(budget=0.25) + kivi(bits=2)   a chain
my_file.py:my_method(alpha=3)        a function in a file of one's own
per_layer(snapkv, (1, 0.5))          a method built by a function of kvjax
Method(keep=Keep(...))               a method in the words of the grammar
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar import chain as joined_parts
from kvjax.grammar.model_kinds import Residence
from kvjax.grammar.read_kinds import Read
from kvjax.methods.builders import Builder, ConstructorCall, Defaults, NamedMethod, WrapperCall, in_order
from kvjax.methods.constructors import constructed
from kvjax.methods.elsewhere import elsewhere
from kvjax.methods.functions import AROUND
from kvjax.methods.registry import build as build_id
from kvjax.methods.registry import resolve
from kvjax.methods.text import ChainPart, arguments, hyper_parameters, pieces, taken_apart, value
from kvjax.methods.user import from_file


def method(id: object, **hyper: Any) -> Method:
    """Build the method that a text names; equal arguments give the same object.

    Args:
        id: the id of a method, "snapkv", with hyper-parameters as keywords or in brackets; a chain,
            "snapkv(budget=0.25) + kivi(bits=2)"; "path/to/file.py:function" for one of your own; or any other
            text that `repr` of a method prints.
        **hyper: hyper-parameters. `budget` is a fraction of the tokens kept (float in (0, 1]) or slots per
            head (int >= 1; the mean where heads or layers differ); in a chain it applies to each part that
            takes one.

    Returns:
        The method, for every `method=`.

    Raises:
        ValueError: for unknown methods and hyper-parameters (with the nearest name), wrong values, and parts
            that cannot be chained.

    >>> method("snapkv", budget=0.25, window=16)
    snapkv(budget=0.25, window=16)
    >>> method("snapkv + kivi(bits=2)", budget=0.25).id
    'snapkv + kivi'
    """
    if isinstance(id, Method):
        if hyper:
            raise InputError(f"{id!r:.80} is a method, which has its hyper-parameters: leave out {[*hyper]}")
        return id
    if not isinstance(id, str):
        raise InputError(f"method is {id!r:.80}, expected a text such as 'snapkv(budget=0.25)'")
    parsed = _parsed(id)
    if len(parsed.parts) == 1 and isinstance(named := parsed.parts[0], NamedMethod):
        if twice := sorted(set(hyper) & set(dict(named.hyper))):
            raise InputError(f"{twice[0]!r} is given in {id!r} and as a keyword, expected once: remove one")
        return named._replace(hyper=in_order(dict(named.hyper) | hyper)).build(None)
    if other := sorted(set(hyper) - {"budget"}):
        raise InputError(
            f"{other[0]!r} is given for all of {id!r}, expected in the brackets of one of its methods, as in "
            "'snapkv(window=16) + kivi(bits=2)'"
        )
    return parsed(hyper.get("budget"))


def chain(*parts: str | Method | Keep | Store | Read | Residence) -> Method:
    """Combine methods, or parts of methods, into one method: at most one of each kind, but two keeps.

    Args:
        *parts: a method, its text, a `Keep`, a `Store`, a read or a `Residence` each. Of two keeps, the first
            selects at the ends of prompts and the second evicts after every decoded token; a keep that evicts
            nothing and has a phase gives that to the other keep. Of two stores, one that drops numbers of a
            row (think, mustafar) has the other encode the rest.

    Returns:
        The method; of texts alone, the one that `kvjax.method` builds of these texts with + between them.

    Raises:
        InputError, ValueError: for texts that `kvjax.method` refuses.
        ValueError: for parts that do not go together, two of a kind, and methods that differ by layer.

    >>> import kvjax
    >>> kvjax.chain("snapkv(budget=0.25)", "kivi(bits=2)").id
    'snapkv + kivi'
    >>> kvjax.chain("snapkv(budget=256)", kvjax.method("tova", budget=256)).keep.when
    Every(tokens=1)
    """
    return joined_parts(*(method(part) if isinstance(part, str) else part for part in parts))


def as_method(given: object) -> Method:
    """Return the method that a call was given: a Method, a text that names one, or None (keep everything).

    Raises InputError for anything else, ValueError for an id that is unknown or needs a budget.

    >>> as_method("int8").id, as_method(None).id
    ('int8', 'full')
    """
    if given is None:
        return Method()
    if isinstance(given, str | Method):
        return method(given)
    raise InputError(
        f"method is {given!r:.80}, expected a Method or a text such as 'snapkv(budget=0.25)': give that, or "
        "kvjax.chain(...) of words"
    )


def parse_method(text: str, defaults: Defaults | None = None) -> tuple[str, Builder]:
    """(label, builder) of a method's text; the label is the text in normal form, which parses to the same.

    defaults: hyper-parameters per method id for those not in the text, as in presets.

    Raises InputError for anything that the builder would reject at any budget: unknown methods and
    hyper-parameters (with the nearest name), wrong values, parts that cannot be chained, missing files.

    >>> label, build = parse_method("snapkv+kivi:bits=4", {"snapkv": {"window": 8}})
    >>> label, build.takes_budget
    ('snapkv + kivi:bits=4', True)
    >>> build(0.25).spec[1][1]
    ('snapkv', (('budget', 0.25), ('window', 8)))
    """
    try:
        builder = _parsed(text).filled(defaults or {})
        builder(1.0 if builder.takes_budget else None)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{error}; see `kvjax methods`") from error
    return builder.label, builder


def with_file(text: str, path: str | Path) -> str:
    """Add the file of its fitted arrays to a method's text.

    >>> with_file("gisting(tokens=16)", "mine.safetensors")
    'gisting:fitted=mine.safetensors,tokens=16'
    """
    part = single(text)
    return part._replace(hyper=in_order({**dict(part.hyper), "fitted": str(path)})).label(False)


def single(text: str) -> NamedMethod:
    """Return the only method that a text names, with its hyper-parameters. InputError for a chain, or words.

    >>> single("kivi(bits=4)")
    NamedMethod(name='kivi', hyper=(('bits', 4),))
    """
    part, *more = _parsed(text).parts
    if more or not isinstance(part, NamedMethod):
        raise InputError(f"{text!r} is more than one method, expected one such as snapkv(window=16)")
    return part


def parse_budget(text: str) -> float | int:
    """Parse a budget as written: "0.25" is a share of the tokens, "64" a number of slots per head.

    Raises InputError for anything else.

    >>> parse_budget("0.25"), parse_budget("64")
    (0.25, 64)
    """
    amount = value(text.strip())
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount):
        raise InputError(
            f"budget {text!r} is not a number, expected a fraction in (0, 1] such as 0.25 or a number of "
            "slots such as 256" + (": put spaces between several" if "," in text else "")
        )
    try:
        Budget(amount)
    except ValueError as error:
        hint = (
            "" if "did you mean" in str(error) else ": write a fraction such as 0.25 or a number such as 256"
        )
        raise InputError(f"{error}{hint}") from error
    return amount


def read_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse options in the command line's form; InputError for anything but NAME=VALUE, and for duplicates.

    >>> read_options(["rate=0.01", "recent=32"])
    {'rate': 0.01, 'recent': 32}
    """
    return hyper_parameters(",".join(pairs), " ".join(pairs))


def from_spec(spec: tuple[Any, ...], own: Callable[..., Method] = from_file) -> Method:
    """Build the method with this `spec`: of the library, of a user's file, in words, or combined.

    own: builds methods of a file from "file.py:function" and hyper-parameters, in place of reading that file.

    Raises InputError if it cannot be built.

    >>> from_spec(("snapkv", (("budget", 0.25), ("window", 16)))).id
    'snapkv'
    """
    match spec:
        case ("custom", (str() as text,)):
            return constructed(text)
        case ("custom", *_):
            raise InputError(
                f"the method {spec[0]!r} was not built by a name: build it with kvjax.method, kvjax.chain of "
                "such methods, or kvjax.methods.user.from_file"
            )
        case (str(), ("chain", *parts)):
            return chain(*(from_spec(part, own) for part in parts))
        case (str(), ("around", str() as function, methods, given)) if function in AROUND:
            each = {name: _of_specs(x, own) for name, x in methods}
            return AROUND[function].function(**each, **dict(given))
        case (str() as name, tuple() as hyper) if all(isinstance(pair, tuple) for pair in hyper):
            try:
                return own(name, **dict(hyper)) if ".py:" in name else build_id(name, dict(hyper))
            except InputError:
                raise
            except ValueError as error:
                raise InputError(str(error)) from error
    raise InputError(f"the method {spec!r:.80} cannot be built again: build it with kvjax.method")


def _of_specs(x: tuple[Any, ...], own: Callable[..., Method]) -> Method | list[Method]:
    return from_spec(x, own) if isinstance(x[0], str) else [from_spec(one, own) for one in x]


# --- reading -----------------------------------------------------------------------------------------


def _parsed(text: str) -> Builder:
    parts = tuple(_part(piece, text) for piece in pieces(text.strip()))
    return Builder(" + ".join(part.label(False) for part in parts), parts)


def _part(piece: str, text: str) -> NamedMethod | WrapperCall | ConstructorCall:
    if not piece:
        raise InputError(f"method {text!r} is empty, expected an id such as snapkv: see `kvjax methods`")
    found = taken_apart(piece)
    if not found.name:
        raise InputError(
            f"{piece!r} names no method, expected an id before the brackets: write snapkv(window=16)"
        )
    if found.called and found.name == "Method":
        return ConstructorCall(piece)
    if found.called and found.name in AROUND:
        return _made(found, piece)
    if found.name.endswith(".py"):
        raise InputError(f"{piece!r} names a file but no function, expected {piece}:my_method")
    name = found.name if ".py:" in found.name else _resolved(found.name)
    return NamedMethod(name, in_order(hyper_parameters(found.given, piece)))


def _resolved(name: str) -> str:
    """Resolve the id of a method; ValueError with the nearest one, or the nearest function of methods."""
    try:
        return resolve(name)
    except ValueError:
        if not elsewhere(name) and (near := difflib.get_close_matches(name, AROUND, 1)):
            raise InputError(f"unknown method {name!r}: did you mean {near[0]}(...)?") from None
        raise


def _made(found: ChainPart, piece: str) -> WrapperCall:
    around, given = AROUND[found.name], {}
    names = list(inspect.signature(around.function).parameters)
    for at, one in enumerate(arguments(found.given)):
        before, equals, after = one.partition("=")
        key, written = (
            ("", one) if not (equals and before.strip().isidentifier()) else (before.strip(), after)
        )
        if key and key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}"
            raise InputError(f"{found.name} has no argument {key!r}: {hint}")
        if not key and at >= len(names):
            raise InputError(f"{piece!r} has too many arguments, expected {', '.join(names)}")
        key = key or names[at]
        if key in given:
            raise InputError(f"{key!r} is given twice in {piece!r}, expected once: remove one")
        written = written.strip()
        given[key] = _methods(written) if key in around.methods else value(written)
    if lacking := [name for name in around.needed if name not in given]:
        raise InputError(f"{piece!r} has no {lacking[0]}, expected {found.name}({', '.join(names)})")
    return WrapperCall(found.name, tuple(given.items()))


def _methods(written: str) -> Builder | tuple[Builder, ...]:
    """Build a method inside another's text, or several in brackets."""
    if written[:1] in ("[", "(") and written[-1:] in ("]", ")"):
        return tuple(_parsed(_or_full(one)) for one in arguments(written[1:-1]))
    return _parsed(_or_full(written))


def _or_full(written: str) -> str:
    return "full" if written.lower() == "none" else written
