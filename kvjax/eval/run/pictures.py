"""Pictures of what the methods of a comparison score and keep of one prompt, for its report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.api.scores import scores
from kvjax.eval.report.cells import budget_label
from kvjax.eval.report.scores_picture import scores_png
from kvjax.eval.report.scores_section import Picture
from kvjax.eval.run.cellplan import PlannedCell
from kvjax.eval.run.newest import newest_of
from kvjax.eval.run.runner import bare_method
from kvjax.eval.tasks.rows import ASKED_FIRST
from kvjax.eval.tasks.sample import Sample
from kvjax.models.model import Model


def draw_pictures(
    model: Model, entries: Sequence[PlannedCell], protocol: str, sample: Sample
) -> list[Picture]:
    """Draw a picture per method that has scores, at the first of its budgets.

    The prompt is built from the sample by the protocol. The question, unless it is in the prompt, and the
    right answer attend to it; if no answer is known and the question is in the prompt, the model's own answer
    does.
    """
    aware, newest = protocol in ASKED_FIRST, newest_of(protocol, [[sample]])
    prompt = [*sample.context, *(sample.question if aware else ())]
    after = [*(() if aware else sample.question), *sample.answer]
    first: dict[str, PlannedCell] = {}
    for entry in entries:
        keeps = [one.keep for one in entry.method.sentences]
        if any(keep is not None and keep.score is not None for keep in keeps):
            first.setdefault(entry.label, entry)
    return [_picture(model, entry, prompt, after, newest) for entry in first.values()]


def _picture(model: Model, entry: PlannedCell, prompt: list[int], after: list[int], newest: int) -> Picture:
    kept = bare_method(entry.method, newest)
    found = scores(model, [prompt], kept, continuation=[after] if after else None)
    mean = lambda layers: float(np.mean([x.mean() for x in layers if x is not None]))  # noqa: E731
    budget = "" if entry.budget is None else f" · {budget_label(entry.budget)}"
    return Picture(f"{entry.label}{budget}", mean(found.overlap), mean(found.mass), scores_png(found))
