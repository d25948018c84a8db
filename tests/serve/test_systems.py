"""Systems are sentences: what is refused, how a text is read, and what the command prints."""

import dataclasses
import json
import subprocess
import sys

import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.serve.grammar import System, words
from kvjax.serve.systems import SYSTEMS, system


def test_equal_sentences_are_equal_values_and_their_text_builds_them_again():
    for id, function in SYSTEMS.items():
        built = function()
        assert built == system(id) and hash(built) == hash(system(f"{id}()"))
        assert eval(str(built), vars(words) | {"System": System}) == built
        with pytest.raises(dataclasses.FrozenInstanceError):
            built.place = None


@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(share=words.Tree(), evict=words.LRU(), place=words.Lanes()), "write place=Blocks"),
        (dict(share=words.Tree()), "add evict=LRU()"),
        (dict(evict=words.LRU()), "add share=Tree()"),
        (dict(order=words.LongestPrefix()), "add share=Tree()"),
        (dict(attend=words.ByNode()), "add share=Tree()"),
        (dict(order=words.SkipJoin(), preempt=words.Swap(), batch=words.Chunked()), "batch=Iterations()"),
        (dict(order=words.SkipJoin()), "preempt=Swap()"),
        (dict(order=words.Bins()), "batch=Whole()"),
        (dict(batch=words.Whole()), "place=Lanes('max')"),
        (dict(batch=words.Whole(), place=words.Lanes("predicted"), preempt=words.Never()), "Lanes('max')"),
        (dict(preempt=words.Never()), "preempt=Recompute()"),
        (dict(split=words.Apart(), place=words.Lanes(), preempt=words.Never()), "place=Blocks(16)"),
        (dict(split=words.Chain(), batch=words.Chunked()), "batch=PrefillFirst()"),
        (dict(place=words.LRU()), "expected one of Blocks, Spans, Lanes"),
    ],
)
def test_words_that_do_not_go_together_are_refused_with_what_to_write(parts, message):
    with pytest.raises(kvjax.InputError) as error:
        System(**parts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("vlm", "did you mean vllm?"),
        ("vllm(pages=16)", "did you mean page?"),
        ("vllm(page=0)", "expected a whole number from 1 up"),
        ("vllm(page=1.5)", "expected a whole number from 1 up"),
        ("vllm(16)", "expected names with numbers"),
        ("vllm(page=", "expected one such as"),
        ("vllm(page=*)", "cannot be read"),
        ("", "expected one such as"),
    ],
)
def test_a_wrong_text_is_answered_with_the_nearest_right_one(text, message):
    with pytest.raises(kvjax.InputError) as error:
        system(text)
    assert message in str(error.value)


def test_a_place_has_the_rooms_that_it_names():
    with pytest.raises(kvjax.InputError, match="max, pow2, oracle or predicted"):
        words.Lanes("pow3")


def test_the_command_lists_all_and_prints_a_card(capsys):
    assert main(["systems"]) == 0
    listed = capsys.readouterr().out
    assert all(id in listed for id in SYSTEMS)
    assert main(["systems", "sarathi", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert "2403.02310" in card["paper"] and "Chunked(tokens=512" in card["sentence"] and card["reverses"]
    assert main(["systems", "orka"]) == 2
    assert "did you mean orca?" in capsys.readouterr().err


def test_nothing_of_serving_but_its_engine_and_door_imports_jax():
    code = (
        "import sys, pkgutil, importlib, kvjax.serve as s\n"
        "names = [m.name for m in pkgutil.walk_packages(s.__path__, 'kvjax.serve.')]\n"
        "for n in names: n.split('.')[2] in ('device', 'http') or importlib.import_module(n)\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
