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

from kvjax.base.atomic_files import write_atomic
from kvjax.eval.report.cells import Cell, MeanScore, budget_label
from kvjax.eval.report.comparison_table import PROTOCOLS, byte_unit
from kvjax.eval.report.duels import Duels
from kvjax.eval.report.figures import (
    Timings,
    chance,
    interval_names,
    larger_cells,
    sample_count,
    signed,
    speed,
    tests_in_words,
)
from kvjax.eval.report.frontier import SCORES, Axis, Panel, frontier_png, panels_of
from kvjax.eval.report.page_assets import SCRIPT, STYLE
from kvjax.eval.report.paired import Difference
from kvjax.eval.report.scores_section import Picture, scores_section

Example = Mapping[str, Any]

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
) -> None:
    """Writes the report of a comparison as one self-contained HTML file.

    Args:
      path: the file to write; it is replaced in one step.
      metrics: model, device, dtype, git_revision, seeds, presets (dict), compiled_programs, wall_seconds,
        versions, command, settings (of which the length); what is missing is not shown.
      cells: from `summarise`.
      examples: dicts of method, budget, protocol, task, answer, prediction, score, tokens (strings) and, per
        token, kept (the share in [0, 1] of (layer, head) pairs that kept it) and needed (for the answer).
        Examples with the same protocol, task and tokens are shown as one prompt.
      timings: (method, budget) to prefill_ms and decode_tokens_per_s; without them no speed columns.
      duels: from `duels_of`; one matrix is shown at a time.
      pictures: of what methods score, without which there is no such section.

    >>> import pathlib, tempfile
    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(pathlib.Path(folder) / "report.html", {"model": "recall-tiny"}, [cell], [])
    ...     (pathlib.Path(folder) / "report.html").read_text(encoding="utf-8")[:15]
    '<!doctype html>'
    """
    page = report_html(metrics, cells, examples, timings=timings, duels=duels, pictures=pictures)
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
) -> str:
    """The report page as text; arguments as in `write_report`.

    >>> cell = Cell("snapkv", 0.5, "aware", {}, 0.5, 0.4, 0.6, 32.0, 64.0, 32.0, None)
    >>> "<h1>a &lt; b</h1>" in report_html({"model": "a < b"}, [cell], [])
    True
    """
    caption, asked = caption_of(metrics, cells), {"samples per task": sample_count(cells)} if cells else {}
    sections = [
        plots(panels_of(cells), SCORES, caption, "the mean") if cells else "",
        _table(cells, timings),
        matrix(duels, "points", 100.0),
        _EXAMPLES if examples else "",
        scores_section(pictures),
    ]
    return shell({**metrics, **asked}, sections, prompts=_prompts(examples), matrices=listed(duels))


