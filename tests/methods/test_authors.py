"""What a method's author may get wrong in a word: one sentence each, when the sentence is built."""

import dataclasses
import textwrap

import jax.numpy as jnp
import pytest

from kvjax.base.errors import InputError
from kvjax.grammar import Budget, Keep
from kvjax.grammar.kinds import Observed
from kvjax.keep.algebra import Word
from kvjax.keep.budgets.budget import Uniform
from kvjax.keep.merges.merge import ZipMerge
from kvjax.keep.observations.observe import Queries
from kvjax.keep.patterns import Recent, Sink
from kvjax.keep.scores.score import KeyNorm
from kvjax.methods import METHODS, takes_budget
from kvjax.methods.declared import check_declared
from kvjax.methods.user import from_file

HALF = Budget(0.5)


class Thawed(Word):
    def __call__(self, view, seen):
        return view.k[..., 0]


@dataclasses.dataclass
class Melting(Thawed):
    pass


@dataclasses.dataclass(frozen=True)
class Baseless:
    def __call__(self, view, seen):
        return view.k[..., 0]


@dataclasses.dataclass(frozen=True)
class Listed(Thawed):
    weights: list


@dataclasses.dataclass(frozen=True)
class Plain(Thawed):
    def needs(self):
        return frozenset()


@dataclasses.dataclass(frozen=True)
class Wanting(Thawed):
    needs = frozenset({Queries})


@dataclasses.dataclass(frozen=True)
class Aimless(Uniform):
    needs = frozenset({Queries(2)})


@dataclasses.dataclass(frozen=True)
class Partial(Word):
    """A score without `__call__`."""


@dataclasses.dataclass(frozen=True)
class Unstated(Uniform):
    """Says what heads should get, which only a `Preferring` is asked."""

    def preference(self, view, seen):
        return view.pos[..., 0]


@dataclasses.dataclass(frozen=True)
class Own:
    def __call__(self, inputs):
        return inputs.length


@dataclasses.dataclass(frozen=True)
class Watching(Thawed):
    needs = frozenset({Own()})


