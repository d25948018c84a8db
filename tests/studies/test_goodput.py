"""The study of goodput: every cell is there, the page shows them, and its sentences are what they say."""

import numpy as np
import pytest

from kvjax.serve.requests import Request
from kvjax.serve.sim import Costs
from scripts.studies import goodput as script
from scripts.studies import goodput_picture


def rates():
    return {script.cell_of(one): one["rate"] for one in script.DATA.read()["rates"]}


def test_the_page_shows_every_cell_of_the_data():
    assert [script.cell_of(one) for one in script.DATA.read()["rates"]] == script.cells()
    assert script.PAGE.agrees() and "roofline" in script.DATA.read()["costs"]["by"]


def test_what_the_page_says_is_in_the_data():
    found = rates()

    def worth(trace, system, method):
        return found[trace, system, method] / found[trace, system, "full"] - 1

    assert worth("azure-conv", "vllm", "int4") == pytest.approx(0.25, abs=0.005)
    assert worth("azure-conv", "orca(rows=256)", "int4") == pytest.approx(0.65, abs=0.005)
    most = {trace: max(worth(trace, system, "int4") for system in script.SYSTEMS) for trace in script.TRACES}
    assert [round(most[trace], 2) for trace in script.TRACES] == [0.65, 0.04, 0.21]
    assert all(worth(f"azure-{one}", "sarathi(tokens=512)", "int4") == 0 for one in ("conv", "code"))
    evicting = ("kvzip(budget=0.25)", "snapkv(budget=0.25)")
    for system in script.SYSTEMS:
        for method in ("int8", "int4", "kivi", evicting[1]):
            assert worth("azure-code", system, method) <= 0.04 + 1e-9
            assert all(worth(trace, system, method) >= 0 for trace in script.TRACES)
        assert all(worth(trace, system, evicting[0]) < 0 for trace in script.TRACES)
        for trace in script.TRACES:
            # Within the 3% to which rates are known.
            assert found[trace, system, evicting[1]] <= 1.03 * found[trace, system, "int4"]
            assert found[trace, system, "kivi"] <= 1.04 * found[trace, system, "int4"]
    assert found["azure-conv", "sarathi(tokens=512)", "full"] == pytest.approx(
        found["azure-conv", "vllm", "int4"], rel=0.03
    )
    lost = {row.method: row.nats[0] for row in script.rows()}
    assert lost["int8"] < 0.005 and lost["int4"] == pytest.approx(0.05, abs=0.005)
    assert lost["kivi"] == pytest.approx(0.9, abs=0.05) and lost[evicting[1]] == pytest.approx(2.2, abs=0.05)
    assert lost[evicting[0]] < 0


def test_a_rate_scales_gaps_and_rounded_times_are_spread():
    load = [Request(i, at, 10, 5) for i, at in enumerate((0.0, 0.0, 0.0, 3.0, 9.0, 9.0))]
    assert [one.arrived for one in script.spread(load)] == [0.0, 1.0, 2.0, 3.0, 9.0, 12.0]
    alone = [Request(i, float(i), 10, 5) for i in range(4)]
    assert script.spread(alone) == alone
    twice = script.at_rate(alone, 2.0)
    assert [one.arrived for one in twice] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("true", [0.06, 1.0, 3.9, 4.1, 77.0])
def test_the_largest_rate_is_found_from_any_guess(true):
    for guess, by in ((4.0, 2.0), (true, 1.25), (true / 3, 1.25)):
        found = script.largest_rate(lambda rate: rate <= true, guess, by)
        assert true / (1 + script.CLOSE) <= found <= true
    assert script.largest_rate(lambda rate: False) == 0


def test_an_objective_is_five_times_a_long_prompt_alone():
    costs = Costs("by hand", 1.0, 0.0, 0.0, 0.01, 0.0, 0.0, 1.0, 1.0)
    load = [Request(i, 0.0, prompt, 1) for i, prompt in enumerate(np.arange(100, 1200, 100).tolist())]
    assert script.objective(load, costs) == (5 * (1 + 0.01 * 1000), script.TPOT)


def test_the_picture_has_every_method_and_is_the_same_each_time():
    drawn = goodput_picture.picture(script.rows(), [*script.TRACES], script.SYSTEMS)
    assert drawn[1:4] == b"PNG" and len(goodput_picture.STYLES) == len(script.SYSTEMS)
    assert drawn == goodput_picture.picture(script.rows(), [*script.TRACES], script.SYSTEMS)
