"""`kvjax lm-eval` without lm-evaluation-harness: what is refused first. All else is in tests/parity."""

import sys

import pytest

from kvjax.commands.main import main

REFUSED = {
    "no harness": (["--tasks", "a"], "lm-evaluation-harness is not installed"),
    "the harness' model": (["--model_args", "pretrained=x"], "--model_args was given, expected --model"),
    "a device": (["--device=cpu"], "--device=cpu was given, expected --model"),
    "a method without a budget": (["--method", "snapkv"], "budget"),
    "an unknown method": (["--method", "snapkw(budget=0.5)"], "snapkw"),
    "nothing to drop": (["--drop-marker"], "--drop-marker was given without a marker"),
    "rules without a mesh": (["--rules", "tensor"], "--rules tensor was given without --mesh"),
    "a chunk of nothing": (["--chunk", "0"], "expected a whole number >= 1"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_begin_says_why(words, message, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm-eval", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    if "not installed" in message:
        assert line.endswith("pip install 'kvjax[lm-eval]'")
