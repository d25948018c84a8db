"""Prompts on the page, with the tokens that each method kept; a script draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.eval.report.cells import budget_label

Example = Mapping[str, Any]

EXAMPLES = """<section><h2>What each method kept</h2>
<p class="muted">Kept by 0% <span class="ramp"></span> 100% of the (layer, head) pairs;
the answer needs the <span class="needed">underlined</span> tokens.</p>
<div class="controls"><label><span class="label">prompt</span><select id="prompt"></select></label>
<label><span class="label">method</span><select id="run"></select></label></div>
<p id="verdict"></p><div id="text"></div>
<h3>The whole prompt at a glance</h3><p class="muted">Click a method to read its text above.</p>
<div id="strips"></div></section>"""


def prompts_of(examples: Sequence[Example]) -> list[dict[str, Any]]:
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
