"""A word whose result has another shape than it promises is refused when it is traced and never broadcast."""

import dataclasses

import jax.numpy as jnp
import pytest

import kvjax
from kvjax.grammar import Budget, Keep, Method, Store
from kvjax.grammar.fitted import Fitted, FittedWord, fitted_words
from kvjax.grammar.kinds import Pattern
from kvjax.grammar.when import STEP
from kvjax.keep.algebra import Pool, Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.patterns import Recent
from kvjax.keep.scores.score import AccumulatedAttention, Position
from kvjax.read.hashed import HashSampling
from kvjax.read.pages import PageBounds
from kvjax.state.codes import Codec
from kvjax.store.rotate import Rotate
from tests.methods.battery import MAIN, model

HALF = Budget(0.5)
# As many rows as KV heads, where [B, S] broadcasts.
TWO = MAIN.first[:2]


@dataclasses.dataclass(frozen=True)
class OverHeads(Word):
    """One score per row and slot: over K rows of K heads, head k would follow row k."""

    def __call__(self, view, seen):
        return jnp.where(seen.layer >= 0, view.pos.mean(1), 0.0)


@dataclasses.dataclass(frozen=True)
class InSteps(Position):
    """Scores of prefills have the right shape, those of steps, where the query is known, have not."""

    def __call__(self, view, seen):
        return Position()(view, seen) if seen.query is None else jnp.zeros(view.pos.shape[-1])


@dataclasses.dataclass(frozen=True)
class Weights(Pattern):
    """A pattern of numbers."""

    def __call__(self, pos, length, n):
        return (pos < 3).astype("int32")


@dataclasses.dataclass(frozen=True)
class FirstHead(Pattern):
    def __call__(self, pos, length, n):
        return (pos < 1)[:, :1]


@dataclasses.dataclass(frozen=True)
class PerRow(Uniform):
    def counts(self, scores, n):
        return n[None, :, None]


@dataclasses.dataclass(frozen=True)
class HalfOfIt(ZipMerge):
    def __call__(self, view, kept, leaving, seen):
        return view._replace(v=view.v[..., :1])


@dataclasses.dataclass(frozen=True)
class Shorter(Codec):
    granule = 1

    def encode(self, x):
        return {"x": x}

    def decode(self, data, width, dtype):
        return data["x"][..., : width // 2]


@dataclasses.dataclass(frozen=True)
class Former(Shorter):
    def taught(self, arrays):
        return self


@dataclasses.dataclass(frozen=True)
class OnePage(PageBounds):
    def select(self, q, body, layer, length, implementation=None):
        pages, counts = super().select(q, body, layer, length, implementation)
        return pages[:, :, :1], counts


@dataclasses.dataclass(frozen=True)
class OneHead(HashSampling):
    def sample(self, q, body, layer, length):
        slots, counts, bias = super().sample(q, body, layer, length)
        return slots, counts, bias[:, :1]


def keep(score=None, protect=(), allocate=None, **more):
    return Method(Keep(score or Position(), HALF, allocate or Uniform(), protect, **more))


WRONG = {
    "score": (
        keep(OverHeads()),
        r"OverHeads\(\) gave scores: .* \[2, 32\], expected \[B, K, S\] = ",
    ),
    "score behind a pool": (keep(OverHeads() >> Pool(3)), r"OverHeads\(\) gave scores: float32 of shape"),
    "score of a step": (
        keep(InSteps(), when=STEP),
        r"InSteps\(\) gave scores: float32 of shape \[\d+\]",
    ),
    "pattern of numbers": (keep(protect=(Weights(),)), r"Weights\(\) gave a mask: int32 .* expected bool"),
    "pattern of a head": (
        keep(protect=(FirstHead(),)),
        r"FirstHead\(\) gave a mask: bool .*\[2, 1, 32\]",
    ),
    "allocation": (keep(allocate=PerRow()), r"PerRow\(\) gave counts: int32 .* expected \[L, B, K\] = "),
    "merge": (
        keep(AccumulatedAttention(), (Recent(2),), merge=HalfOfIt()),
        r"HalfOfIt\(threshold=0.8\) gave a view's v: .* \[2, 2, 32, 1\], expected \[B, K, S, V\]",
    ),
    "codec": (
        Method(store=Store(Shorter(), None)),
        r"Shorter\(\) gave decoded rows: float32 of shape \[1, 8\], expected \[granule, width\] = \[1, 16\]",
    ),
    "read": (
        Method(read=OnePage(HALF, 4, 0)),
        r"OnePage\(.*\) gave pages: int32 of shape \[2, 2, 1\]",
    ),
    "sample": (
        Method(read=OneHead(HALF, 2, 3, 1, 4, 0)),
        r"OneHead\(.*\) gave biases: float32 of shape \[2, 1, \d+\], expected \[B, N, M \* granule\]",
    ),
}


@pytest.mark.parametrize(("method", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_result_of_another_shape_names_the_word(method, message):
    with pytest.raises(ValueError, match=message):
        kvjax.generate(model("4/2"), TWO, method=method, max_new_tokens=2)


@pytest.mark.parametrize("codec", [Former(), Rotate() >> Former()])
def test_a_codec_with_a_method_of_a_former_name_is_refused(codec):
    with pytest.raises(ValueError, match="Former defines `taught`, which nothing calls: rename it `bind`"):
        Store(None, codec)


@dataclasses.dataclass(frozen=True)
class Shrunk(Codec):
    """A codec whose author has a field for fitted arrays, and no base class that says so."""

    fitted: Fitted | None = None
    granule = 1

    def encode(self, x):
        return {"half": x / 2}

    def decode(self, data, width, dtype):
        return 2 * data["half"]


def test_a_word_with_fitted_arrays_subclasses_fitted_word():
    """Otherwise no program would get its arrays, and `kvjax fit` would not find it."""
    with pytest.raises(ValueError, match=r"field `fitted` and is no FittedWord.*kvjax\.words\.FittedWord"):
        Method(store=Store(Shrunk(), None))

    @dataclasses.dataclass(frozen=True)
    class Found(Shrunk, FittedWord):
        by = "found"

        def check(self, model):
            pass

    assert [word.by for word in fitted_words(Method(store=Store(Found(), None)))] == ["found"]
