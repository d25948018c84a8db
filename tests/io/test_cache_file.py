"""A saved cache comes back bit for bit, compiles nothing, and says what is wrong when it cannot come back."""

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import kvjax
from kvjax import steps
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.compress.group import group_method
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import SHIPPED, Fitted
from kvjax.grammar.keys import key_of
from kvjax.grammar.when import Every
from kvjax.io import cache_arrays, cache_tree
from kvjax.io.saved_words import SavedWords, words_of
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.code_error import EncodingAccuracy
from kvjax.keep.scores.score import AccumulatedAttention, KeyNorm
from kvjax.methods.constructors import classes, constructed
from kvjax.methods.renamed import RENAMED
from kvjax.methods.user import from_file
from kvjax.models.config import Config
from kvjax.models.model import Model
from kvjax.models.params import init, plan
from kvjax.state.cache import Cache, GroupState, Slots
from kvjax.store.affine import Affine
from kvjax.store.clipped import Clipped
from tests.methods.table import BY_LABEL

CONFIG = Config(vocab=32, d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=32)
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2]]


def make_model(seed: int = 0, dtype=jnp.float32, stacked: bool = False) -> Model:
    return Model(CONFIG, init(CONFIG, jax.random.key(seed), dtype, plan(CONFIG, stacked)))


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def filled(model: Model, method: Method) -> Cache:
    return kvjax.prefill(model, PROMPT, method=method, room=4)[1]


METHODS = {
    "alisa, several arrays per row": lambda: kvjax.method("alisa", budget=0.5, window=2),
    "full": lambda: kvjax.method("full"),
    "h2o, statistics": lambda: kvjax.method("h2o", budget=0.5),
    "d2o, a threshold per row": lambda: kvjax.method("d2o", budget=0.5, sinks=1),
    "fp8": lambda: kvjax.method("fp8", kind="e5m2"),
    "turboquant": lambda: kvjax.method("turboquant", bits=3),
    "kivi, body and residual": lambda: kvjax.method("kivi", bits=2, group=4, residual=4),
    "adakv + int4, coded pages": lambda: kvjax.chain(
        kvjax.method("adakv", budget=0.5, window=1, page=4), kvjax.method("int4", group=8)
    ),
}


def assert_same_bits(a: Cache, b: Cache):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and not y.weak_type
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.rotating
@pytest.mark.parametrize("method", ["less(budget=0.5)", "razorattention(window=8)"])
def test_named_arrays_of_a_row_come_back(method, tmp_path):
    _, cache = kvjax.prefill(kvjax.load("recall-tiny"), [[*range(4, 68)]], method=method, room=2)
    assert any(isinstance(value, dict) for group in cache.groups for value in group.rows.values())
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert_same_bits(kvjax.load_cache(tmp_path / "a.cache"), cache)


# The first and the third are single arrays of slots, as the second is.
IN_TURN = (
    "full", "fp8", "turboquant", "h2o, statistics", "d2o, a threshold per row", "adakv + int4, coded pages",
)  # fmt: skip


@pytest.mark.rotating
@pytest.mark.parametrize(
    "build",
    [pytest.param(b, id=n, marks=[pytest.mark.rotating] * (n in IN_TURN)) for n, b in METHODS.items()],
)
def test_a_loaded_cache_has_the_same_bits_and_continues_without_compiling(build, model, tmp_path):
    cache = filled(model, build())
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache")
    assert_same_bits(cache, loaded)
    assert os.listdir(tmp_path) == ["a.cache"]

    token = jnp.array([3, 4], jnp.int32)
    expected, cache = kvjax.step(model, cache, token)
    programs = steps.step._cache_size()
    actual, loaded = kvjax.step(model, loaded, token)
    assert steps.step._cache_size() == programs
    np.testing.assert_array_equal(actual, expected)
    assert_same_bits(cache, loaded)


@pytest.mark.rotating
def test_bfloat16_and_stacked_layers_come_back(tmp_path):
    cache = filled(make_model(dtype=jnp.bfloat16, stacked=True), kvjax.method("full"))
    assert jax.tree.leaves(cache)[0].dtype == jnp.bfloat16 and len(cache.groups) == 1
    kvjax.save_cache(tmp_path / "a.cache", cache)
    assert_same_bits(cache, kvjax.load_cache(tmp_path / "a.cache"))


