"""Answers while they are generated: passes tokens to an event loop, and decodes them up to a stop text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from kvjax.api.streamed_text import Decoding
from kvjax.serve.device.jobs import GeneratedToken, Job, Prompt
from kvjax.serve.http.service import Service


class Failed(Exception):
    """The engine could not answer a request; the message says why."""


class AnswerPiece(NamedTuple):
    """A token, and the text that can no longer change; at the end token may be None."""

    token: GeneratedToken | None
    text: str


class AnswerText:
    """The text of generated tokens, up to the first occurrence of a stop text.

    Text that may be the beginning of a stop text is held back. before: the ids of the prompt that the text
    continues. over: whether a stop text has occurred.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], before: Sequence[int] = ()):
        self.decoding = None if tokenizer is None else Decoding(tokenizer, before)
        self.stops, self.over = tuple(stops), False
        self.held, self.longest = "", max(map(len, stops), default=1)

    def add(self, id: int) -> str:
        """Append a token; return the text that later tokens cannot change."""
        return "" if self.decoding is None else self._passed(self.decoding.add(id), self.longest - 1)

    def rest(self) -> str:
        """Return the text that was held back, when no token follows."""
        return "" if self.decoding is None or self.over else self._passed(self.decoding.rest(), 0)

    def _passed(self, new: str, keep: int) -> str:
        text = self.held + new
        found = [at for at in map(text.find, self.stops) if at >= 0]
        if found:
            self.over, self.held = True, ""
            return text[: min(found)]
        cut = len(text) - keep if len(text) > keep else 0
        self.held = text[cut:]
        return text[:cut]


class AnswerStream:
    """One request of a coroutine to a service: its pieces, and then why it ended (`reason`).

    continues: whether its text continues that of the prompt, and does not answer it.
    """

    def __init__(self, service: Service, given: Prompt, stops: Sequence[str], continues: bool):
        self.service, self.reason, self.written = service, "", 0
        self.text = AnswerText(service.model.tokenizer, stops, [*given.tokens] if continues else ())
        loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

        def put(thing: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.queue.put_nowait, thing)

        def told(job: Job) -> None:
            put(GeneratedToken(job.written[-1], job.logprobs[-1], job.tops[-1]))

        self.job = service.submit(given, told, lambda _: put(None))

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """Yield its pieces as they are generated; raise `Failed` if it cannot be answered."""
        while not self.text.over and (got := await self.queue.get()) is not None:
            self.written += 1
            yield AnswerPiece(got, "" if got.id in self.job.stop else self.text.add(got.id))
        if self.text.over:
            self.reason = "stop"
            self.service.cancel(self.job)
            return
        if self.job.error or not self.job.over:
            raise Failed(self.job.error or "the request was taken back")
        self.reason = self.job.reason
        if rest := self.text.rest():
            yield AnswerPiece(None, rest)
            if self.text.over:
                self.reason = "stop"

    def leave(self) -> None:
        """Cancel the request unless it has ended, because the client has disconnected."""
        if not self.reason:
            self.service.cancel(self.job)
