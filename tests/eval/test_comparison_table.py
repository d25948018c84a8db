"""The printed table against what a reader must find there, in any width."""

import io
import re
from typing import Any

import pytest
import scipy.stats
from rich.console import Console

from kvjax.eval.report.cells import Cell, summarise
from kvjax.eval.report.comparison_table import print_table
from kvjax.eval.report.export import cell_records
from tests.eval.rows import FULL_BYTES, QUALITY, TASKS, comparison, scored


def printed(cells: list[Cell], width: int, timings: dict[tuple[str, Any], dict[str, float]]) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_table(cells, timings, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_holds_every_method_budget_and_task_in_any_width(width: int) -> None:
    cells = summarise(comparison())
    text = printed(cells, width, {})
    assert "…" not in text
    first_column = "".join(line[:12].strip() for line in text.splitlines())
    for method in QUALITY:
        assert first_column.count(method) >= 2, method
    for block in text.split("aware:"):
        for budget in ("0.5", "0.25", "0.125"):
            assert len(re.findall(rf" {re.escape(budget)} ", block)) == 4
        heading = "".join(block.split("──")[0].split())
        for task in TASKS:
            assert task in heading or (task == "multikey" and "multi" in heading and "key" in heading)


def test_the_table_prints_measured_bytes_intervals_recovery_and_speed() -> None:
    rows = [
        *scored([1.0] * 10, kept_bytes=FULL_BYTES, full_bytes=FULL_BYTES, read_bytes=FULL_BYTES),
        *scored(
            [1.0] * 8 + [0.0] * 2,
            method="snapkv",
            budget=64,
            kept_bytes=FULL_BYTES // 8,
            full_bytes=FULL_BYTES,
            read_bytes=FULL_BYTES // 8,
        ),
    ]
    timings = {("snapkv", 64): {"prefill_ms": 41.3, "decode_tokens_per_s": 1234.0}}
    wide, slim = printed(summarise(rows), 100, timings), printed(summarise(rows), 60, timings)
    low, high = scipy.stats.binomtest(8, 10).proportion_ci(0.95, method="wilson")
    (line,) = [line for line in wide.splitlines() if line.startswith("snapkv")]
    ends = f"{100 * low:.0f}–{100 * high:.0f}"
    # Two of ten lost and none won is no proof, so there is no star.
    versus = ["-20", "80", "80", "get"]
    assert line.split() == ["snapkv", "64", "128", "12.5", "80", ends, "80", ends, *versus, "41", "1200"]
    (full,) = [line for line in wide.splitlines() if line.startswith("full")]
    assert full.split()[-2:] == ["–", "–"]
    assert "Wilson for 0/1 scores" in wide and "bootstrap" not in wide and "10 samples" in wide
    (line,) = [line for line in slim.splitlines() if line.startswith("snapkv")]
    assert line.split()[:7] == ["snapkv", "64", "128", "12.5", "80", "80", ends]


def test_a_table_that_leaves_columns_out_says_so() -> None:
    cells = summarise(comparison())
    slim, complete = (" ".join(printed(cells, width, {}).split()) for width in (80, 140))
    assert (
        "No room here for: intervals of tasks, bytes read, worst task, speed." in slim and "tok/s" not in slim
    )
    assert "No room" not in complete and "tok/s" in complete


def test_bytes_read_are_a_column_only_where_a_method_reads_less_than_it_keeps() -> None:
    rows = comparison()
    assert "read" in printed(summarise(rows), 140, {}).split("──")[0]
    keep_only = summarise([r for r in rows if r["method"] != "quest"])
    assert "read" not in printed(keep_only, 140, {}).split("──")[0]


def test_bytes_in_host_memory_are_a_column_only_where_a_method_has_any() -> None:
    half = [one | {"host_bytes": 25} for one in scored([1.0] * 4, method="infllm", budget=0.5)]
    cells = summarise([*scored([1.0] * 4), *half])
    assert [cell.host_percent for cell in cells] == [0.0, 25.0]
    (line,) = [line for line in printed(cells, 140, {}).splitlines() if line.startswith("infllm")]
    assert line.split()[:5] == ["infllm", "0.5", "100", "100", "25.0"]
    assert "host" not in printed(cells[:1], 140, {})
    assert [record.get("host_bytes") for record in cell_records(cells, {})] == [None, 25.0]


def test_output_that_is_not_a_terminal_gets_the_table_in_its_natural_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(summarise(comparison()), {})
    out = capsys.readouterr().out
    assert out == printed(summarise(comparison()), 10_000, {}) and "No room" not in out
    assert 140 < max(map(len, out.splitlines())) < 250


def test_intervals_have_ends_and_few_samples_have_none() -> None:
    rows = [*scored([1.0] * 4), *scored([1.0] * 3 + [0.0], method="snapkv", budget=0.5)]
    for width in (60, 100, 200):
        few = " ".join(printed(summarise(rows), width, {}).split())
        assert "n=4" in few and "n too small for an interval" in few and "–100" not in few and "±" not in few
    many = printed(summarise(comparison()), 80, {})
    assert "±" not in many and "n=" not in many and "88–100" in many


def test_differences_to_the_full_cache_are_a_column_with_their_interval_and_p() -> None:
    rows = [*scored([1.0] * 10), *scored([1.0] * 4 + [0.0] * 6, method="snapkv", budget=0.5)]
    full, snapkv = summarise(rows)
    wide, slim = (printed([full, snapkv], width, {}) for width in (200, 80))
    ends = f"{100 * snapkv.versus.low:+.0f}..{100 * snapkv.versus.high:+.0f}"
    assert f"-60 {ends}  {2 / 2**6:.1g}" in re.sub(" +", " ", wide).replace(f"{ends} ", f"{ends}  ")
    assert "-60*" in slim and "p < 0.05 (McNemar's exact test of 0/1 scores)" in " ".join(slim.split())


def test_speeds_have_no_more_digits_than_timings_agree_on() -> None:
    several = {"decode_tokens_per_s_low": 10296.0, "decode_tokens_per_s_high": 13985.0}
    one = {"decode_tokens_per_s": 12345.0}
    cells = summarise(scored([1.0] * 9))
    for timing, expected in (
        (one, "12000"),
        ({**one, **several, "decode_tokens_per_s_timings": 2}, "12000"),
        ({**one, **several, "decode_tokens_per_s_timings": 3}, "12300 10300–14000"),
    ):
        (line,) = [x for x in printed(cells, 200, {("full", None): timing}).splitlines() if "full" in x[:5]]
        assert line.endswith(f" {expected}")


def test_nll_has_a_column_where_answers_were_fed() -> None:
    rows = scored([1.0] * 5, method="kivi")
    text = printed(summarise([{**r, "nll": 0.0421} for r in rows]), 140, {})
    assert "−log p" in text and " 0.042 " in text and "in nats per token" in " ".join(text.split())
    assert "−log p" not in printed(summarise(rows), 140, {})
    record = cell_records(summarise([{**r, "nll": 0.0421} for r in rows]), {})[0]
    assert record["nll"] == record["get_nll"] == pytest.approx(0.0421)
    assert "nll" not in cell_records(summarise(rows), {})[0]
