"""The list of architectures: what it says, how it is asked, and that it leaves nothing out."""

import json

import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.commands.main import main
from kvjax.io.gin_bindings import training_files
from kvjax.models.config_json import MIXERS


def test_every_mixer_makes_some_architecture_and_the_training_files_exist():
    rows = kvjax.architectures()
    words = " ".join(row.words for row in rows)
    assert [n for n, kind in MIXERS.items() if kind.__module__.startswith("kvjax.") and n not in words] == []
    assert {row.training for row in rows} - {""} <= set(training_files())
    names = [name for row in rows for name in (row.id, *row.aliases)]
    assert len(names) == len(set(names)) and all(row.about and row.state for row in rows)


def test_an_architecture_is_found_by_any_of_its_names_and_a_wrong_one_has_the_nearest():
    assert kvjax.architecture("weighted_gqa").id == "gqa" and kvjax.architecture("MLA").year == 2024
    assert kvjax.architecture("mixcon").year is None
    with pytest.raises(InputError, match="unknown architecture 'mambo': did you mean 'mamba'"):
        kvjax.architecture("mambo")


def test_the_command_lists_what_makes_the_cache_and_refuses_unknown_verbs(capsys):
    assert main(["methods", "--verb", "make", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["verbs"] == ["make"] or "make" in row["verbs"] for row in rows)
    assert {row.id for row in kvjax.architectures()} <= {row["id"] for row in rows}
    assert main(["methods", "--verb", "make"]) == 0
    assert f"{len(kvjax.architectures())} architectures." in capsys.readouterr().out
    assert main(["methods", "--verb", "mak"]) == 2
    assert "did you mean make" in capsys.readouterr().err
