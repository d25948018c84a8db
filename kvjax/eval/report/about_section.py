"""The first section of the page: the model, the questions, an example of each task, and the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvjax.eval.report.cells import Cell, budget_label
from kvjax.eval.report.comparison_table import PROTOCOLS
from kvjax.eval.report.figures import sample_count


def in_words(count: int) -> str:
    """Write a number of parameters in words.

    >>> in_words(134_515_008), in_words(823_000), in_words(7_615_616_512), in_words(9_000)
    ('135 million', '0.82 million', '7.62 billion', '9,000')
    """
    if count < 100_000:
        return f"{count:,}"
    size, name = (1e9, "billion") if count >= 999_500_000 else (1e6, "million")
    share = count / size
    return f"{share:.2f} {name}" if share < 10 else f"{share:.0f} {name}"


def about_section(metrics: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """Write the section as HTML; values missing from metrics.json are omitted.

    >>> "<b>0.82 million</b> parameters" in about_section({"parameters": 823_000}, [])
    True
    """
    sentences = [model_in_words(metrics), *(_asked(metrics, cells) if cells else ())]
    said = "".join(f"<p>{sentence}</p>" for sentence in sentences if sentence)
    asked = {"samples per task": sample_count(cells)} if cells else {}
    examples = "".join(map(_example, metrics.get("examples", ()))).replace("<details>", "<details open>", 1)
    shown = f"<h3>An example of each task</h3>{examples}" if examples else ""
    run = _failures(metrics) + facts({**metrics, **asked})
    return (
        f'<section id="about"><h2>What was measured</h2>{said}{shown}<h3>How it was run</h3>{run}</section>'
    )


def _failures(metrics: Mapping[str, Any]) -> str:
    """List the methods that failed and are in no table, as HTML."""
    lines = (
        f"<li>{escape(method if budget is None else f'{method} {budget}')}, {escape(protocol)}: "
        f"{escape(error)}</li>"
        for method, budget, protocol, error in metrics.get("failed", ())
    )
    found = "".join(lines)
    return f"<p>These failed and are left out:</p><ul>{found}</ul>" if found else ""


def model_in_words(metrics: Mapping[str, Any]) -> str:
    """Write the sentence about the model, as HTML."""
    name = f"<b>{escape(str(metrics.get('model', 'unnamed model')))}</b>"
    if "parameters" not in metrics:
        return f"The model is {name}."
    return f"The model is {name}, of <b>{in_words(metrics['parameters'])}</b> parameters."


def _asked(metrics: Mapping[str, Any], cells: Sequence[Cell]) -> list[str]:
    """Return the questions, when they were read, and how answers were graded, as HTML."""
    tasks = list(dict.fromkeys(task for cell in cells for task in cell.tasks))
    settings = metrics.get("settings", {})
    length = (
        f", context and question together at most {settings['length']} tokens" if "length" in settings else ""
    )
    many = f"{len(tasks)} tasks" if len(tasks) > 1 else "1 task"
    names = ", ".join(f"<b>{escape(task)}</b>" for task in tasks)
    methods, samples = len({cell.method for cell in cells if not cell.reference}), sample_count(cells)
    samples += " sample" if samples == "1" else " samples"
    sentences = [
        f"It read contexts and answered questions about them, of {many} ({names}), {samples} "
        f"each{length}. {methods} method{'' if methods == 1 else 's'} compressed its KV cache."
    ]
    for protocol in dict.fromkeys(cell.protocol for cell in cells):
        about = PROTOCOLS.get(protocol)
        sentences.append(
            f"<b>{escape(protocol)}</b>: {escape(about)}." if about else f"<b>{escape(protocol)}</b>"
        )
    if settings.get("gold"):
        sentences.append(
            "The right answer was fed token by token, and counts as given where each of its tokens was the "
            "model's likeliest."
        )
    return sentences


def _example(example: Mapping[str, Any]) -> str:
    """Show a task's example: its prompt shortened in the middle, the right answer, and the model's."""
    task, protocol = escape(str(example["task"])), escape(str(example["protocol"]))
    prompt = "".join(map(_piece, example["prompt"]))
    question = f'<b class="question">{escape(str(example["question"]))}</b>' if example["question"] else ""
    said = "".join(_said(one) for one in example["said"])
    return f"""<details><summary><b>{task}</b>: {escape(_short(str(example["question"])))}</summary>
<p class="prompt">{prompt}
{question}</p>
<dl class="said"><div><dt>right answer</dt><dd>{escape(str(example["answer"]))}</dd></div>{said}</dl>
<p class="muted">{protocol}; what the answer needs is <span class="needed">underlined</span>.</p></details>"""


def _short(text: str, most: int = 110) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"… {text[-most:].partition(' ')[2] or text[-most:]}"


def _piece(piece: Mapping[str, Any]) -> str:
    if "left_out" in piece:
        return f'<span class="cut">… {int(piece["left_out"])} tokens …</span>'
    text = escape(str(piece["text"]))
    return f'<span class="needed">{text}</span>' if piece["needed"] else text


def _said(said: Mapping[str, Any]) -> str:
    budget = "" if said["budget"] is None else f" at {budget_label(said['budget'])}"
    grade = "good" if said["score"] >= 1 else "fair" if said["score"] > 0 else "poor"
    answer = escape(str(said["prediction"])) or "nothing"
    name = "full cache" if said["method"] == "full" else f"{said['method']}{budget}"
    score = f"<small>({100 * said['score']:.0f}%)</small>"
    return f'<div><dt>{escape(name)}</dt><dd class="{grade}">{answer} {score}</dd></div>'


def facts(metrics: Mapping[str, Any]) -> str:
    """Return the settings of the run: device, revision, seeds, command, presets, versions."""
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
    return f'<dl class="facts">{_pairs(shown)}</dl>{details}'


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
