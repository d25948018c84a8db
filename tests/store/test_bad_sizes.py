"""Bits, groups and counts that do not exist: every codec says what it was given, and what it takes."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import kvjax
import kvjax.store
from kvjax.base.errors import InputError
from kvjax.methods import METHODS
from tests.methods.battery import model

SIZES = ("bits", "group", "block", "channels", "rank", "tokens", "turns", "run", "signs", "together")
# Values of the other fields.
OTHERS = dict(
    bits=4, of="key", axis="token", group=16, channels=4, block=16, kind="e2m1", tokens=8, rank=2, base=8,
    seed=0, fraction=3, share=0.1, count=2,
)  # fmt: skip


def words():
    """(class, the name of a size) of the codecs and wrappers that authors of methods write."""
    for info in pkgutil.iter_modules(kvjax.store.__path__):
        module = importlib.import_module(f"kvjax.store.{info.name}")
        for kind in vars(module).values():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and dataclasses.is_dataclass(kind) and hasattr(kind, "__post_init__"):
                names = {f.name for f in dataclasses.fields(kind)}
                yield from ((kind, name) for name in SIZES if name in names)


def made(kind, **given):
    needed = [
        f.name for f in dataclasses.fields(kind)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    return kind(**{name: OTHERS.get(name, 1) for name in needed} | given)


@pytest.mark.parametrize(("kind", "name"), [*words()], ids=lambda x: getattr(x, "__name__", x))
def test_a_size_that_does_not_exist_is_refused_when_a_codec_is_written(kind, name):
    for wrong in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match=r"\bgot "):
            made(kind, **{name: wrong})


def test_the_list_of_codecs_has_those_of_several_files():
    found = {kind.__name__ for kind, _ in words()}
    assert {"Affine", "Symmetric", "LloydMax", "Razor", "CommutingSums", "LowRank", "Rotate"} <= found


GROUPED = [id for id in ("int4", "quarot", "kivi", "gear", "xquant-cl", "qrazor", "mxfp4", "nvfp4", "zipvl")]


@pytest.mark.parametrize("id", GROUPED)
def test_a_group_that_does_not_divide_a_head_is_refused_before_the_prompt_is_read(id):
    name = "block" if id in ("mxfp4", "nvfp4") else "group"
    assert name in inspect.signature(METHODS[id]).parameters
    with pytest.raises(InputError, match=rf"{name}=7 must divide the \d+ channels .*: choose other hyper"):
        kvjax.prefill(model("4/2"), [[1, 2, 3]], method=f"{id}:{name}=7")
