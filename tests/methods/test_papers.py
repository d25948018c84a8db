"""What is written beside every method: its family, its paper, what it deviates in, its name in kvpress."""

import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest

import kvjax.methods
from kvjax.commands import methods_cards
from kvjax.commands.main import main
from kvjax.commands.methods_cards import families
from kvjax.grammar import Method
from kvjax.methods import METHODS, Press, methods, paper, snapkv
from kvjax.methods.papers import collect
from kvjax.methods.parse import parse_method
from kvjax.methods.user import from_file, load_function
from scripts.site import methods as cards

ROOT = Path(__file__).parents[2]
each = pytest.mark.parametrize("id", METHODS)


@each
def test_a_method_lies_in_a_file_of_its_family(id):
    function = METHODS[id]
    file = function.__module__.rpartition(".")[2]
    assert file.startswith(function.paper.family.replace("-", "_"))


@each
def test_the_docstring_names_the_paper_and_what_deviates_from_it(id):
    text, known = METHODS[id].__doc__, METHODS[id].paper
    assert known.arxiv in text
    assert ("Deviation" in text) == (known.exact == "deviates")


VARIED = [id for id in METHODS if "variant" in inspect.signature(METHODS[id]).parameters]


@pytest.mark.parametrize("id", VARIED)
def test_the_docstring_names_every_variant_and_why_one_is_the_default(id):
    default = inspect.signature(METHODS[id]).parameters["variant"].default
    text = " ".join(METHODS[id].__doc__.split())
    names = get_args(get_type_hints(inspect.unwrap(METHODS[id]))["variant"])
    assert len(names) > 1 and all(f'"{name}"' in text for name in names)
    assert f'"{default}", the default because' in text


@pytest.mark.parametrize("id", [id for id in METHODS if METHODS[id].paper.kvpress])
def test_what_does_as_kvpress_does_can_be_written_on_the_command_line(id):
    press = METHODS[id].paper.kvpress
    label, _ = parse_method(f"{id}:{press.hyper}")
    assert label == (f"{id}:{press.hyper}" if press.hyper else id)
    assert re.fullmatch(r"\w+Press(\(\w+Press\))?", press.name) and press.same


def test_a_site_gets_a_page_of_every_family(monkeypatch):
    monkeypatch.setattr(methods_cards, "_company", lambda id: ({"keeps": ["h2o"]}, {"they differ": ["cam"]}))
    texts = cards.pages()
    assert set(texts) == {*families(), "index"}
    for family, ids in families().items():
        sections = texts[family].split("\n## ")[1:]
        assert [section.split("\n")[0] for section in sections] == ids
        for id, section in zip(ids, sections, strict=True):
            assert f"]({family}.md#{id})" in texts["index"]
            assert f"# kvjax.method({id!r}" in section and METHODS[id].paper.title in section
            assert "**Chains with keeps**: h2o  \n**Not with**: cam (`kvjax explain" in section


# All classes of kvpress 0.5.5 that are no base of others.
PRESSES = """
    AdaKV Block CAM Cap Chunk ChunkKV Compactor Composed CompressionRatioDecoding CriticalAdaKV CriticalKV
    CUR DMS Decoding DuoAttention EntropyGatedChunkKV ExpectedAttention ExpectedAttentionStats FastKVzip
    Finch KVCompose KVgrad KVzap KVzip KeyDiff KeyRerotation Knorm LUKV LagKV LeverageScore Merging
    NonCausalAttn ObservedAttention PerLayerCompression PrefillDecoding PyramidKV QFilter Random RestoreKV
    SimLayerKV SnapKV StreamingLLM TOVA ThinK
""".split()


def test_every_press_is_a_method_or_on_the_page():
    ours = {METHODS[id].paper.kvpress for id in METHODS} - {None}
    said = " ".join(press.name for press in ours) + (ROOT / "docs" / "methods.md").read_text()
    assert [name for name in PRESSES if not re.search(rf"\b{name}Press\b", said)] == []


def test_the_listing_has_what_the_decorator_was_given():
    by_id = {info.id: info for info in methods()}
    assert (by_id["kivi"].exact, by_id["kivi"].kvpress) == ("deviates", "")
    assert (by_id["snapkv"].exact, by_id["snapkv"].kvpress) == ("equal", "SnapKVPress")
    assert (by_id["full"].exact, by_id["full"].arxiv, by_id["full"].year) == ("", "", None)


def test_functions_are_found_by_their_names():
    assert snapkv is METHODS["snapkv"] and "expected_attention" in dir(kvjax.methods)
    with pytest.raises(AttributeError, match="no attribute 'snapvk'"):
        kvjax.methods.snapvk  # noqa: B018


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(arxiv="2404.14469v2", exact="equal"), "arxiv must be an id such as '2404.14469'"),
        (dict(arxiv="2404.14469"), "exact must be 'equal' or 'deviates' with an arxiv id, got ''"),
        (dict(exact="equal"), "exact must be '' without an arxiv id, got 'equal'"),
    ],
)
def test_a_record_that_says_too_little_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        paper("Mine", family="mine", **given)(snapkv)
    assert snapkv.paper.title.startswith("SnapKV")


def module_of(name: str, *functions) -> ModuleType:
    module = ModuleType(name)
    for function in functions:
        function.__module__ = name
        setattr(module, function.__name__, function)
    return module


def marked(name: str, **more):
    def function() -> Method:
        return Method()

    function.__name__ = name
    return paper(name, family="mine", **more)(function)


def test_functions_are_collected_in_the_order_of_the_files_and_imported_ones_are_not():
    one = module_of("one", marked("b_b", kvpress="BPress"), marked("a", id="renamed"))
    two = module_of("two", marked("c", aliases=("d",)))
    two.imported = one.b_b
    found = collect(two, one)
    assert list(found) == ["c", "b-b", "renamed"]
    assert found["b-b"].paper.kvpress == Press("BPress")


def test_an_id_or_alias_that_is_taken_is_refused():
    one, two = module_of("one", marked("a", aliases=("b",))), module_of("two", marked("b"))
    with pytest.raises(ValueError, match="two: another method has the id or alias 'b'"):
        collect(one, two)


def test_a_function_in_a_file_of_ones_own_may_carry_a_record(tmp_path):
    file = tmp_path / "mine.py"
    source = """
        from kvjax.methods import paper, snapkv

        @paper("Short windows", arxiv="2404.14469", family="selection-static", exact="deviates")
        def short(budget):
            return snapkv(budget, window=8)
    """
    file.write_text(textwrap.dedent(source))
    assert from_file(f"{file}:short", budget=0.25).keep == snapkv(0.25, window=8).keep
    assert load_function(f"{file}:short").paper.title == "Short windows"
    assert "short" not in METHODS


def test_the_default_variant_selects_per_kv_head_and_what_others_cost_is_said(capsys):
    for id in ("snapkv", "pyramidkv"):
        assert not kvjax.method(id, budget=0.5).keep.per_query_head
        assert kvjax.method(id, budget=0.5, variant="paper").keep.per_query_head
    assert "N / K times the bytes" in " ".join(snapkv.__doc__.split())
    assert main(["methods"]) == 0
    assert "query heads / KV heads" in " ".join(capsys.readouterr().out.split())
