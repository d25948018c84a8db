"""`kvjax fit`: what it reads, the file that it writes, and what it refuses."""

from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.eval.tasks.sample import ForcedSample
from tests.sweep import sweep

SMALL = ("--length", "64", "--rows", "2", "--batch", "2")


def fit(tmp_path, *words):
    out = tmp_path / "fitted.safetensors"
    assert main(["fit", *words, *SMALL, "--out", str(out)]) == 0
    return kvjax.load_fitted(out)


@pytest.mark.rotating
def test_a_gate_is_written_and_found_by_its_method(tmp_path, capsys):
    fitted = fit(tmp_path, "kvzap", "--set", "ridge=0.5")
    assert fitted.word == "HiddenGate" and "use it as kvzap:fitted=" in capsys.readouterr().out
    assert kvjax.method("kvzap", fitted=str(tmp_path / "fitted.safetensors")).id == "kvzap"
    again = ["fit", "kvzap", *SMALL, "--out", str(tmp_path / "fitted.safetensors")]
    assert main(again) == 2 and "is not replaced unasked" in capsys.readouterr().err
    (tmp_path / "notes.txt").write_text("mine")
    for name, message in (
        ("notes.txt", "something else than kvjax fitted"),
        ("notes.txt/a", "cannot be written"),
    ):
        assert main([*again[:-1], str(tmp_path / name), "--overwrite"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.rotating
def test_the_sentence_to_use_says_what_the_fit_and_the_method_have_in_common(tmp_path, capsys):
    fit(tmp_path, "kvquant", "--set", "bits=2", "outliers=0.02")
    used = capsys.readouterr().out.split("use it as kvquant:")[1].strip()
    assert used == f"fitted={tmp_path / 'fitted.safetensors'},bits=2,outliers=0.02"
    assert kvjax.method("kvquant", bits=2, outliers=0.02, fitted=str(tmp_path / "fitted.safetensors"))


@pytest.mark.rotating
def test_a_method_is_fitted_with_its_own_hyper_parameters(tmp_path, capsys):
    fitted = fit(tmp_path, "ccm(tokens=3, chunk=8)", "--epochs", "1", "--rank", "2")
    assert fitted.arrays["memory"].shape[1] == 3
    assert (
        f"use it as ccm:chunk=8,fitted={tmp_path / 'fitted.safetensors'},tokens=3" in capsys.readouterr().out
    )


@pytest.mark.rotating
@pytest.mark.parametrize(("method", "reads"), sweep([("kvzap", 1), ("headkv", 3)], ("kvzap", 1)))
def test_contexts_are_read_once_where_questions_do_not_matter_and_as_many_as_there_are(
    method, reads, tmp_path, monkeypatch, capsys
):
    """A file may have fewer contexts than --rows asks for."""
    samples = [ForcedSample("", "get", tuple(range(3, 40)), (4, 8), (5,), ((i, i + 2),)) for i in range(3)]
    suite = SimpleNamespace(rows=lambda index, protocol: [[s] for s in samples] if index == 0 else [])
    monkeypatch.setattr("kvjax.eval.tasks.suite.make_suite", lambda *args, **options: suite)
    out = str(tmp_path / "a.safetensors")
    assert main(["fit", method, "--rows", "9", "--out", out]) == 0
    assert f"fitted on {reads} texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("snapkv",), "snapkv has no word that is fitted"),
        (("kvzap", "--set", "ridge"), "expected key=value"),
        (("ccm:token=2",), "tokens"),
        (("kvzap + int8",), "is more than one method, expected one"),
        (("kvzap", "--set", "ridge=x"), "ridge is 'x', expected a finite number"),
        (("kvzap", "--set", "penalty=1"), "has no option 'penalty', it takes"),
        (("kvzap", "--budget", "0.5"), "does not depend on a budget"),
        (("less",), "as in budget=0.25"),
        (("kvzap", "--text", "a.txt", "--tasks", "get"), "--text and --tasks were both given"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(words, message, tmp_path, capsys):
    assert main(["fit", *words, *SMALL, "--out", str(tmp_path / "a.safetensors")]) != 0
    assert message in capsys.readouterr().err and not (tmp_path / "a.safetensors").exists()


def test_commands_that_run_in_one_process_say_why(capsys):
    fit, convert = ["fit", "kvzap", "--out", "a"], ["convert", "--to", "mqa", "recall-tiny", "a"]
    for words, why in (
        ([*fit, "--hosts", "auto"], "solved in one process, from a few texts: run kvjax fit on one host"),
        ([*convert, "--hosts", "auto"], "a conversion rewrites whole weights, once"),
        ([*convert, "--mesh", "data=2"], "a conversion rewrites whole weights, once"),
    ):
        assert main(words) == 2
        assert why in capsys.readouterr().err


@pytest.mark.rotating
def test_a_fit_on_a_mesh_learns_the_same(tmp_path):
    one = fit(tmp_path, "q-filters")
    spread = fit(tmp_path, "q-filters", "--mesh", "data=2,model=2", "--overwrite")
    for name, x in one.arrays.items():
        np.testing.assert_allclose(spread.arrays[name], x, atol=1e-5)


@pytest.mark.rotating
def test_links_are_fitted_though_no_method_has_them(tmp_path, capsys):
    fitted = fit(tmp_path, "kvlink:documents=3", "--set", "tokens=2")
    assert fitted.word == "Links" and fitted.arrays["links"].shape[:3] == (1, 3, 2)
    assert "use it as kvjax.join(model, caches, links=" in capsys.readouterr().out
    for more, name in ((("--rank", "2"), "rank"), (("--set", "colour=3"), "colour")):
        assert main(["fit", "kvlink", *SMALL, *more, "--out", str(tmp_path / "other")]) == 2
        assert f"kvlink has no option '{name}'" in capsys.readouterr().err
