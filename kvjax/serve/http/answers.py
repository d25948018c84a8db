"""Answers as they come: tokens of a job handed to an event loop, and their text up to where it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from kvjax.api.streamed_text import Decoding
from kvjax.serve.device.jobs import Job, Prompt
from kvjax.serve.http.service import Service


class Failed(Exception):
    """A request that the engine could not answer; the message says why."""


class Piece(NamedTuple):
    """A token, its log-probability, and the text that is certain with it; id None: text alone, at the end."""

    id: int | None
    logprob: float
    text: str


class Text:
    """The text of tokens as they come, up to the first of some stop texts.

    What may be the beginning of a stop text is held back. over: whether one has come.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.decoding = None if tokenizer is None else Decoding(tokenizer)
        self.stops, self.over = tuple(stops), False
        self.held, self.longest = "", max(map(len, stops), default=1)

    def add(self, id: int) -> str:
        """What a further token makes certain."""
        return "" if self.decoding is None else self._passed(self.decoding.add(id), self.longest - 1)

    def rest(self) -> str:
        """What was held back, where no token follows."""
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


class Answering:
    """One job, asked of a service by a coroutine: its pieces, and then why it ended (`reason`)."""

    def __init__(self, service: Service, given: Prompt, stops: Sequence[str]):
        self.service, self.reason, self.written = service, "", 0
        self.text = Text(service.model.tokenizer, stops)
        loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

        def put(thing: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.queue.put_nowait, thing)

        def told(job: Job) -> None:
            put((job.written[-1], job.logprobs[-1]))

        self.job = service.submit(given, told, lambda _: put(None))

    async def pieces(self) -> AsyncIterator[Piece]:
        """Its pieces as they come; `Failed` where it cannot be answered."""
        while not self.text.over and (got := await self.queue.get()) is not None:
            id, logprob = got
            self.written += 1
            yield Piece(id, logprob, "" if id in self.job.stop else self.text.add(id))
        if self.text.over:
            self.reason = "stop"
            self.service.cancel(self.job)
            return
        if self.job.error or not self.job.over:
            raise Failed(self.job.error or "the request was taken back")
        self.reason = self.job.reason
        if rest := self.text.rest():
            yield Piece(None, 0.0, rest)
            if self.text.over:
                self.reason = "stop"

    def leave(self) -> None:
        """Whoever asked is gone."""
        if not self.reason:
            self.service.cancel(self.job)
