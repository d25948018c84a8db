"""The report page: one HTML file with settings, best methods, plots, a table, and marked prompts.

Everything is inlined, and the page's content security policy forbids the network. Example prompts are
embedded as JSON and become text nodes, so that no token is ever parsed as markup; everything else is escaped
here.
"""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.about_section import about_section
from kvjax.eval.report.best_section import best_section
from kvjax.eval.report.cells import Cell, Row
from kvjax.eval.report.duels import Duels
from kvjax.eval.report.figures import Timings, sample_count
from kvjax.eval.report.frontier import SCORES, panels_of
from kvjax.eval.report.method_cards import cards_section, filter_bar
from kvjax.eval.report.needles import needles_section
from kvjax.eval.report.page_assets import SCRIPT, STYLE
from kvjax.eval.report.page_prompts import EXAMPLES, Example, prompts_of
from kvjax.eval.report.page_table import protocol_filter, table_section
from kvjax.eval.report.plots_section import looks_of, plots, task_plots
from kvjax.eval.report.scores_section import Picture, scores_section

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(
    path: str | os.PathLike[str],
    metrics: Mapping[str, Any],
    cells: Sequence[Cell],
    examples: Sequence[Example],
    *,
    timings: Timings | None = None,
    duels: Sequence[Duels] = (),
    pictures: Sequence[Picture] = (),
    rows: Sequence[Row] = (),
) -> None:
    """Write the report of a comparison as one self-contained HTML file.

    Args:
      path: the file to write; it is replaced in one step.
      metrics: model, parameters, device, dtype, git_revision, seeds, presets (dict), compiled_programs,
        wall_seconds, versions, command, settings (of which length and gold), examples (of
        `kvjax.eval.run.examples.task_examples`); what is missing is not shown.
      cells: from `summarise`.
      examples: dicts of method, budget, protocol, task, answer, prediction, score, tokens (strings) and, per
        token, kept (the share in [0, 1] of (layer, head) pairs that kept it) and needed (for the answer).
        Examples with the same protocol, task and tokens are shown as one prompt.
      timings: (method, budget) to prefill_ms and decode_tokens_per_s; without them no speed columns.
      duels: from `duels_of`; one matrix is shown at a time.
      pictures: of what methods score, without which there is no such section.
      rows: as `summarise` takes them; without them neither the best of each budget nor the needle map.

    >>> import pathlib, tempfile
    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(pathlib.Path(folder) / "report.html", {"model": "recall-tiny"}, [cell], [])
    ...     (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    page = report_html(metrics, cells, examples, timings=timings, duels=duels, pictures=pictures, rows=rows)
    # Tokens may hold half a surrogate pair; inside the JSON the replacement is the escape that JSON uses.
    write_atomic(path, page.encode("utf-8", errors="backslashreplace"))


def report_html(
    metrics: Mapping[str, Any],
    cells: Sequence[Cell],
    examples: Sequence[Example],
    *,
    timings: Timings | None = None,
    duels: Sequence[Duels] = (),
    pictures: Sequence[Picture] = (),
    rows: Sequence[Row] = (),
) -> str:
    """Write the report page as text; arguments as in `write_report`.

    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> "<h1>a &lt; b</h1>" in report_html({"model": "a < b"}, [cell], [])
    True
    """
    panels = panels_of(cells)
    looks = looks_of(panels, SCORES)
    sections = [
        about_section(metrics, cells),
        filter_bar(looks, protocol_filter(cells)) if cells else "",
        best_section(cells, rows),
        plots(panels, SCORES, "the mean") if cells else "",
        task_plots(cells, looks),
        table_section(cells, timings, looks),
        needles_section(rows),
        matrix(duels, "points", 100.0),
        EXAMPLES if examples else "",
        scores_section(pictures),
        cards_section(looks) if looks else "",
    ]
    return shell(metrics, sections, prompts=prompts_of(examples), matrices=listed(duels))


def shell(
    metrics: Mapping[str, Any],
    sections: Sequence[str],
    *,
    prompts: Sequence[Mapping[str, Any]] = (),
    matrices: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Put some sections into the page around them, with what the script shows in them."""
    model = escape(str(metrics.get("model", "unnamed model")))
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvjax compare: {model}</title>
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body><main>
<h1>{model}</h1>
<p class="muted">What each method keeps of the past, and what that costs: <code>kvjax compare</code></p>
{body}
</main>
<script type="application/json" id="examples">{_json(prompts)}</script>
<script type="application/json" id="duels">{_json(matrices)}</script>
<script>{SCRIPT}</script></body></html>
"""


def _json(values: Sequence[Mapping[str, Any]]) -> str:
    """Values inside a script element, which "<" in a token would let it close."""
    text = json.dumps(list(values), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c")


def caption_of(metrics: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """Write the caption of a picture: model, length, samples, tasks, and the command that reproduces it."""
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    length = metrics.get("settings", {}).get("length")
    words = [str(metrics.get("model", "")), f"{length} tokens" if length else ""]
    if tasks:
        words.append(f"n = {sample_count(cells)} samples per task ({', '.join(tasks)})")
    first = ", ".join(word for word in words if word)
    return "\n".join(line for line in (first, str(metrics.get("command", ""))) if line)


def matrix(duels: Sequence[Duels], unit: str, scale: float, better: str = "more") -> str:
    """Make the section of methods against methods; the script fills it by `listed`. better: more or less."""
    if not any(one.found for one in duels):
        return ""
    return f"""<section><h2>Method against method</h2>
<p class="muted">What the method of a row has more than that of a column on the same samples, in {unit}.
Bold where p &lt; 0.05, without correction for how many pairs there are; point at a figure for its interval
and p.</p>
<div class="controls"><label><span class="label">budget</span>
<select id="duel" data-scale="{scale:g}" data-unit="{escape(unit)}" data-better="{better}"></select>
</label></div>
<div class="scroll"><table id="matrix"></table></div></section>"""


def listed(duels: Sequence[Duels]) -> list[dict[str, Any]]:
    """Return the matrices as the page's script reads them: [i, j, mean, low, high, p, samples] per pair."""
    digits = lambda x: None if x is None else float(f"{x:.4g}")  # noqa: E731
    return [
        {
            "title": one.title,
            "names": list(one.names),
            "found": [
                [i, j, digits(d.mean), digits(d.low), digits(d.high), digits(d.p), d.samples]
                for (i, j), d in one.found.items()
            ],
        }
        for one in duels
        if one.found
    ]
