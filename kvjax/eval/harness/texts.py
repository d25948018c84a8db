"""Tokenises texts of requests like the harness' own `hf` backend, and finds where their context ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.base.checks import check_text
from kvjax.base.errors import InputError
from kvjax.models.model import Model
from kvjax.models.tokenizer import render_chat


class Marker(NamedTuple):
    """A string at whose last occurrence a request's context ends; drop: it is not part of the prompt.

    >>> Marker("Q:", False).split("A. Q: one Q: two"), Marker("|", True).split("A.|B")
    (('A. Q: one Q: two', 10), ('A.B', 2))
    """

    text: str
    drop: bool = False

    def split(self, prompt: str) -> tuple[str, int]:
        """Split the prompt, without a dropped marker, at the character at which the question begins.

        InputError if the marker does not occur.
        """
        before, found, after = prompt.rpartition(self.text)
        if not found:
            raise InputError(
                f"the marker {self.text!r} is not in the context {_shown(prompt)}, expected it in every one: "
                "give a string that stands before the question, or leave --marker out"
            )
        if self.drop:
            before = before.replace(self.text, "")
            return before + after, len(before)
        return prompt, len(before)


class Encoded(NamedTuple):
    """A prompt's token ids, and how many of them are the context to compress: at least 1."""

    ids: list[int]
    context: int


class HarnessTokenizer:
    """A model's tokenizer as the `hf` backend uses it. InputError if the model has none."""

    def __init__(self, model: Model, marker: Marker | None = None):
        if model.tokenizer is None:
            raise InputError(
                f"{model.name} has no tokenizer, and tasks are texts: put tokenizer.json beside its weights"
            )
        if marker is not None and not marker.text:
            raise InputError("the marker is empty, expected a string that stands before the question")
        self.model, self.tokenizer, self.marker = model, model.tokenizer, marker
        ends, starts = self._named("eos_token"), self._named("bos_token")
        end = next((i for i in (ends, *model.stop_ids, starts) if i is not None), None)
        start = end if starts is None else starts
        if start is None or end is None:
            raise InputError(
                f"{model.name} names no token that begins or ends a text, expected bos_token or eos_token in "
                "tokenizer_config.json: an empty context has nothing else to stand for it"
            )
        self.start: int = start
        self.end: int = end
        self.opening, self.ending = (self.decode([i], special=True) for i in (start, end))

    def _named(self, name: str) -> int | None:
        text = self.model.special_tokens.get(name)
        return None if text is None else self.tokenizer.token_to_id(text)

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Token ids. special: with those that open a text; by default if it does not begin with one."""
        return self._encoding(text, special).ids

    def _encoding(self, text: str, special: bool | None) -> Any:
        check_text(text)
        special = not text.startswith(self.opening) if special is None else special
        try:
            return self.tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # the library raises bare Exception
            raise InputError(
                f"the tokenizer of {self.model.name} cannot read {_shown(text)} ({error}): expected texts in "
                "the model's own words"
            ) from error

    def prompt(self, text: str) -> Encoded:
        """Return a prompt as tokens: the context is the part before the marker, or all but the last token.

        A token over the border belongs to the question. The last token is always read over the compressed
        cache, and so is whatever follows it.
        """
        if self.marker is None:
            ids = self.encode(text)
            return Encoded(ids, max(1, len(ids) - 1))
        text, at = self.marker.split(text)
        found = self._encoding(text, None)
        context = next((i for i, (_, end) in enumerate(found.offsets) if end > at), len(found.ids))
        return Encoded(found.ids, max(1, min(context, len(found.ids) - 1)))

    def without_marker(self, text: str) -> str:
        """Return the prompt as the model reads it."""
        return text if self.marker is None else self.marker.split(text)[0]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def chat(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
        """Write a conversation in the chat format. answer: whether the assistant's answer begins at its end.

        Otherwise the last message is to be continued, and nothing follows its content. InputError if the
        model has no template, or the template rejects it.
        """
        text = render_chat(self.model, messages, answer)
        if answer:
            return text
        content = str(messages[-1]["content"])
        at = text.rfind(content.strip())
        if at < 0:
            raise InputError(
                f"the chat template of {self.model.name} changes the message {_shown(content)}, which is to "
                "be continued: leave --apply_chat_template out"
            )
        # Templates may strip the message; the text is then cut after the stripped message.
        whole = content.lstrip()
        return text[: at + len(whole if text.startswith(whole, at) else content.strip())]


def _shown(text: str) -> str:
    """Return the beginning of a text, for messages."""
    return repr(text if len(text) <= 60 else text[:60] + "…")