def test_every_field_of_slots_comes_back(tmp_path, rng):
    def values(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    slots = Slots(
        values(1, 2, 1, 4, 8), values(1, 2, 1, 4, 6), jnp.zeros((1, 2, 1, 4), jnp.int32),
        bias=values(1, 2, 1, 4), traces={"mass": values(1, 2, 1, 4)}, summary={"low": values(1, 2, 1, 2, 8)},
        sums={"values": values(1, 2, 1, 6)},
    )  # fmt: skip
    empty = dataclasses.replace(slots, k=values(1, 2, 1, 0, 8), v=values(1, 2, 1, 0, 6), bias=None, traces={})
    cache = Cache(
        (GroupState((slots,), empty, rows={"last": values(1, 2, 3)}),), jnp.array([4, 2], jnp.int32)
    )
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache")
    assert_same_bits(cache, loaded)
    assert loaded.method is None


def test_a_file_of_slots_without_a_field_that_came_later_is_read():
    x = jnp.zeros((1, 2, 1, 4, 8))
    tensors: dict = {}
    node = cache_tree.describe(Slots(x, x, jnp.zeros((1, 2, 1, 4), jnp.int32)), "slots", tensors)
    del node["sums"], node["shared"]
    slots = cache_tree._restore(node, "slots", {})
    assert slots.sums == {} and slots.shared == 0 and slots.k.shape == x.shape


@pytest.mark.rotating
def test_the_method_of_a_users_file_is_built_from_that_file(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "from kvjax.methods import chain, l2compress\n"
        "from kvjax.store.affine import Affine\n"
        "from kvjax.grammar import Store\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine(Affine):\n"
        "    pass\n"
        "def mine(budget, bits=8):\n"
        "    return chain(l2compress(budget), Store(Mine(bits), Mine(bits)))\n"
    )
    cache = filled(model, from_file("mine.py:mine", budget=0.5, bits=4))
    kvjax.save_cache("a.cache", cache)
    assert_same_bits(cache, kvjax.load_cache("a.cache", methods="mine.py"))

    (tmp_path / "mine.py").unlink()
    with pytest.raises(
        InputError, match=r"a\.cache was filled by a method that cannot be built: mine\.py cannot be read"
    ):
        kvjax.load_cache("a.cache", methods=["mine.py"])


def short(budget):
    return kvjax.method("snapkv", budget=budget, window=1)


# Written at revision 2e1ee1a3 by recall-tiny, after a prompt of twelve tokens.
OLDER = Path(__file__).parents[1] / "fixtures/caches/older_names.cache"
OLD = ("Encodable", "Cut", "AtArrival", "Received")


def recorded_method() -> Method:
    keep = Keep(EncodingAccuracy(Affine(4)) + AccumulatedAttention(), Budget(0.5), Uniform(), when=Every())
    return Method(keep, Store(Clipped(0.5) >> Affine(8)))


def test_a_cache_that_was_saved_under_older_names_of_words_loads():
    with safe_open(OLDER, framework="np") as file:
        text, arrays = json.dumps(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert all(f"{name}(" in text and name in RENAMED for name in OLD)
    loaded, error = kvjax.load_cache(OLDER), key_of(EncodingAccuracy(Affine(4)).error)
    assert loaded.method == recorded_method()
    tail = loaded.groups[1].tail
    old = next(x for name, x in arrays.items() if name.startswith("groups.1.tail.traces.AtArrival("))
    for x, want in (
        (tail.v, arrays["groups.1.tail.v"]),
        (tail.k.data["codes"], arrays["groups.1.tail.k.data.codes"]),
        (tail.traces[error], old),
    ):
        np.testing.assert_array_equal(x, want)


@pytest.mark.rotating
def test_a_cache_that_was_saved_under_older_names_of_words_goes_on():
    tiny = kvjax.load("recall-tiny")
    _, fresh = kvjax.prefill(tiny, PROMPT[:1], method=recorded_method(), room=4)
    want, got = (kvjax.step(tiny, cache, np.array([7])) for cache in (fresh, kvjax.load_cache(OLDER)))
    np.testing.assert_allclose(want[0], got[0], atol=1e-3)
    for x, y in zip(kvjax.kept_positions(want[1]), kvjax.kept_positions(got[1]), strict=True):
        np.testing.assert_array_equal(x, y)


@dataclasses.dataclass(frozen=True)
class MovedCodes(Affine):
    """Codes of rows plus an offset that is not printed."""

    offset: float = dataclasses.field(default=0.0, repr=False, kw_only=True)

    def encode(self, x):
        return super().encode(x + self.offset)

    def decode(self, data, width, dtype):
        return super().decode(data, width, dtype) - jnp.asarray(self.offset, dtype)


def moved(offset=8.0):
    return Method(store=Store(MovedCodes(8), MovedCodes(8, offset=offset)))


def test_codecs_that_print_the_same_decode_what_they_encoded(model, tmp_path):
    cache = filled(model, from_file(f"{__file__}:moved", offset=8.0))
    kvjax.save_cache(tmp_path / "a.cache", cache)
    loaded = kvjax.load_cache(tmp_path / "a.cache", methods=__file__)
    want, got = (kvjax.step(model, one, np.array([7, 7]))[0] for one in (cache, loaded))
    np.testing.assert_array_equal(want, got)


@dataclasses.dataclass(frozen=True, eq=False)
class Unspoken:
    """A part that prints nothing of itself and equals only itself."""

    def __repr__(self):
        return "Unspoken()"


@dataclasses.dataclass(frozen=True)
class UnspokenCodes(Affine):
    part: object = dataclasses.field(default_factory=Unspoken, kw_only=True)


def test_words_whose_names_are_the_same_are_not_saved(model, tmp_path):
    cache = filled(model, Method(store=Store(UnspokenCodes(8), UnspokenCodes(8))))
    with pytest.raises(InputError, match="two words of the method differ and are both Unspoken"):
        kvjax.save_cache(tmp_path / "a.cache", cache)


def rename(path, to, old, new):
    """Copy a file with another text in the names of its arrays and in its header."""
    with safe_open(path, framework="np") as file:
        tensors = {name.replace(old, new): file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        metadata = {name: text.replace(old, new) for name, text in file.metadata().items()}
    save_file(tensors, to, cache_arrays.sealed(metadata))


def test_a_file_that_names_words_without_a_later_field_loads(model, tmp_path):
    """Fields with a default may be added to words: text without them builds the same word."""
    cache = filled(model, kvjax.method("h2o", budget=0.5))
    kvjax.save_cache(tmp_path / "a.cache", cache)
    whole = str(key_of(AccumulatedMass()))
    (text,) = {key for group in cache.groups for part in group.parts for key in map(str, part.traces)}
    assert text == whole == "AccumulatedMass(mass=Mass(reduce='sum', threshold=0.0))"
    for short in ("AccumulatedMass()", "AccumulatedMass(mass=Mass(reduce='sum'))"):
        rename(tmp_path / "a.cache", tmp_path / "b.cache", whole, short)
        assert_same_bits(kvjax.load_cache(tmp_path / "b.cache"), cache)
    rename(tmp_path / "a.cache", tmp_path / "b.cache", whole, "AccumulatedMass(mass=QueryCount())")
    with pytest.raises(InputError, match="carry numbers of AccumulatedMass.mass=QueryCount"):
        kvjax.load_cache(tmp_path / "b.cache")


def test_every_word_that_slots_or_rows_carry_is_found_by_its_name():
    for label, row in BY_LABEL.items():
        method = row.method()
        words, gm = words_of(method), group_method(method, range(3, 4), None)
        carried = {*gm.traces, *gm.carried, *gm.learns} | ({gm.merge} - {None})
        assert carried <= words, label
        assert all(SavedWords(words).find(str(key_of(word))) == word for word in carried)


def test_older_names_of_words_are_those_of_words_that_exist():
    """No word has the older name of another one, which a file would then mean by it."""
    assert set(RENAMED.values()) <= set(classes()) and not set(RENAMED) & set(classes())
    text = "Method(keep=Keep(score=NotDropped({}()), budget=Budget(1.0), allocate=UpTo(0.0), when=Every()))"
    assert constructed(text.format("Dropping")) == constructed(text.format("FirstDroppingToken"))


def test_the_python_file_that_a_cache_names_is_not_imported(model, tmp_path):
    acts = tmp_path / "acts.py"
    acts.write_text(
        "import kvjax\ndef short(budget):\n    return kvjax.method('snapkv', budget=budget, window=1)\n"
    )
    cache = filled(model, from_file(f"{acts}:short", budget=0.5))
    kvjax.save_cache(tmp_path / "a.cache", cache)
    acts.write_text(f"open({str(tmp_path / 'done')!r}, 'w')")
    with pytest.raises(InputError, match="acts.py:short' is Python code, which is not run because"):
        kvjax.load_cache(tmp_path / "a.cache")
    with pytest.raises(InputError, match="is Python code"):
        kvjax.load_cache(tmp_path / "a.cache", methods=filled)
    loaded = kvjax.load_cache(tmp_path / "a.cache", methods=short)
    assert loaded.method.keep == cache.method.keep and loaded.method.id == f"{__file__}:short"
    assert not (tmp_path / "done").exists()
    kvjax.save_cache(tmp_path / "b.cache", loaded)
    assert kvjax.load_cache(tmp_path / "b.cache", methods=__file__).method == loaded.method


SPECS = (
    ["x", ["around", "per_layer", [], [["method", "{acts}:f"], ["shares", [1, 1]]]]],
    ["x", ["around", "by_layer", [], [["methods", ["{acts}:f", None]]]]],
    ["x", ["chain", ["snapkv", [["budget", 0.5]]], ["{acts}:f", []]]],
    ["{acts}:f", []],
    ["custom", ["__import__('os').system('touch done')"]],
    ["custom", ["Method(keep=open('done', 'w'))"]],
)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_no_method_that_a_header_names_runs_code(saved, spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acts.py").write_text("open('done', 'w')\ndef f(): pass")
    rewrite(saved, method=json.dumps(spec).replace("{acts}", str(tmp_path / "acts.py")))
    with pytest.raises(InputError, match="cannot be built") as caught:
        kvjax.load_cache(saved)
    assert not (tmp_path / "done").exists() and "\n" not in str(caught.value)


def test_a_cache_of_another_model_is_refused(model, tmp_path):
    kvjax.save_cache(tmp_path / "a.cache", filled(model, kvjax.method("full")))
    loaded, other = kvjax.load_cache(tmp_path / "a.cache"), make_model(seed=1)
    with pytest.raises(InputError, match="filled by another model"):
        kvjax.step(other, loaded, jnp.array([1, 2], jnp.int32))
    with pytest.raises(InputError, match="filled by another model"):
        kvjax.prefill(other, PROMPT, cache=loaded)


# --- what cannot be saved --------------------------------------------------------------------------------


def blank(method: Method | None = None) -> Cache:
    """Make the smallest cache there is."""
    zeros = jnp.zeros((1, 1, 1, 1, 2))
    slots = Slots(zeros, zeros, jnp.zeros((1, 1, 1, 1), jnp.int32))
    return Cache((GroupState(tail=slots),), jnp.zeros(1, jnp.int32), method=method)


def test_an_older_file_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    path = tmp_path / "a.cache"
    kvjax.save_cache(path, blank())
    before = path.read_bytes()

    def cut(tensors, file, metadata):
        file.write_bytes(before[:40])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache_arrays, "save_safetensors", cut)
        kvjax.save_cache(path, blank())
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.cache"]
    kvjax.save_cache(path, blank())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.cache", tmp_path):
        with pytest.raises(
            InputError, match=r"cannot be written \(.+\), expected .* writable directory: choose"
        ):
            kvjax.save_cache(path, blank())
    assert os.listdir(tmp_path) == ["file"]


WRITTEN = (
    kvjax.chain(Keep(KeyNorm() + 0.5, Budget(0.5), Uniform()), Store(Affine(8), Affine(8))),
    kvjax.method("l2compress", budget=0.5).protecting(Recent(1)),
    kvjax.per_layer(Method(Keep(KeyNorm(), Budget(1), Uniform())), (1, 0.5)),
    kvjax.per_layer("l2compress(budget=0.5) + int8", (None, 0.5)),
    kvjax.by_layer([None, "int8", Method(store=Store(Affine(8)))]),
)


@pytest.mark.parametrize("method", WRITTEN, ids=range(len(WRITTEN)))
def test_a_method_without_a_name_is_saved_with_its_cache(method, tmp_path):
    kvjax.save_cache(tmp_path / "a", blank(method))
    assert kvjax.load_cache(tmp_path / "a").method == method


@dataclasses.dataclass(frozen=True)
class OwnWord(KeyNorm):
    """A word of a user's own."""


def test_a_method_whose_words_kvjax_does_not_know_is_refused(tmp_path):
    own = Method(Keep(OwnWord(), Budget(0.5), Uniform()))
    with pytest.raises(InputError, match="OwnWord is no word of kvjax.* in a function of a file"):
        kvjax.save_cache(tmp_path / "a", blank(own))
    fitted = Fitted({"a": np.zeros(1)}, "SharedLayers", "")
    with pytest.raises(InputError, match="fitted arrays .* do not come with kvjax"):
        kvjax.save_cache(tmp_path / "a", blank(kvjax.method("kvsharer", fitted=fitted)))


def test_a_file_of_another_kind_is_not_replaced(tmp_path):
    save_file({"x": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("model.safetensors", "notes.txt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(InputError, match=f"{name} holds something else than kvjax cache, which would be"):
            kvjax.save_cache(tmp_path / name, blank())
        with pytest.raises(InputError, match=f"{name} holds something else than kvjax fitted arrays"):
            kvjax.save_fitted(tmp_path / name, kvjax.load_fitted(SHIPPED / "recall-tiny/locret.safetensors"))
        assert (tmp_path / name).read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2


def test_a_consumed_cache_is_refused(model, tmp_path):
    cache = filled(model, kvjax.method("full"))
    kvjax.step(model, cache, jnp.array([1, 2], jnp.int32))
    with pytest.raises(InputError, match="consumed by kvjax.step"):
        kvjax.save_cache(tmp_path / "a", cache)


# --- what cannot be loaded -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.cache"
    kvjax.save_cache(path, blank(kvjax.method("int8")))
    return path


def rewrite(path, **changes: str):
    """Write the same file with other metadata."""
    with safe_open(path, framework="np") as file:
        tensors = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path, cache_arrays.sealed(metadata | changes))


def tree_of(path):
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["tree"])


@pytest.mark.rotating
def test_every_flipped_bit_is_noticed(saved, rng):
    before = saved.read_bytes()
    for at in [*range(8 * len(before) - 8 * 40, 8 * len(before)), *rng.integers(0, 8 * len(before), 300)]:
        data = bytearray(before)
        data[at // 8] ^= 1 << at % 8
        saved.write_bytes(data)
        with pytest.raises(InputError) as caught:
            kvjax.load_cache(saved)
        assert "\n" not in str(caught.value)
        saved.write_bytes(before)
    kvjax.load_cache(saved)


def without(tree, *places):
    found = json.loads(json.dumps(tree))
    at = found
    for place in places[:-2]:
        at = at[place]
    at[places[-2]] = places[-1]
    return found


WRONG_TREES = {
    "no groups": ("groups", []),
    "no list": ("groups", 5),
    "text": ("groups", "x"),
    "null in groups": ("groups", [None]),
    "slots in groups": ("groups", 0, {"node": "State", "data": {"dict": {}}}),
    "an empty group": ("groups", 0, "tail", None),
    "no node": ("groups", 0, "tail", {"node": "Method"}),
    "a number": ("groups", 0, "tail", "pos", 3),
    "other axes": ("groups", 0, "tail", "pos", {"array": "int32", "shape": [1]}),
    "floats": ("groups", 0, "tail", "pos", {"array": "float32", "shape": [1, 1, 1, 1]}),
    "objects": ("groups", 0, "tail", "k", {"array": "O", "shape": [1, 1, 1, 1, 2]}),
    "negative": ("groups", 0, "tail", "k", {"array": "float32", "shape": [-1, 1, 1, 1, 2]}),
    "large": ("groups", 0, "tail", "k", {"array": "float32", "shape": [10**12, 1, 1, 1, 2]}),
    "static": ("groups", 0, "tail", "shared", "x"),
    "next": ("next", {"dict": {}}),
}


@pytest.mark.parametrize("places", WRONG_TREES.values(), ids=WRONG_TREES.keys())
def test_a_tree_that_is_no_cache_is_refused_in_one_line(saved, places):
    kvjax.save_cache(saved, blank())
    rewrite(saved, tree=json.dumps(without(tree_of(saved), *places)))
    with pytest.raises(InputError, match="is damaged") as caught:
        kvjax.load_cache(saved)
    assert "\n" not in str(caught.value)
    assert main(["inspect", str(saved)]) in (0, 2)  # it reads less


@pytest.mark.parametrize("name", ["tree", "method", "fitted", "parts"])
@pytest.mark.parametrize("value", ["[" * 100000, "5", '"x"', "{}", "[5]", "[[]]", "null"])
def test_metadata_of_another_kind_is_refused_in_one_line(saved, name, value):
    if (name, value) == ("method", "null"):  # a cache that no method filled
        return
    rewrite(saved, **{name: value})
    with pytest.raises(InputError) as caught:
        kvjax.load_cache(saved)
    assert "\n" not in str(caught.value)


PARTS = ("../outside.cache.0123abcd.0-of-1", "{tmp}/outside", "other", "..", "", "a/b.0123abcd.0-of-1", 5)


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_lie_elsewhere_are_neither_read_nor_removed(saved, part, tmp_path):
    part = part.format(tmp=tmp_path) if isinstance(part, str) else part
    for name in ("outside", "other", "a.cache.0123abcd.0-of-2", "b.cache.0123abcd.0-of-1"):
        (tmp_path / name).write_text("mine")
    before = sorted(os.listdir(tmp_path))
    rewrite(saved, parts=json.dumps([part]))
    with pytest.raises(InputError, match="names parts that are no files of a cache beside it"):
        kvjax.load_cache(saved)
    for parts in ([part], ["b.cache.0123abcd.0-of-1"], ["a.cache.0123abcd.0-of-2"]):
        rewrite(saved, parts=json.dumps(parts))
        kvjax.save_cache(saved, blank())
        assert sorted(os.listdir(tmp_path)) == before


def test_threads_that_save_to_one_path_do_not_meet(tmp_path):
    cache = blank()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kvjax.save_cache(tmp_path / "a.cache", cache), range(60)))
    assert os.listdir(tmp_path) == ["a.cache"]
    assert_same_bits(kvjax.load_cache(tmp_path / "a.cache"), cache)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(
        InputError, match="nowhere does not exist, expected a file that kvjax.save_cache wrote"
    ):
        kvjax.load_cache(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a directory, expected a file"):
        kvjax.load_cache(tmp_path)


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "text").write_text("what is this? a shopping list")
    with pytest.raises(InputError, match="safetensors file.*expected a whole file that kvjax.save_cache"):
        kvjax.load_cache(tmp_path / "text")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "weights")
    with pytest.raises(InputError, match="is a safetensors file but no cache, expected .* kvjax.load"):
        kvjax.load_cache(tmp_path / "weights")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_says_so(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(InputError, match="is truncated: .* bytes.*expected a whole file"):
        kvjax.load_cache(saved)


def test_a_newer_format_asks_for_an_update(saved):
    rewrite(saved, format="11", kvjax="9.0")
    with pytest.raises(
        InputError, match=r"format 11 \(written by kvjax 9.0\), expected at most 10.*: update kvjax"
    ):
        kvjax.load_cache(saved)


@pytest.mark.parametrize("old", ["1", "2", "3", "4", "5"])
def test_older_formats_are_refused_by_name(saved, old):
    rewrite(saved, format=old, kvjax="0.0")
    with pytest.raises(
        InputError,
        match=rf"format {old} \(written by kvjax 0.0\), which an older .*prefill again",
    ):
        kvjax.load_cache(saved)


def test_a_damaged_header_says_so(saved):
    rewrite(saved, tree="{")
    with pytest.raises(InputError, match="is damaged .*: save it again"):
        kvjax.load_cache(saved)


def test_a_tree_that_names_absent_arrays_says_so(saved):
    rewrite(saved, tree=json.dumps(tree_of(saved) | {"next": {"array": "int32", "shape": [2]}}))
    with pytest.raises(InputError, match="is damaged .*"):
        kvjax.load_cache(saved)


def test_a_method_that_no_longer_exists_is_named(saved):
    rewrite(saved, method='["snapkw", []]')
    with pytest.raises(
        InputError, match="method that cannot be built: unknown method 'snapkw': did you mean 'snapkv'"
    ):
        kvjax.load_cache(saved)


@pytest.mark.rotating
def test_codes_of_another_codec_are_refused(model, saved):
    kvjax.save_cache(saved, filled(model, kvjax.method("int8")))
    rewrite(saved, method='["int4", [["group", 8]]]')
    with pytest.raises(InputError, match=r"codes were written by Affine\(bits=8.*stores with Affine\(bits=4"):
        kvjax.load_cache(saved)
