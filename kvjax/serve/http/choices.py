"""The choices of a response in OpenAI's formats: texts, token ids and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from kvjax.api.streamed_text import widths
from kvjax.serve.device.jobs import GeneratedToken
from kvjax.serve.device.scored import PromptScores, scored
from kvjax.serve.http.schema import CheckedBody
from kvjax.serve.http.service import Service


class Choice(NamedTuple):
    """One answer, or a part of it.

    before: the ids that precede it, from the prompt on. at: how many characters of its answer do.
    """

    text: str
    tokens: list[GeneratedToken]
    reason: str
    before: Sequence[int] = ()
    at: int = 0

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def widths(self, service: Service) -> list[int]:
        """How many characters each token adds."""
        return widths(service.model.tokenizer, self.before, self.ids)


class Head(NamedTuple):
    """An echoed prompt: its text, its ids, and their log-probabilities if they are asked for."""

    text: str
    ids: list[int]
    widths: list[int]
    scored: PromptScores | None


def head_of(service: Service, given: CheckedBody, index: int) -> Head | None:
    """Return the prompt of an answer if it is echoed, with its log-probabilities if they are asked for."""
    if not given.echo:
        return None
    model, ids = service.model, [*given.prompts[index].tokens]
    text = "" if model.tokenizer is None else model.tokenizer.decode(ids, skip_special_tokens=False)
    return Head(
        text,
        ids,
        widths(model.tokenizer, (), ids),
        None if given.logprobs is None else scored(model, ids, given.logprobs),
    )


def choice_of(
    service: Service, given: CheckedBody, index: int, one: Choice, head: Head | None
) -> dict[str, Any]:
    """Build a choice of a response that is not streamed."""
    if given.most == 0:
        one = Choice("", [], "length")
    found: dict[str, Any] = {"index": index, "finish_reason": one.reason, "token_ids": one.ids}
    if given.chat:
        said = None if given.logprobs is None else _chat_logprobs(service, one)
        return found | {"message": {"role": "assistant", "content": one.text}, "logprobs": said}
    text = one.text if head is None else head.text + one.text
    said = None if given.logprobs is None else _logprobs(service, given, one, head)
    return found | {"text": text, "logprobs": said}


def _token(service: Service, id: int) -> str:
    tokenizer = service.model.tokenizer
    return str(id) if tokenizer is None else tokenizer.decode([id], skip_special_tokens=False)


def _logprobs(service: Service, given: CheckedBody, one: Choice, head: Head | None) -> dict[str, Any]:
    """Log-probabilities in the format of completions; the first token of a prompt has none."""
    found = [*one.tokens]
    if head is not None and head.scored is not None:
        rows = zip(head.ids[1:], *(x.tolist() for x in head.scored), strict=True)
        prompt = [GeneratedToken(id, own, [*zip(top, best, strict=True)]) for id, own, top, best in rows]
        found = prompt + found
    ids, known = [token.id for token in found], [token.logprob for token in found]
    top: list[dict[str, float] | None] = [_named(service, token) for token in found]
    if head is not None and head.scored is not None:
        ids, known, top = head.ids[:1] + ids, [None, *known], [None, *top]
    return {
        "tokens": [_token(service, id) for id in ids], "token_logprobs": known,
        "text_offset": _offsets(service, one, head),
        "top_logprobs": top if given.logprobs else None,
    }  # fmt: skip


def _offsets(service: Service, one: Choice, head: Head | None) -> list[int]:
    """Where the text of each token begins in the text of its answer, which an echoed prompt begins."""
    found = one.widths(service) if head is None or head.scored is None else head.widths + one.widths(service)
    return [one.at + begin for begin in [0, *accumulate(found)][:-1]]


def _named(service: Service, token: GeneratedToken) -> dict[str, float]:
    """Return the likeliest tokens and the drawn one, by text; of two with one text, the likelier one."""
    found: dict[str, float] = {}
    for id, logprob in (*token.top, token[:2]):
        found.setdefault(_token(service, id), logprob)
    return found


def _chat_logprobs(service: Service, one: Choice) -> dict[str, Any]:
    """Log-probabilities as chats have them."""

    def said(id: int, logprob: float) -> dict[str, Any]:
        text = _token(service, id)
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}

    return {
        "content": [
            said(*token[:2]) | {"top_logprobs": [said(*top) for top in token.top]} for token in one.tokens
        ]
    }


def part_of(
    service: Service, given: CheckedBody, index: int, one: Choice, head: Head | None
) -> dict[str, Any]:
    """Build the entry of a choice in a server-sent event."""
    reason = one.reason or None
    if not given.chat:
        whole = choice_of(service, given._replace(most=1), index, one, head)
        return whole | {"finish_reason": reason}
    delta = {"content": one.text} if one.text or not reason else {}
    said = None if given.logprobs is None else _chat_logprobs(service, one)
    return {"index": index, "delta": delta, "logprobs": said, "finish_reason": reason}
