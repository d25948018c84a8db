"""Results for spreadsheets and papers: CSV with every figure, LaTeX with those that a table has room for."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.eval.report.cells import Cell, budget_label
from kvjax.eval.report.distances import flat
from kvjax.eval.report.figures import Timings, chance, signed
from kvjax.eval.report.text_table import ends_of, lost_ends

_SPECIAL: dict[str, str] = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "–": "--",
    "<": "$<$",
    "−": "$-$",
}


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    r"""Write records as CSV, headings first; the columns of all of them, empty where one has no such figure.

    >>> csv_text([{"method": "full", "mean": 1.0}, {"method": "a, b", "p": None}])
    'method,mean,p\nfull,1.0,\n"a, b",,\n'
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writerow({name: _cell(name) for name in names})
    writer.writerows([{name: _cell(value) for name, value in record.items()} for record in records])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Write a cell that spreadsheets read as text, not as a formula: what begins like one is quoted."""
    if not isinstance(value, str) or not value.lstrip().startswith(("=", "+", "-", "@")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def cell_records(cells: Sequence[Cell], timings: Timings) -> list[dict[str, Any]]:
    """Cells as flat records: shares in [0, 1], bytes, milliseconds; ends are None for too few samples."""
    return [_record(cell, timings.get((cell.method, cell.budget), {})) for cell in cells]


def _record(cell: Cell, timing: Mapping[str, float]) -> dict[str, Any]:
    record: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "protocol": cell.protocol}
    record |= {name: getattr(cell, name) for name in ("kept_bytes", "full_bytes", "read_bytes", "span_kept")}
    record |= {"host_bytes": cell.host_bytes} if cell.host_bytes else {}
    for task, score in cell.tasks.items():
        low, high = (None, None) if score.few else (score.low, score.high)
        values = {"": score.mean, "_low": low, "_high": high, "_samples": score.samples}
        values |= {} if score.nll is None else {"_nll": score.nll}
        record |= {f"{task}{end}": value for end, value in values.items()}
    low, high = (None, None) if cell.few else (cell.mean_low, cell.mean_high)
    record |= {"mean": cell.mean, "mean_low": low, "mean_high": high}
    record |= {} if cell.nll is None else {"nll": cell.nll}
    if (found := cell.versus) is not None:
        record |= {f"vs_full{end}": getattr(found, end[1:] or "mean") for end in ("", "_low", "_high", "_p")}
        record |= {"vs_full_wins": found.wins, "vs_full_losses": found.losses, "vs_full_test": found.test}
    names = ("recovery", "worst_task", "worst_recovery")
    return record | {name: getattr(cell, name) for name in names} | dict(timing)


def latex_cells(cells: Sequence[Cell]) -> str:
    """Write the comparison as a LaTeX table (booktabs), scores in percent."""
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    heads = ["protocol", "method", "budget", "kept (%)", *tasks, "mean", "95% interval", "vs full", "p"]
    lines = []
    for cell in cells:
        ends = "n too small" if cell.few else f"{100 * cell.mean_low:.0f}–{100 * cell.mean_high:.0f}"
        scores = (cell.tasks.get(task) for task in tasks)
        lines.append(
            [
                cell.protocol,
                cell.method,
                budget_label(cell.budget),
                f"{cell.percent:.1f}",
                *("–" if score is None else f"{100 * score.mean:.0f}" for score in scores),
                f"{100 * cell.mean:.0f}",
                ends,
                "–" if cell.versus is None else signed(100 * cell.versus.mean),
                chance(cell.versus.p if cell.versus else None),
            ]
        )
    return _latex(heads, lines, text=2)


def text_records(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a text as records: nats, bytes, shares; ends are None if there is no interval."""
    none = dict.fromkeys(("delta_low", "delta_high"))
    plain = [{name: x for name, x in row.items() if name != "distances"} for row in rows]
    pairs = zip(rows, plain, strict=True)
    return [one | ({} if ends_of(row) else none) | flat(row.get("distances", ())) for row, one in pairs]


def latex_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a comparison on a text as a LaTeX table (booktabs)."""
    heads = ["method", "budget", "kept (%)", "nats per token", "lost", "95% interval", "KL", "same top (%)"]
    lines = [
        [
            row["method"],
            budget_label(row["budget"]),
            f"{100 * row['kept_bytes'] / row['full_bytes']:.1f}",
            f"{row['nll']:.4f}",
            signed(row["delta_nll"], 4),
            lost_ends(row).replace("..", " to "),
            f"{row['kl']:z.1e}",
            f"{100 * row['top1']:.1f}",
        ]
        for row in rows
    ]
    return _latex(heads, lines, text=1)


def _latex(heads: Sequence[str], lines: Sequence[Sequence[str]], *, text: int) -> str:
    """Write a tabular whose first `text` columns are text."""

    def line(words: Sequence[str]) -> str:
        return (
            " & ".join("".join(_SPECIAL[c] if c in _SPECIAL else c for c in word) for word in words) + r" \\"
        )

    minus = lambda words: [*words[:text], *(word.replace("-", "−") for word in words[text:])]  # noqa: E731
    body = [line(heads), r"\midrule", *(line(minus(words)) for words in lines)]
    columns = "l" * text + "r" * (len(heads) - text)
    inside = "\n".join([r"\toprule", *body, r"\bottomrule"])
    return f"\\begin{{tabular}}{{{columns}}}\n{inside}\n\\end{{tabular}}\n"