def shell(
    metrics: Mapping[str, Any],
    sections: Sequence[str],
    *,
    prompts: Sequence[Mapping[str, Any]] = (),
    matrices: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page around some sections, with the run's facts above and what the script shows in them."""
    model = escape(str(metrics.get("model", "unnamed model")))
    body = "\n".join(sections)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvjax compare: {model}</title>
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body><main>
<h1>{model}</h1>
<p class="muted">What each method keeps of the past, and what that costs: <code>kvjax compare</code></p>
{_facts(metrics)}
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
    """What a picture says of its run: model, length, samples, tasks, and the command that makes it again."""
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    length = metrics.get("settings", {}).get("length")
    words = [str(metrics.get("model", "")), f"{length} tokens" if length else ""]
    if tasks:
        words.append(f"n = {sample_count(cells)} samples per task ({', '.join(tasks)})")
    first = ", ".join(word for word in words if word)
    return "\n".join(line for line in (first, str(metrics.get("command", ""))) if line)


_EXAMPLES = """<section><h2>What each method kept</h2>
<p class="muted">Kept by 0% <span class="ramp"></span> 100% of the (layer, head) pairs;
the answer needs the <span class="needed">underlined</span> tokens.</p>
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
        "samples per task": metrics.get("samples per task"),
        "compiled programs": metrics.get("compiled_programs"),
        "wall time": f"{metrics['wall_seconds']:.0f} s" if "wall_seconds" in metrics else None,
    }
    shown = {name: value for name, value in facts.items() if value is not None}
    shown |= {name: metrics[name] for name in ("windows", "tokens predicted") if name in metrics}
    if "command" in metrics:
        shown["command"] = metrics["command"]
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


def plots(panels: Sequence[Panel], axis: Axis, caption: str, of: str) -> str:
    """The section of the frontier; `of`: what its bars are intervals of."""
    pictures = (frontier_png(panels, axis, caption, dark=dark) for dark in (False, True))
    light, dark = (base64.b64encode(picture).decode("ascii") for picture in pictures)
    better = "Up" if axis is SCORES else "Down"
    return f"""<section><h2>Quality against measured bytes</h2>
<p class="muted">{better} and to the left is better. Bars: 95% interval of {of}. A hollow point shows the
bytes one decode step reads, where that is less than a method keeps.</p>
<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">
<img src="data:image/png;base64,{light}" alt="Quality against kept bytes; the table holds the numbers">
</picture></section>"""


def matrix(duels: Sequence[Duels], unit: str, scale: float, better: str = "more") -> str:
    """The section of methods against methods; the script fills it from `listed`. better: more, or less."""
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
    """The matrices as the page's script reads them: [i, j, mean, low, high, p, samples] per pair."""
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


def _table(cells: Sequence[Cell], timings: Timings | None) -> str:
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    unit, far = byte_unit(cells), any(cell.host_bytes for cell in cells)
    rows = "".join(_row(cell, tasks, timings, unit, far) for cell in cells)
    return f"""<section><h2>All measurements</h2>
<p class="muted">{sample_count(cells)} samples per task. Small figures: 95% interval
({interval_names(cells)}). {_versus_words(cells)}Recovery: score / full-cache score.
Click a heading to sort.</p>
{note(larger_cells(cells))}
<div class="controls"><fieldset aria-label="protocol">{_filter(cells)}</fieldset></div>
<div class="scroll"><table id="cells"><thead><tr>{_head(tasks, timings, unit[0], far)}</tr></thead>
<tbody>{rows}</tbody></table></div></section>"""


def note(sentence: str) -> str:
    """A paragraph above the table; nothing without a sentence."""
    return f'<p class="note">{escape(sentence)}</p>' if sentence else ""


def _versus_words(cells: Sequence[Cell]) -> str:
    tests = tests_in_words(cells)
    return f"vs full: what a method scores more on the same samples; p: {tests}. " if tests else ""


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


def _head(tasks: Sequence[str], timings: Timings | None, byte_name: str, far: bool) -> str:
    columns = [
        header("method", "", "ascending", "text"),
        header("protocol", "", "ascending", "text protocol"),
        header("budget", ""),
        header("kept", byte_name, "ascending"),
        header("kept", "% of full", "ascending"),
        *([header("host memory", "% of full", "ascending")] if far else []),
        header("read", "% per step", "ascending"),
        *(header(task, "score %") for task in tasks),
        header("mean", "score %"),
        header("vs full", "points"),
        header("p", "", "ascending"),
        header("recovery", "% of full"),
        header("worst task", "recovery %"),
        header("span kept", "%"),
    ]
    if timings is not None:
        columns += [header("prefill", "ms", "ascending"), header("decode", "tokens/s")]
    return "".join(columns)


def header(name: str, unit: str, start: str = "descending", style: str = "") -> str:
    """A heading that sorts; `start` is the direction of the first click, the better values on top."""
    label = f"{escape(name)}<small>{unit or '&nbsp;'}</small>"
    return f'<th scope="col" data-start="{start}" class="{style}"><button type="button">{label}</button></th>'


def _row(
    cell: Cell, tasks: Sequence[str], timings: Timings | None, unit: tuple[str, float], far: bool
) -> str:
    entries = [
        entry(cell.method, escape(cell.method), "text"),
        entry(cell.protocol, escape(cell.protocol), "text protocol"),
        entry(cell.budget, budget_label(cell.budget)),
        entry(cell.kept_bytes, f"{cell.kept_bytes / unit[1]:,.1f}"),
        entry(cell.percent, f"{cell.percent:.1f}", "size", share=cell.percent / 100),
        *([entry(cell.host_percent, f"{cell.host_percent:.1f}", "size")] if far else []),
        entry(cell.read_percent, f"{cell.read_percent:.1f}", "size", share=cell.read_percent / 100),
        *(_score(cell.tasks.get(task)) for task in tasks),
        _interval(cell.mean, cell.mean_low, cell.mean_high, few=cell.few),
        *versus(cell.versus),
        _recovery(cell.recovery),
        _recovery(cell.worst_recovery, f"{escape(cell.worst_task or '')} "),
        entry(cell.span_kept, "–" if cell.span_kept is None else f"{100 * cell.span_kept:.0f}"),
    ]
    if timings is not None:
        timing = timings.get((cell.method, cell.budget), {})
        for key in ("prefill_ms", "decode_tokens_per_s"):
            median, spread = speed(timing, key)
            entries.append(entry(timing.get(key), f"{median or '–'} <small>{spread}</small>"))
    group = escape(f"{cell.protocol}/{cell.method}")
    style = "reference" if cell.reference else ""
    opening = f'<tr data-protocol="{escape(cell.protocol)}" data-group="{group}" class="{style}">'
    return f"{opening}{''.join(entries)}</tr>"


def entry(key: str | float | None, content: str, style: str = "", *, share: float | None = None) -> str:
    """A table cell that sorts by `key` (None last), with a bar of `share` of its width under the content."""
    sort = "" if key is None else escape(str(key))
    bar = "" if share is None else f' style="--share:{min(1.0, share):.3f}"'
    return f'<td class="{style}" data-sort="{sort}"{bar}>{content}</td>'


def _score(score: MeanScore | None) -> str:
    return entry(None, "–") if score is None else _interval(score.mean, score.low, score.high, few=score.few)


def versus(found: Difference | None) -> list[str]:
    """The difference to the full cache with its interval, and p."""
    if found is None:
        return [entry(None, "–")] * 2
    ends = ""
    if found.low is not None and found.high is not None:
        ends = f" <small>{signed(100 * found.low)} to {signed(100 * found.high)}</small>"
    p = escape(chance(found.p))
    return [entry(found.mean, f"{signed(100 * found.mean)}{ends}"), entry(found.p, p)]


def _interval(mean: float, low: float, high: float, *, few: bool) -> str:
    ends = "n too small" if few else f"{100 * low:.0f}–{100 * high:.0f}"
    content = f"{100 * mean:.0f} <small>{ends}</small>"
    return entry(mean, content, "score", share=mean)


def _recovery(share: float | None, prefix: str = "") -> str:
    if share is None:
        return entry(None, "–")
    style = "good" if share >= 0.95 else "fair" if share >= 0.8 else "poor"
    return entry(share, f'{prefix}<b class="{style}">{100 * share:.0f}</b>')


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
