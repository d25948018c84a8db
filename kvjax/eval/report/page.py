"""The report page: one HTML file with the run's facts, the frontier, a sortable table and marked prompts.

Everything is inlined, and the page's content security policy forbids the network. Example prompts travel as
JSON and become text nodes, so that no token is ever read as markup; everything else is escaped here.
"""

import base64
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvjax.eval.report.cells import Cell, MeanScore, budget_label
from kvjax.eval.report.comparison_table import PROTOCOLS, Timings, byte_unit, interval_names
from kvjax.eval.report.frontier import frontier_png
from kvjax.eval.report.page_assets import SCRIPT, STYLE
from kvjax.files import write_atomic

Example = Mapping[str, Any]

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(
    path: str | os.PathLike[str],
    metrics: Mapping[str, Any],
    cells: Sequence[Cell],
    examples: Sequence[Example],
    *,
    timings: Timings | None = None,
) -> None:
    """Writes the report of a comparison as one self-contained HTML file.

    Args:
      path: the file to write; it is replaced in one step.
      metrics: model, device, dtype, git_revision, seeds, presets (dict), compiled_programs, wall_seconds,
        versions; what is missing is not shown.
      cells: from `summarise`.
      examples: dicts of method, budget, protocol, task, answer, prediction, score, tokens (strings) and, per
        token, kept (the share in [0, 1] of (layer, head) pairs that kept it) and needed (for the answer).
        Examples with the same protocol, task and tokens are shown as one prompt.
      timings: (method, budget) to prefill_ms and decode_tokens_per_s; without them no speed columns.

    >>> import pathlib, tempfile
    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(pathlib.Path(folder) / "report.html", {"model": "recall-tiny"}, [cell], [])
    ...     (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    page = report_html(metrics, cells, examples, timings=timings)
    # Tokens may hold half a surrogate pair; inside the JSON the replacement is the escape that JSON uses.
    write_atomic(path, page.encode("utf-8", errors="backslashreplace"))


def report_html(
    metrics: Mapping[str, Any],
    cells: Sequence[Cell],
    examples: Sequence[Example],
    *,
    timings: Timings | None = None,
) -> str:
    """The report page as text; arguments as in `write_report`.

    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> "<h1>a &lt; b</h1>" in report_html({"model": "a < b"}, [cell], [])
    True
    """
    prompts = json.dumps(_prompts(examples), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    model = escape(str(metrics.get("model", "unnamed model")))
    # "<" would let a token close the script element that holds the prompts.
    prompts = prompts.replace("<", r"\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvjax compare: {model}</title>
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body><main>
<h1>{model}</h1>
<p class="muted">What each method keeps of the past, and what that costs: <code>kvjax compare</code></p>
{_facts(metrics)}
{_plots(cells) if cells else ""}
{_table(cells, timings)}
{_EXAMPLES if examples else ""}
</main>
<script type="application/json" id="examples">{prompts}</script>
<script>{SCRIPT}</script></body></html>
"""


_EXAMPLES = """<section><h2>What each method kept</h2>
<p class="muted"><span class="legend">Kept by 0% <span class="ramp"></span> 100% of the (layer, head)
pairs; the answer needs the <span class="needed">underlined</span> tokens.</span></p>
<div class="controls"><label><span class="label">prompt</span><select id="prompt"></select></label>
<label><span class="label">method</span><select id="run"></select></label></div>
<p id="verdict"></p><div id="text"></div>
<h3>The whole prompt at a glance</h3><p class="muted">Click a method to read its text above.</p>
<div id="strips"></div></section>"""


def _facts(metrics: Mapping[str, Any]) -> str:
    facts = {
        "device": metrics.get("device"),
        "dtype": metrics.get("dtype"),
        "git revision": metrics.get("git_revision"),
        "seeds": metrics.get("seeds"),
        "compiled programs": metrics.get("compiled_programs"),
        "wall time": f"{metrics['wall_seconds']:.0f} s" if "wall_seconds" in metrics else None,
    }
    shown = {name: value for name, value in facts.items() if value is not None}
    details = "".join(_details(title, metrics.get(title)) for title in ("presets", "versions"))
    return f'<section><dl class="facts">{_pairs(shown)}</dl>{details}</section>'


