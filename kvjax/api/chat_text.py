"""Chat templates: which text a conversation adds to the text that a cache holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.base.checks import check_text
from kvjax.base.errors import InputError
from kvjax.models.model import Model
from kvjax.models.tokenizer import render_chat, text_ids

Messages = Sequence[Mapping[str, str]]


class CachedText(NamedTuple):
    """What a cache holds: the template's text up to an answer, and the answer's tokens.

    text: the answer without special tokens. stop: the token that ended it; None if there was none.
    """

    asked: str
    ids: tuple[int, ...]
    text: str
    stop: int | None


class NextTurn(NamedTuple):
    """The template's text of a conversation up to the next answer, and the tokens to read for it.

    again: whether these are the tokens of the whole text, because the cache holds another text.
    """

    text: str
    ids: list[int]
    again: bool


def check_chat(model: Model, messages: Messages) -> None:
    """Raise InputError if a model cannot chat, or its template refuses a first question after `messages`."""
    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer, expected one to chat with: use kvjax.generate")
    if model.chat_template is None:
        raise InputError(
            f"{model.name} has no chat template, expected a model that was made to chat: continue plain text "
            "with kvjax.generate, or put the template beside the weights, as chat_template.jinja"
        )
    render_chat(model, [*messages, {"role": "user", "content": "Hello"}])


def ahead(model: Model, messages: Messages, said: CachedText | None) -> NextTurn:
    """Return the tokens to read after what the cache holds (None: nothing), so that it holds all messages."""
    text = render_chat(model, messages)
    check_text(text, "the conversation")
    rest = None if said is None else added(model, text, said)
    if rest is None:
        return NextTurn(text, text_ids(model, text, special_tokens=False), said is not None)
    assert said is not None
    # After the token that precedes it, a text is tokenised as within the whole text.
    before = "" if said.stop is None else model.tokenizer.id_to_token(said.stop)
    ids = text_ids(model, before + rest, special_tokens=False)
    return NextTurn(
        text,
        ids[1:] if before and ids[:1] == [said.stop] else text_ids(model, rest, special_tokens=False),
        False,
    )


def added(model: Model, text: str, said: CachedText) -> str | None:
    """Return the part of a template's text after what a cache holds; None if the cache holds another text.

    Templates may drop thoughts, move a system message or end an answer with another token. White
    space around an answer makes no difference.
    """
    raw = model.tokenizer.decode(list(said.ids), skip_special_tokens=False)
    if not text.startswith(said.asked) or raw.strip() != said.text.strip():
        return None
    rest = text[len(said.asked) :]
    if not (rest := rest.lstrip()).startswith(said.text.strip()):
        return None
    rest = rest[len(said.text.strip()) :]
    if said.stop is None:
        return rest or None
    ends = model.tokenizer.id_to_token(said.stop)
    rest = rest.lstrip()
    return rest[len(ends) :] or None if rest.startswith(ends) else None


def first_messages(system: Any) -> list[dict[str, str]]:
    """Return the messages that a conversation begins with; InputError if `system` is not a string."""
    if system is None:
        return []
    check_text(system, "system")
    return [{"role": "system", "content": system}]