BAD = {
    "nothing to call": (
        dict(score=Partial()),
        r"^Partial is a score without `__call__`: define it as kvjax\.words\.Word says$",
    ),
    "an ability that is not stated": (
        dict(allocate=Unstated()),
        r"^Unstated defines `preference` and `counts` and is no Preferring: subclass kvjax\.grammar\.kinds",
    ),
    "a need without a base": (
        dict(score=Watching()),
        r"^Own is no observation: every observation is .* subclasses kvjax\.words\.Observation$",
    ),
    "not frozen": (
        dict(score=Thawed()),
        r"^Thawed is no frozen dataclass.*: write @dataclasses\.dataclass\(froz",
    ),
    "thawed": (dict(score=Melting()), r"^Melting is no frozen dataclass"),
    "no base": (
        dict(score=Baseless()),
        r"^Baseless is no score: every score is a frozen dataclass that subclasses kvjax\.words\.Word$",
    ),
    "a list": (
        dict(score=Listed([1])),
        r"^Listed\(weights=\[1\]\) cannot be hashed .*: its fields must be numb",
    ),
    "a method": (
        dict(score=Plain()),
        r"^`needs` of Plain must be a frozenset, got method: wri",
    ),
    "a class": (
        dict(score=KeyNorm),
        r"^the score is the class KeyNorm, not one of its words: write KeyNorm\(\)",
    ),
    "a need's class": (
        dict(score=Wanting()),
        r"^the observation is the class Queries, .*: write Queries\(last=",
    ),
    "no tuple": (
        dict(protect=Recent(8)),
        r"^protect must be a tuple .*: write protect=\(Recent\(tokens=8\),\)$",
    ),
    "a list of patterns": (
        dict(protect=[Sink(4)]),
        r"^protect must be a tuple of patterns, got \[Sink\(tokens=4",
    ),
    "a number": (dict(protect=(4,)), r"^int is no pattern: .* subclasses kvjax\.words\.Pattern$"),
    "an allocation": (dict(allocate=Uniform), r"^the allocation is the class Uniform.*: write Uniform\(\)$"),
    "a score for an allocation": (
        dict(allocate=KeyNorm()),
        r"^KeyNorm is no allocation: .* subclasses kvjax\.words\.Allocation$",
    ),
    "an allocation without a preference": (
        dict(allocate=Aimless()),
        r"^Aimless has `needs` and no `preference`: subclass kvjax\.grammar\.kinds\.Preferring",
    ),
    "a number for when": (dict(when=4), r"^int is no when: every when is .* subclasses kvjax\.words\.When$"),
    "a merge": (dict(merge=0.8), r"^float is no merge: .* subclasses kvjax\.words\.Merge$"),
    "a number for a budget": (
        dict(budget=0.5),
        r"^a keep's budget must be a Budget, got 0\.5: write Budget\(",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD.keys())
def test_a_word_that_cannot_work_is_refused_with_what_to_write(wrong, message):
    right = dict(score=KeyNorm(), budget=HALF, allocate=Uniform(), protect=(Sink(4),), merge=ZipMerge())
    Keep(**right)
    with pytest.raises(ValueError, match=message) as caught:
        Keep(**right | wrong)
    assert "\n" not in str(caught.value)


SOURCE = """
    import dataclasses
    import jax.numpy as jnp
    from kvjax.grammar import Budget, Keep, Method
    from kvjax.keep.budgets.budget import Uniform
    from kvjax.keep.observations.observe import Mass, Queries
    from kvjax.keep.algebra import Pool, Word
    from kvjax.keep.observations.trace import AccumulatedMass

    @dataclasses.dataclass(frozen=True)
    class Score(Word):
        named: bool
        stat: bool = False

        @property
        def needs(self):
            return frozenset({Queries(2)}) if self.named else frozenset()

        def __call__(self, view, seen):
            if self.stat:
                return view.of(AccumulatedMass(Mass()))
            q, _ = seen.of(Queries(2))
            return jnp.einsum("bkgwh,bksh->bks", q.reshape(1, 1, 2, 2, -1), view.k)

    def method(budget, named=False, stat=False):
        return Method(Keep(Score(named, stat) >> Pool(3), Budget(budget), Uniform()))

    class Odd(Word):
        def __call__(self, view, seen):
            return view.k[..., 0]

    def thawed(budget):
        return Method(Keep(Odd(), Budget(budget), Uniform()))
"""


def test_a_score_that_does_not_name_what_it_looks_at_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(SOURCE))
    need = r"^Score looks at Queries\(last=2\), which its `needs` does not name: .* frozenset\(\{Queries"
    with pytest.raises(InputError, match=need):
        from_file(f"{file}:method", budget=0.5)
    with pytest.raises(
        InputError, match=r"looks at view\.of\(AccumulatedMass.*, which its `traces` does not name"
    ):
        from_file(f"{file}:method", budget=0.5, stat=True)
    assert from_file(f"{file}:method", budget=0.5, named=True).keep.score.needs == {Queries(2)}
    with pytest.raises(ValueError, match="Odd is no frozen dataclass"):
        from_file(f"{file}:thawed", budget=0.5)


@pytest.mark.parametrize("id", METHODS)
def test_every_score_of_the_library_names_what_it_looks_at(id):
    check_declared(METHODS[id](**({"budget": 0.5} if takes_budget(id) else {})).keep)


def test_what_was_not_recorded_is_named_when_a_score_runs():
    n = jnp.zeros((1,), jnp.int32)
    with pytest.raises(
        ValueError, match=r"Queries\(last=2\) was not recorded: name it in the score's `needs`"
    ):
        Observed({}, None, n, n, 0, None).of(Queries(2))
