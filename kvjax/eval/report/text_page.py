"""The report page of a comparison on a text: the run's facts, the frontier, a sortable table, the matrix."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.about_section import facts, model_in_words
from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.distance_picture import distance_section
from kvjax.eval.report.duels import Duels
from kvjax.eval.report.export import text_records
from kvjax.eval.report.figures import chance, larger_rows, signed
from kvjax.eval.report.method_cards import cards_section, families_of, filter_bar
from kvjax.eval.report.page import listed, matrix, shell
from kvjax.eval.report.page_table import csv_button, dotted, entry, header, note
from kvjax.eval.report.paired import FEW
from kvjax.eval.report.plots_section import looks_of, plots
from kvjax.eval.report.svg_plot import MethodStyle
from kvjax.eval.report.text_table import LOST, ends_of, text_panels


def text_caption(metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the caption of the picture: model, windows, tokens, and the command that reproduces it."""
    length = metrics.get("settings", {}).get("length")
    words = [str(metrics.get("model", "")), f"windows of {length} tokens" if length else ""]
    words.append(f"n = {rows[0]['windows']} windows, {rows[0]['tokens']} tokens after them" if rows else "")
    first = ", ".join(word for word in words if word)
    return "\n".join(line for line in (first, str(metrics.get("command", ""))) if line)


def write_text_report(
    path: str | os.PathLike[str],
    metrics: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    duels: Sequence[Duels] = (),
) -> None:
    """Write the report of a comparison on a text as one self-contained HTML file, in one step.

    metrics: as in `write_report`; rows: from `summarise_text`; duels: from `text_duels`.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text_report(pathlib.Path(folder) / "report.html", {"model": "recall-tiny"}, [])
    ...     (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    write_atomic(path, text_html(metrics, rows, duels).encode("utf-8", errors="backslashreplace"))


def text_html(
    metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], duels: Sequence[Duels] = ()
) -> str:
    """Write the page as text; arguments as in `write_text_report`."""
    asked = {"windows": rows[0]["windows"], "tokens predicted": rows[0]["tokens"]} if rows else {}
    panels = text_panels(rows)
    looks = looks_of(panels, LOST)
    run = facts({**metrics, **asked})
    sections = [
        f'<section id="about"><h2>What was measured</h2><p>{model_in_words(metrics)}</p>'
        f"{_asked(metrics, rows)}{run}</section>",
        filter_bar(looks),
        plots(panels, LOST, "what is lost") if rows else "",
        distance_section(rows),
        _table(rows, looks),
        matrix(duels, "nats per token", 1.0, "less"),
        cards_section(looks) if looks else "",
    ]
    return shell(metrics, sections, matrices=listed(duels))


def _asked(metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the text, the settings and the measured values, as HTML."""
    if not rows:
        return ""
    methods, length = (
        len({row["method"] for row in rows} - {"full"}),
        metrics.get("settings", {}).get("length"),
    )
    size = f" of {length} tokens" if length else ""
    return (
        f"<p>It read {rows[0]['windows']} windows{size} of a text; {methods} methods compressed its KV "
        "cache, and then the probability of every token that follows was measured.</p>"
    )


_HEADS = (
    ("method", "", "ascending", "text"),
    ("budget", "", "descending", ""),
    ("kept", "KiB", "ascending", ""),
    ("kept", "% of full", "ascending", ""),
    ("read", "% per step", "ascending", ""),
    ("nats", "per token", "ascending", ""),
    ("lost", "nats", "ascending", ""),
    ("p", "", "ascending", ""),
    ("KL", "full || method", "ascending", ""),
    ("same top", "%", "descending", ""),
)


def _table(rows: Sequence[Mapping[str, Any]], looks: Mapping[str, MethodStyle]) -> str:
    heads, body = "".join(header(*head) for head in _HEADS), "".join(_row(row, looks) for row in rows)
    return f"""<section><h2>All measurements</h2>
<p class="muted">lost: -log p of the text, more than with the full cache. Small figures: 95% interval over
windows; p: paired bootstrap over windows. Click a heading to sort.</p>
{note(larger_rows(rows))}
{csv_button(text_records(rows))}
<input type="radio" name="protocol" value="" checked hidden>
<div class="scroll"><table id="cells"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>
</section>"""


def _row(row: Mapping[str, Any], looks: Mapping[str, MethodStyle]) -> str:
    kept, read = (row[f"{name}_bytes"] / row["full_bytes"] for name in ("kept", "read"))
    found, none = ends_of(row), "n too small" if row["windows"] < FEW else "alike in all windows"
    ends = none if found is None else f"{signed(found[0], 4)} to {signed(found[1], 4)}"
    entries = (
        entry(row["method"], dotted(row["method"], looks), "text"),
        entry(row["budget"], budget_label(row["budget"])),
        entry(row["kept_bytes"], f"{row['kept_bytes'] / 1024:,.1f}"),
        entry(kept, f"{100 * kept:.1f}", "size", share=kept),
        entry(read, f"{100 * read:.1f}", "size", share=read),
        entry(row["nll"], f"{row['nll']:.4f}"),
        entry(row["delta_nll"], f"{signed(row['delta_nll'], 4)} <small>{ends}</small>"),
        entry(row["p"], escape(chance(row["p"]))),
        entry(row["kl"], f"{row['kl']:z.1e}"),
        entry(row["top1"], f"{100 * row['top1']:.1f}"),
    )
    style = "reference" if row["method"] == "full" else ""
    name, families = escape(row["method"]), escape(" ".join(families_of(row["method"])))
    opening = f'<tr data-protocol="text" data-group="{name}" data-families="{families}" class="{style}">'
    return f"{opening}{''.join(entries)}</tr>"
