"""`kvjax simulate`: a table that says what it is of, and one line for what cannot be used."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax.commands.main import main
from kvjax.plan.serving import OF_MEMORY, serving_compression, serving_costs

COSTS = {
    "by": "a test", "base": 1e-3, "weights": 5e-3, "slot": 1e-8, "token": 1e-5, "pair": 0, "move": 1e-6,
    "memory": 4e6, "slot_bytes": 1000,
}  # fmt: skip

# Llama 3.1 8B on an H100.
LLAMA = {
    "base": 1.5e-3, "weights": 5.6e-3, "slot": 4.9e-8, "token": 2.76e-5, "pair": 9.6e-10, "move": 5.1e-6,
    "memory": 6.2e10, "slot_bytes": 131072,
}  # fmt: skip


@pytest.fixture
def costs(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return str(tmp_path / "costs.json")


def test_a_table_names_its_costs_and_says_that_it_is_simulated(costs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    words = ["--synthetic", "azure-conv:requests=60", "--costs", costs, "--slo", "ttft=1,tpot=0.1"]
    assert main(["simulate", "--system", "vllm(page=32)", "--system", "orca", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Simulated, not measured." in out and "costs.json: a test" in out
    assert "60 requests of azure-conv:requests=60" in out and "vllm(page=32)" in out
    assert "Up to 60 requests need more tokens than the pool has" in out  # orca's room of 8,192


def test_figures_as_json_say_the_same_and_less_memory_preempts(costs, capsys, tmp_path):
    words = ["simulate", "--system", "vllm", "--synthetic", "azure-conv:requests=60,rate=50", "--json"]
    found = {}
    for name, more in (("all", []), ("half", ["--compress", "0.5"]), ("little", ["--memory", "0.0025"])):
        assert main([*words, "--costs", costs, *more]) == 0
        (found[name],) = json.loads(capsys.readouterr().out)
    assert all(one["simulated"] and "costs.json" in one["costs"] for one in found.values())
    assert found["little"]["refused"] > 0 and "0.0025 GiB" in found["little"]["costs"]
    assert found["half"]["preemptions"] < found["all"]["preemptions"]
    assert found["half"]["mean_e2el_ms"] < found["all"]["mean_e2el_ms"]


def by_hand(bits, scales):
    """Bytes of a key and a value of 128 numbers, their scales and zeros (bfloat16), and a position."""
    return 2 * 128 * bits / 8 + 2 * scales + 4


@pytest.mark.rotating
def test_methods_have_the_bytes_of_their_codes_and_the_slots_of_their_budgets():
    full = by_hand(16, 0)
    for method, bytes_, slots, again in (
        ("full", full, 1.0, 0),
        ("int8", by_hand(8, 4), 1.0, 0),
        ("int4", by_hand(4, 2 * 2 * 4), 1.0, 0),
        ("snapkv(budget=0.25)", full, 0.25, 0),
        ("keydiff(budget=512)", full, 512, 0),
        ("kvzip(budget=0.5)+int8", by_hand(8, 4), 0.5, 1),
    ):
        found = serving_compression("llama-3.1-8b", method)
        assert found == {"bytes": pytest.approx(bytes_ / full, rel=1e-5), "slots": slots, "again": again}


@pytest.mark.parametrize(
    "method", ["h2o(budget=0.5)", "quest(budget=64)", "offloaded", "d2o(budget=0.5)", "minicache", "palu"]
)
def test_methods_that_are_more_than_bytes_and_one_choice_are_not_simulated(method):
    with pytest.raises(kvjax.InputError, match="does more than a simulation has"):
        serving_compression("llama-3.1-8b", method)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["vllm", "sarathi", "lamps"])
def test_twenty_thousand_requests_take_at_most_thirty_seconds_of_a_core(text, costs):
    """In a process of its own, in which no annotation is checked."""
    Path(costs).write_text(json.dumps(LLAMA))
    words = ["--system", text, "--synthetic", "azure-conv:requests=20000,rate=8,cv=1", "--json"]
    command = [sys.executable, "-m", "kvjax", "simulate", *words, "--costs", costs]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    (found,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert found["completed"] == 20000
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 30


@pytest.mark.rotating
def test_methods_are_rows_beside_systems(costs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = ["simulate", "--system", "vllm", "--synthetic", "azure-conv:requests=60,rate=9", "--costs", costs]
    words += ["--memory", "0.003", "--method", "full", "--method", "snapkv(budget=0.25)", "--method", "int8"]
    assert main([*words, "--json"]) == 0
    full, snapkv, int8 = json.loads(capsys.readouterr().out)
    assert (full["method"], snapkv["method"]) == ("full", "snapkv(budget=0.25)")
    assert full["mean_e2el_ms"] > int8["mean_e2el_ms"] and full["mean_e2el_ms"] > snapkv["mean_e2el_ms"]
    assert main(words) == 0 and "snapkv(budget=0.25)" in capsys.readouterr().out
    assert main([*words, "--compress", "0.5"]) == 2 and "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--system", "vlm"], "did you mean vllm?"),
        (["--system", "FlashAttention"], "flashattention is a way to compute and has no policy"),
        (["--system", "flash_decoding(rows=2)"], "(`kvjax systems flash-decoding`): take one of fastert"),
        (["--system", "vllm", "--slo", "tpt=1"], "expected seconds above 0"),
        (["--system", "vllm", "--slo", "ttft=0"], "expected seconds above 0"),
        (["--system", "vllm", "--compress", "2"], "in (0, 1]"),
        (["--system", "vllm", "--memory", "0"], "expected GiB above 0"),
        (["--system", "vllm", "--memory", "1e-9"], "hold no page"),
    ],
)
def test_what_cannot_be_used_is_answered_in_a_line(words, said, costs, capsys):
    assert main(["simulate", *words, "--synthetic", "tree:requests=5", "--costs", costs]) == 2
    assert said in capsys.readouterr().err


def test_a_rate_of_zero_and_a_trace_beside_a_workload_are_refused(costs, capsys):
    for load, said in (
        (["--synthetic", "azure-conv:rate=0"], "rate='0'"),
        (["--synthetic", "tree", "--trace", "a.csv"], "not allowed with argument"),
        (["--trace", "none.csv"], "cannot be read"),
    ):
        assert main(["simulate", "--system", "vllm", *load, "--costs", costs]) == 2
        assert said in capsys.readouterr().err


def test_a_roofline_has_the_weights_and_the_cache_of_llama(capsys, tmp_path):
    found = serving_costs("llama-3.1-8b", "h100")
    # Its card's number of parameters without the embedding, of which a step reads single rows.
    assert found["weights"] == pytest.approx(2 * (8_030_261_248 - 128256 * 4096) / (OF_MEMORY * 3350e9))
    assert found["slot_bytes"] == 2 * 2 * 32 * 8 * 128
    file, words = (
        tmp_path / "written.json",
        ["simulate", "--system", "vllm", "--synthetic", "tree:requests=4"],
    )
    assert main([*words, "--json", "--write-costs", str(file)]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert main([*words, "--json", "--costs", str(file)]) == 0
    again = json.loads(capsys.readouterr().out)[0]
    assert first | {"costs": ""} == again | {"costs": ""} and "written.json: roofline of" in again["costs"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--device", "h10"], "did you mean h100?"),
        (["--model", "llama-3.1-70b"], "the weights of llama-3.1-70b take 129 GiB"),
        (["--model", "yoco-3b"], "sliding windows"),
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
    ],
)
def test_a_model_or_a_device_that_cannot_be_costed_is_refused(words, said, capsys):
    assert main(["simulate", "--system", "vllm", "--synthetic", "tree:requests=4", *words]) == 2
    assert said in capsys.readouterr().err
