"""The defaults of a comparison by model: it may read English or the recall language."""

from __future__ import annotations

from typing import NamedTuple

from kvjax.eval.run.cellplan import FIRST, FIRST_IN_ENGLISH
from kvjax.eval.tasks.sample import TASKS
from kvjax.eval.tasks.suite import default_tasks
from kvjax.models.model import Model


class Usual(NamedTuple):
    """Arguments of `compare`; samples are contexts per protocol."""

    methods: tuple[str, ...]
    protocols: tuple[str, ...]
    samples: int
    gold: bool


RECALL = Usual(FIRST, ("agnostic", "aware"), 32, False)
# Reading a thousand tokens takes a model of a hundred million parameters seconds on a CPU. So there are fewer
# contexts, one protocol, and right answers are fed: ten minutes suffice.
ENGLISH = Usual(FIRST_IN_ENGLISH, ("aware",), 8, True)


def usual_of(model: Model) -> Usual:
    """Return the arguments that a model is compared with.

    >>> from kvjax.io.load import load
    >>> usual_of(load("recall-tiny")).samples
    32
    """
    return RECALL if default_tasks(model) == TASKS else ENGLISH
