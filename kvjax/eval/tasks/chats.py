"""The text of a model's chat template around a user's messages, so that prompts can be built of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.base.errors import InputError
from kvjax.eval.tasks.reader import SuiteTokenizer, reader_of
from kvjax.models.model import Model
from kvjax.models.tokenizer import render_chat

_PLACE, _ANSWER, _LATER = "kvjax-prompt", "kvjax-answer", "kvjax-later"


def chat_reader(model: Model) -> SuiteTokenizer:
    """Return the model's tokenizer; without a bos token if the chat template begins with it."""
    reader = reader_of(model)
    return reader if model.chat_template is None else reader._replace(bos=())


def around_user(model: Model, before: Sequence[Mapping[str, Any]] = ()) -> tuple[str, str]:
    """Return the text before and after a user's message after others; empty ones without a chat template.

    Raises InputError for a template that omits the user's message.
    """
    if model.chat_template is None:
        return "", ""
    head, place, tail = render_chat(model, [*before, {"role": "user", "content": _PLACE}]).partition(_PLACE)
    if not place:
        raise InputError(
            f"the chat template of {model.name} leaves out what the user says: mend it, or remove it"
        )
    return head, tail


def between_users(model: Model) -> tuple[str, str, str]:
    """Return the texts before an answer, between it and the user's next message, and after that, in a chat.

    Raises InputError for a template that changes earlier messages when a conversation continues.
    """
    user = {"role": "user", "content": _PLACE}
    answer = {"role": "assistant", "content": _ANSWER}
    opened = render_chat(model, [user])
    whole = render_chat(model, [user, answer, {"role": "user", "content": _LATER}])
    middle, place, end = whole.removeprefix(opened).partition(_LATER)
    first, said, between = middle.partition(_ANSWER)
    if not (whole.startswith(opened) and place and said):
        raise InputError(
            f"the chat template of {model.name} writes a first turn anew when a second one follows, expected "
            "one that only adds to it: leave out the protocol multi-turn, or remove the template"
        )
    return first, between, end
