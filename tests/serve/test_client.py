"""Figures of a client over HTTP, and of systems on the same requests."""

import json

import numpy as np
import pytest

from kvjax.commands.main import main
from kvjax.serve.load.client import Server, put_load, seen
from kvjax.serve.load.metrics import Slo
from kvjax.serve.requests import Request

pytest.importorskip("starlette", reason="the door needs the extra `serve`")

from tests.serve.test_http import clean, door, service  # noqa: E402


@pytest.mark.rotating
def test_a_client_sees_every_token_at_its_time_and_names_what_failed():
    one = service()
    asked = [Request(i, 0.3 * i, 5 + i, 1 + 3 * i) for i in range(4)]
    prompts = [[1 + i] * (5 + i) for i in range(4)]
    with door(one, key="s3cret") as client:
        url = str(client.base_url)
        found = put_load(Server(url, "s3cret"), "small", asked, prompts, 2, Slo(1e3, 1e3))
        assert found["completed"] == 4 and found["failed"] == 0 and found["errors"] == []
        assert one.counts["generated_tokens"] == sum(r.output for r in asked) == 22
        assert found["output_throughput"] * found["duration"] == pytest.approx(22)
        assert found["slo_attained"] == 1 and found["p50_ttft_ms"] > 0 and "iterations" not in found
        wrong = put_load(Server(url), "small", asked[:1], prompts[:1])
        assert wrong["failed"] == 1 and "status 401" in wrong["errors"][0]
        long = put_load(Server(url, "s3cret"), "small", [Request(0, 0.0, 40, 40)], [[1] * 40])
        assert long["completed"] == 0 and "status 400" in long["errors"][0]
    clean(one)


def test_figures_of_known_times_are_those_by_hand():
    asked = [Request(0, 1.0, 5, 3), Request(1, 2.0, 5, 1), Request(2, 0.0, 5, 1)]
    found = seen(asked, [[1.5, 2.0, 3.0], [2.25], []], Slo(0.3, 1.0))
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_itl_ms"]) == (375, 750, 750)
    assert found["duration"] == 2 and found["request_goodput"] == 0.5 and found["failed"] == 1
    assert not any(np.isnan(x) for x in found.values())


def test_the_command_sends_a_load_to_a_server(capsys):
    one = service()
    load = ["--synthetic", "tree:requests=3,groups=1,prefix=8,suffix=4,output=4,seed=1"]
    with door(one) as client:
        url = ["--url", str(client.base_url)]
        assert main(["serve", "load", *url, *load, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["completed"] == 3 and found["model"] == "small"
        assert main(["serve", "load", *url, *load]) == 0
        assert "p99_tpot_ms" in capsys.readouterr().out
    assert main(["serve", "load", *url, *load]) == 2
    assert "names no model" in capsys.readouterr().err
    assert main(["serve", "load", "--url", "nowhere", *load]) == 2
    assert "--url is 'nowhere'" in capsys.readouterr().err


@pytest.mark.rotating
def test_systems_on_the_same_requests_are_one_measured_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    load = ["--synthetic", "tree:requests=6,groups=1,prefix=32,suffix=8,output=4"]
    assert not main(["serve", "compare", "--system", "orca", "--system", "sglang", *load])
    out = " ".join(capsys.readouterr().out.split())
    assert "orca" in out and "sglang" in out and "Times are measured on" in out and "Simulated" not in out
    assert main(["serve", "compare", "--system", "orca", "--synthetic", "azure-conv:requests=3,calls=2"]) == 2
    assert "a model has none" in capsys.readouterr().err