def _details(title: str, content: Any) -> str:
    if not content:
        return ""
    pairs = _flatten(content) if isinstance(content, Mapping) else {title: content}
    return f'<details><summary>{title.title()}</summary><dl class="pairs">{_pairs(pairs)}</dl></details>'


def _pairs(pairs: Mapping[str, Any]) -> str:
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_plain(value))}</dd></div>" for name, value in pairs.items()
    )


def _flatten(pairs: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in pairs.items():
        nested = isinstance(value, Mapping) and value
        flat.update(_flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value})
    return flat


def _plain(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _plots(cells: Sequence[Cell]) -> str:
    light, dark = (base64.b64encode(frontier_png(cells, dark=dark)).decode("ascii") for dark in (False, True))
    return f"""<section><h2>Quality against measured bytes</h2>
<p class="muted">Up and to the left is better. Bars: 95% interval of the mean. A hollow point shows the bytes
one decode step reads, where that is less than a method keeps.</p>
<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">
<img src="data:image/png;base64,{light}" alt="Mean score against kept bytes; the table holds the numbers">
</picture></section>"""


def _table(cells: Sequence[Cell], timings: Timings | None) -> str:
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    unit = byte_unit(cells)
    rows = "".join(_row(cell, tasks, timings, unit) for cell in cells)
    return f"""<section><h2>All measurements</h2>
<p class="muted">Small figures: 95% interval ({interval_names(cells)}). Recovery: score / full-cache score.
Click a heading to sort.</p>
<div class="controls"><fieldset aria-label="protocol">{_filter(cells)}</fieldset></div>
<div class="scroll"><table id="cells"><thead><tr>{_head(tasks, timings, unit[0])}</tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def _filter(cells: Sequence[Cell]) -> str:
    """One button per protocol, and one for all (the empty value); the first is on."""
    choices = []
    for protocol in [*dict.fromkeys(cell.protocol for cell in cells), ""]:
        checked = "" if choices else " checked"
        choices.append(
            f'<label title="{escape(PROTOCOLS.get(protocol, ""))}">'
            f'<input type="radio" name="protocol" value="{escape(protocol)}"{checked}>'
            f"<span>{escape(protocol or 'all protocols')}</span></label>"
        )
    return "".join(choices)


def _head(tasks: Sequence[str], timings: Timings | None, byte_name: str) -> str:
    columns = [
        _header("method", "", "ascending", "text"),
        _header("protocol", "", "ascending", "text protocol"),
        _header("budget", ""),
        _header("kept", byte_name, "ascending"),
        _header("kept", "% of full", "ascending"),
        _header("read", "% per step", "ascending"),
        *(_header(task, "score %") for task in tasks),
        _header("mean", "score %"),
        _header("recovery", "% of full"),
        _header("worst task", "recovery %"),
        _header("span kept", "%"),
    ]
    if timings is not None:
        columns += [_header("prefill", "ms", "ascending"), _header("decode", "tokens/s")]
    return "".join(columns)


def _header(name: str, unit: str, start: str = "descending", style: str = "") -> str:
    """A heading that sorts; `start` is the direction of the first click, the better values on top."""
    label = f"{escape(name)}<small>{unit or '&nbsp;'}</small>"
    return f'<th scope="col" data-start="{start}" class="{style}"><button type="button">{label}</button></th>'


def _row(cell: Cell, tasks: Sequence[str], timings: Timings | None, unit: tuple[str, float]) -> str:
    entries = [
        _entry(cell.method, escape(cell.method), "text"),
        _entry(cell.protocol, escape(cell.protocol), "text protocol"),
        _entry(cell.budget, budget_label(cell.budget)),
        _entry(cell.kept_bytes, f"{cell.kept_bytes / unit[1]:,.1f}"),
        _entry(cell.percent, f"{cell.percent:.1f}", "size", share=cell.percent / 100),
        _entry(cell.read_percent, f"{cell.read_percent:.1f}", "size", share=cell.read_percent / 100),
        *(_score(cell.tasks.get(task)) for task in tasks),
        _interval(cell.mean, cell.mean_low, cell.mean_high),
        _recovery(cell.recovery),
        _recovery(cell.worst_recovery, f"{escape(cell.worst_task or '')} "),
        _entry(cell.span_kept, "–" if cell.span_kept is None else f"{100 * cell.span_kept:.0f}"),
    ]
    if timings is not None:
        timing = timings.get((cell.method, cell.budget), {})
        for key in ("prefill_ms", "decode_tokens_per_s"):
            entries.append(_entry(timing.get(key), f"{timing[key]:,.0f}" if key in timing else "–"))
    group = escape(f"{cell.protocol}/{cell.method}")
    style = "reference" if cell.reference else ""
    opening = f'<tr data-protocol="{escape(cell.protocol)}" data-group="{group}" class="{style}">'
    return f"{opening}{''.join(entries)}</tr>"


def _entry(key: str | float | None, content: str, style: str = "", *, share: float | None = None) -> str:
    """A table cell that sorts by `key` (None last), with a bar of `share` of its width under the content."""
    sort = "" if key is None else escape(str(key))
    bar = "" if share is None else f' style="--share:{min(1.0, share):.3f}"'
    return f'<td class="{style}" data-sort="{sort}"{bar}>{content}</td>'


def _score(score: MeanScore | None) -> str:
    return _entry(None, "–") if score is None else _interval(score.mean, score.low, score.high)


def _interval(mean: float, low: float, high: float) -> str:
    content = f"{100 * mean:.0f} <small>{100 * low:.0f}–{100 * high:.0f}</small>"
    return _entry(mean, content, "score", share=mean)


def _recovery(share: float | None, prefix: str = "") -> str:
    if share is None:
        return _entry(None, "–")
    style = "good" if share >= 0.95 else "fair" if share >= 0.8 else "poor"
    return _entry(share, f'{prefix}<b class="{style}">{100 * share:.0f}</b>')


def _prompts(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Examples of the same prompt side by side, as the page's script reads them."""
    prompts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for example in examples:
        key = (example["protocol"], example["task"], *example["tokens"])
        prompt = prompts.setdefault(key, _prompt(example))
        prompt["runs"].append(_run(example))
    titles = Counter(prompt["title"] for prompt in prompts.values())
    numbers: Counter[str] = Counter()
    for prompt in prompts.values():
        title = prompt["title"]
        if titles[title] > 1:
            numbers[title] += 1
            prompt["title"] = f"{title} · {numbers[title]}"
    return list(prompts.values())


def _prompt(example: Example) -> dict[str, Any]:
    tokens = list(example["tokens"])
    if not len(tokens) == len(example["kept"]) == len(example["needed"]):
        raise ValueError(
            f"an example needs one kept share and one needed flag per token, got {len(tokens)} tokens, "
            f"{len(example['kept'])} kept, {len(example['needed'])} needed "
            f"({example['method']}, {example['task']}, {example['protocol']})"
        )
    return {
        "title": f"{example['protocol']} · {example['task']}",
        "tokens": tokens,
        "needed": [int(flag) for flag in example["needed"]],
        # Words need a gap between them; pieces of a tokenizer bring their own white space.
        "joiner": "" if any(token[:1].isspace() for token in tokens) else " ",
        "answer": example["answer"],
        "runs": [],
    }


def _run(example: Example) -> dict[str, Any]:
    budget = "" if example["budget"] is None else f" · {budget_label(example['budget'])}"
    return {
        "name": f"{example['method']}{budget}",
        # Whole percents: a shade shows no more, and the page stays small.
        "kept": [round(100 * float(share)) for share in example["kept"]],
        "prediction": example["prediction"],
        "score": float(example["score"]),
    }
